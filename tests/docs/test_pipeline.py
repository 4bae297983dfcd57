"""docs/pipeline.md tells the truth: its Python runs on ranks, its messages, keys and formulas are the real ones."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.compat import Layout, check, get_layout
from halfmesh.config.schema import PipelineConfig
from halfmesh.parallel.registries import SCHEDULES
from tests.docs.test_readme import find_python, find_rows
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text()


def config_of(name):
    names = {}
    exec(find_python(PAGE, name), names)
    return {key: value for key, value in names.items() if key in ("parallel", "bf16")}


def model_of(name, class_name, *args):
    """A model whose partitioner the page registers, in this process."""
    names = {}
    exec(find_python(PAGE, name), names)
    torch.manual_seed(0)
    return names[class_name](*args)


def samples(count, seed=1):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def make_engine(model, config=None, **changes):
    pipeline = {"size": 2, "microbatches": 4} | changes
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=8)
    return halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        loader,
        config or {"parallel": {"pipeline": pipeline}},
        eval_dataloader=loader,
        device="cpu",
    )


def test_its_configs_are_valid():
    for name, ranks, layout in (("config.py", 8, Layout(2, 4, 1)), ("split_config.py", 2, Layout(2, 1, 1))):
        config = halfmesh.load_config(config_of(name))
        assert check(config, ranks) == []
        assert get_layout(config, ranks) == layout
    both = config_of("config.py")["parallel"] | {"tensor": 2}
    assert get_layout(halfmesh.load_config({"parallel": both}), 8) == Layout(2, 2, 2)


def test_the_table_of_keys():
    rows = find_rows(PAGE, "key")
    assert {row[0].strip("`"): eval(row[1].strip("`")) for row in rows} == PipelineConfig().model_dump()


# --- the loop -------------------------------------------------------------------------------------------------------


def run_loop(rank, world_size):
    """The page's loop with the page's config, and the same loop in one process."""
    engine = make_engine(model_of("my_partition.py", "Tower", 8, 3), config_of("config.py") | {"bf16": None})
    names = {"engine": engine, "torch": torch, "total": 0.0, "hits": 0}
    exec(find_python(PAGE, "train.py"), names)
    part = sorted(engine.model.state_dict())
    engine.close()
    return names["total"], int(names["hits"]), part, [p.detach() for p in engine.model.parameters()]


def run_alone():
    model = model_of("my_partition.py", "Tower", 8, 3)
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
    for x, y in zip(*(part.split(8) for part in samples(24)), strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    x, y = samples(24)
    return total, int((model(x).argmax(1) == y).sum()), [p.detach() for p in model.parameters()]


@pytest.mark.distributed
def test_the_loop():
    total, hits, params = run_alone()
    halfmesh.PARTITIONERS.unregister("tower")
    for rank, found in enumerate(run_ranks(run_loop, 2)):
        assert found[0] == pytest.approx(total, rel=1e-6)
        assert found[1] == hits
        assert any(name.startswith("embed") for name in found[2]) == (rank == 0)
        assert any(name.startswith("head") for name in found[2]) == (rank == 1)
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(found[3], params, strict=True))


def say(action):
    with pytest.raises(halfmesh.InputError) as caught:
        action()
    return str(caught.value)


def provoke(rank, world_size):
    """What each row of the table is told."""
    engine = make_engine(model_of("my_partition.py", "Tower", 8, 3))
    images, labels = samples(8)
    output, other = engine(images), engine(images)
    loss = engine.criterion(output, labels)
    assert "not computed yet" in str(loss)
    told = {
        "`output.argmax(1)`": say(lambda: output.argmax(1)),
        "`loss.item()`, `loss / 2`": say(lambda: loss / 2),
        "`loss.backward()`": say(lambda: loss.backward()),
        "`output.loss`": say(lambda: output.loss),
        "`engine.criterion([output, other], labels)`": say(lambda: engine.criterion([output, other], labels)),
        "`engine.backward(tensor)`": say(lambda: engine.backward(torch.ones(()))),
        "`engine.backward(loss, retain_graph=True)`": say(lambda: engine.backward(loss, retain_graph=True)),
        "`engine.model(images)`": say(lambda: engine.model(images)),
    }
    assert say(lambda: loss.item()) == told["`loss.item()`, `loss / 2`"]
    engine.backward(loss)
    assert loss.item() > 0
    told["the same after backward"] = say(lambda: output.argmax(1))
    told["`engine.backward(loss)` again"] = say(lambda: engine.backward(loss))
    engine.close()
    halfmesh.PARTITIONERS.unregister("tower")
    engine = make_engine(model_of("my_partition.py", "Tower", 8, 3))
    told["different images on the stages of one copy"] = say(lambda: engine(samples(8, seed=rank)[0]))
    return told


@pytest.mark.distributed
def test_the_table_of_messages():
    rows = dict(find_rows(PAGE, "what you write"))
    for told in run_ranks(provoke, 2):
        assert told.keys() == rows.keys()
        for written, message in rows.items():
            assert message in told[written], written


def read_outputs(rank, world_size):
    """With keep_outputs the output, and with eval_outputs="last" what the ranks have."""
    engine = make_engine(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), keep_outputs=True, eval_outputs="last")
    images, labels = samples(8)
    engine.eval()
    expected = engine(images)
    has_it = bool(engine.context.is_last_stage)
    told = None if has_it else say(lambda: expected.argmax(1))
    engine.train()
    output = engine(images)
    engine.backward(engine.criterion(output, labels))
    close = torch.allclose(output.value(), expected) if has_it else None
    return tuple(output.argmax(1).shape), close, told


@pytest.mark.distributed
def test_outputs():
    first, last = run_ranks(read_outputs, 2)
    assert last == ((8,), True, None)
    assert first[:2] == ((8,), None)
    assert "only the ranks with the last stage have the output" in first[2]


# --- where it is cut ------------------------------------------------------------------------------------------------


def cut_and_compare(rank, world_size, name):
    """This rank's parameters, and whether the output is that of one process."""
    model = model_of("my_partitioner.py", "Skips", 8) if name == "skips" else model_of("my_partition.py", "Tower", 8, 4)
    x, _ = samples(8)
    expected = model.eval()(x).detach()
    if name == "points":
        halfmesh.PARTITIONERS.unregister("tower")
    config = config_of("split_config.py") if name == "points" else None
    engine = make_engine(model, config, balance="time" if name == "time" else "parameters")
    assert torch.allclose(engine.eval()(x), expected, atol=1e-6)
    return None if name == "time" else {key.rpartition(".")[0] for key in engine.model.state_dict()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("tower", {"embed", "layers.0", "layers.1"}),
        ("points", {"embed", "layers.0", "layers.1"}),
        ("skips", {"first"}),
        ("time", None),
    ],
)
def test_its_partitions(name, first):
    mine, others = run_ranks(cut_and_compare, 2, name)
    assert mine == first
    assert name == "time" or not mine & others


def test_a_model_that_nobody_knows_is_told_of_split_points():
    from halfmesh.parallel.pipeline.partition import resolve

    model = model_of("my_partition.py", "Tower", 8, 4)
    halfmesh.PARTITIONERS.unregister("tower")
    _, [problem] = resolve(model, 2, 1)
    assert "for example partition=('layers.2',)" in problem


# --- schedules and microbatches -------------------------------------------------------------------------------------


def rows_of_schedules():
    return {row[0].strip("`"): row[1:] for row in find_rows(PAGE, "schedule | order")}


def test_the_table_of_schedules():
    rows = rows_of_schedules()
    assert rows.keys() == set(SCHEDULES.names())
    for name, (_, _, waiting, _) in rows.items():
        for p, m, v in ((2, 4, 2), (4, 8, 3)):
            expected = eval(waiting, {"p": p, "m": m, "v": v})
            assert SCHEDULES.get(name).bubble(p, v, m) == pytest.approx(expected), name


class Counted(nn.Module):
    """A layer that counts how many of its kind wait for their backward."""

    alive, most = 0, 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x)
        if type(x) is torch.Tensor and x.requires_grad:  # not where shapes are worked out
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)
            x.register_hook(Counted.forget)
        return x

    @staticmethod
    def forget(grad):
        Counted.alive -= 1


def count_activations(rank, world_size):
    """The most layers that wait on the first rank, in microbatches of all of its layers."""
    found = {}
    for name in rows_of_schedules():
        chunks = 2 if name == "interleaved" else 1
        model = nn.Sequential(*(Counted() for _ in range(2 * chunks)))
        engine = make_engine(model, schedule=name, chunks=chunks)
        loss = engine.criterion(engine(samples(8)[0]), samples(8)[1])
        Counted.alive = Counted.most = 0
        engine.backward(loss)
        found[name] = Counted.most / chunks
        engine.close()
    return found


@pytest.mark.distributed
def test_activations():
    numbers = {"p": 2, "m": 4, "v": 2}
    expected = {name: eval(row[3].partition(",")[0], numbers) for name, row in rows_of_schedules().items()}
    found, _ = run_ranks(count_activations, 2)
    assert found == expected == {"gpipe": 4, "1f1b": 2, "interleaved": 2.5}


def train_short_batches(rank, world_size):
    """How often BatchNorm counts for batches of 8 and 10 samples; what is told of 7 in an interleaved schedule, and of
    a loader whose batches the microbatches do not divide."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Identity())
    counts = []
    with make_engine(model) as engine:
        for rows in (8, 10):
            x, y = samples(rows)
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            counts.append(None if model[0].num_batches_tracked is None else int(model[0].num_batches_tracked))
    engine = make_engine(model, schedule="interleaved", chunks=2)
    told = say(lambda: engine(samples(7)[0]))
    engine.close()
    with pytest.raises(halfmesh.IncompatibleConfigError) as caught:
        make_engine(model, microbatches=3)
    return counts, told, str(caught.value)


@pytest.mark.distributed
def test_microbatches():
    (counts, told, refused), _ = run_ranks(train_short_batches, 2)
    assert counts == [4, 4 + 5]
    assert re.search("a batch of 7 samples cannot be split .* drop_last=True", told)
    assert "microbatches=3 does not divide the dataloader's batch_size=8" in refused
