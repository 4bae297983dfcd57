"""What docs/ shows of several ranks: pipelines, tensor plans, a model that drifts apart."""

import os
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.distributed.local_ranks import free_port
from tests.support import nano_gpt
from tests.support.pages import check, read_page, shown_commands, snippet, stand_ins
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def execute(page, name, **space):
    """The names that a snippet leaves."""
    exec(snippet(page, name), space)
    return space


def samples(count, seed=1):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def launch_first(rank, world_size, port, folder):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    names = execute("nodes.md", "before.py")
    assert names["launch"].dp_rank == names["engine"].context.dp_rank
    return names["launch"].dp_rank, names["rows"].tolist(), names["loss"].item()


def test_ranks_are_known_before_the_model(tmp_path):
    (tmp_path / "config.py").write_text(snippet("nodes.md", "config.py"))
    found = run_ranks(launch_first, 4, free_port(), tmp_path, init=False, fresh=True)
    assert [data_rank for data_rank, *_ in found] == [0, 0, 1, 1]
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]
    assert all(loss < 0.6 for *_, loss in found)


def make_engine(model, **parallel):
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=8)
    sgd, keys = torch.optim.SGD(model.parameters(), lr=0.1), {"eval_dataloader": loader, "device": rank_device()}
    parallel = parallel or {"pipeline": {"size": 2, "microbatches": 4}}
    return halfmesh.initialize(model, sgd, nn.CrossEntropyLoss(), loader, {"parallel": parallel}, **keys)


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.head = nn.Linear(6, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Skips(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.second(x).tanh())


def run_loop(rank, world_size):
    halfmesh.PARTITIONERS.unregister("tower")
    execute("pipeline.md", "my_partition.py", Tower=Tower)
    torch.manual_seed(0)
    with make_engine(Tower(8, 3)) as engine:
        names = execute("pipeline.md", "train.py", engine=engine, torch=torch, total=0.0)
    return names["total"], sorted(engine.model.state_dict())


@pytest.mark.sends
def test_the_loop_under_a_pipeline():
    (total, first), (again, last) = run_ranks(run_loop, 2)
    assert 0 < total == again
    assert first[0].startswith("embed")
    assert last[0].startswith("head")


def output_as_alone(model, x, **parallel):
    """The parameters after initialize; the output is that of one process."""
    x = here(x)
    expected = here(model).eval()(x).detach()
    with make_engine(model, **parallel) as engine:
        output = engine.eval()(x)
        assert not engine.context.is_last_stage or torch.allclose(output, expected, atol=1e-6)
        return {name: tuple(param.shape) for name, param in engine.model.named_parameters()}


def cut_and_divide(rank, world_size):
    execute("extending.md", "my_partitioner.py", Skips=Skips)
    halfmesh.TENSOR_PLANS.unregister("my_block")
    model, (x, _), _ = execute("tensor-parallel.md", "my_block.py")["build"]()
    return output_as_alone(Skips(8), samples(8)[0]), output_as_alone(model, x, tensor=2)


@pytest.mark.sends
def test_a_partitioner_cuts_and_a_tensor_plan_divides():
    for layers, (stage, shapes) in zip(({"first"}, {"second", "head"}), run_ranks(cut_and_divide, 2), strict=True):
        assert {name.rpartition(".")[0] for name in stage} == layers
        assert (shapes["0.up.weight"], shapes["0.down.weight"]) == ((32, 16), (16, 32))
        assert shapes["1.weight"] == (3, 16)


def train_decoder(rank, world_size):
    names = execute("context-parallel.md", "decoder.py")
    torch.manual_seed(0)
    model, config = names["Decoder"](words=32, length=16), {"parallel": {"context": 2}}
    adamw, options = torch.optim.AdamW(model.parameters(), lr=0.01), {"config": config, "device": rank_device()}
    criterion = lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten())  # noqa: E731
    names["engine"] = halfmesh.initialize(model, adamw, criterion, **options)
    names["ids"] = here(torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0)))
    for _ in range(20):
        exec(snippet("context-parallel.md", "train.py"), names)
    return names["loss"].item()


def test_a_decoder_trains_on_sharded_sequences():
    one, other = run_ranks(train_decoder, 2)
    assert one == other < 3.0


def test_the_plan_of_nano_gpt_is_the_one_that_trains():
    assert execute("tensor-parallel.md", "nano_gpt.py")["parallel"]["tensor"]["plan"] == nano_gpt.PLAN


def drift(rank, world_size):
    names = stand_ins()
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    engine = halfmesh.initialize(*given, {"debug": "sync"})
    try:
        for images, labels in engine.dataloader:
            engine.backward(engine.criterion(engine(images), labels))
            engine.step()
            if engine.global_step == 3 and rank == 1:
                names["model"][0].bias.data[2] += 1e-3  # the mistake: on one rank only
    except halfmesh.SyncError as error:
        return str(error)


def test_ranks_that_drift_apart():
    def rounded(text):
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)

    page = read_page("nodes.md")
    shown = page[page.index("```\nafter step 4") + 4 :].partition("\n```")[0]
    first, second = run_ranks(drift, 2)
    assert first == second
    assert rounded(first).startswith(rounded(shown) + "\nLook for ")


def test_what_verify_shows(run, tmp_path, monkeypatch):
    """From a folder of snippets, from which ranks import, too."""
    monkeypatch.syspath_prepend(tmp_path)
    run("verify.md", files=("my_model.py", "config.py"))
    ((command, expected),) = shown_commands("verify.md")
    figures = r"[\d.]+ s\)|by [\d.e+-]+|[\d.e-]+ of what"  # seconds, and shares of what is allowed
    assert re.sub(figures, "", check(command)) == re.sub(figures, "", expected)
    run("tensor-parallel.md", files=("config.py", "my_block.py"))
    assert "equal" in check("$ halfmesh verify config.py --model my_block:build --world-size 2")
