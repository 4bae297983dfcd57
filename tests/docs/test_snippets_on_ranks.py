"""What docs/ shows of several ranks: pipelines, tensor plans, a model that drifts apart."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.distributed.local_ranks import free_port
from tests.support import nano_gpt
from tests.support.pages import find_rows, read_page, snippet, stand_ins
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(page_code, names=None):
    """The names that a snippet leaves."""
    space = {} if names is None else names
    exec(page_code, space)
    return space


def say(action, error=halfmesh.InputError):
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


# --- docs/nodes.md --------------------------------------------------------------------------------------------------


def launch_first(rank, world_size, port, folder):
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()})
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    x, y = samples(60)
    names = run(snippet("nodes.md", "before.py"), {"x": x, "y": y})
    context, launch = names["engine"].context, names["launch"]
    assert (launch.rank, launch.world_size) == (context.rank, context.size)
    assert (launch.dp_rank, launch.dp_size, launch.device) == (context.dp_rank, context.dp_size, context.device)
    return launch.dp_rank, names["rows"].tolist(), names["loss"].item()


def test_ranks_are_known_before_the_model(tmp_path):
    (tmp_path / "config.py").write_text(snippet("nodes.md", "config.py"))
    found = run_ranks(launch_first, 4, free_port(), tmp_path, init=False, fresh=True)
    assert [data_rank for data_rank, *_ in found] == [0, 0, 1, 1]
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]
    assert all(loss < 0.6 for *_, loss in found)


# --- docs/pipeline.md -----------------------------------------------------------------------------------------------


def samples(count, seed=1):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def make_engine(model, **pipeline):
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=8)
    return halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        loader,
        {"parallel": {"pipeline": {"size": 2, "microbatches": 4} | pipeline}},
        eval_dataloader=loader,
        device=rank_device(),
    )


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

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


def make_tower(depth):
    """The model that the page describes. Its partitioner is registered in this process."""
    halfmesh.PARTITIONERS.unregister("tower")
    run(snippet("pipeline.md", "my_partition.py"), {"Tower": Tower})
    torch.manual_seed(0)
    return Tower(8, depth)


def run_loop(rank, world_size):
    engine = make_engine(make_tower(3))
    names = run(snippet("pipeline.md", "train.py"), {"engine": engine, "torch": torch, "total": 0.0})
    part = sorted(engine.model.state_dict())
    return names["total"], part, list(close_whole(engine).values())


def run_alone(rank, world_size):
    model = here(make_tower(3))
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
    for x, y in zip(*(part.split(8) for part in here(samples(24))), strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    halfmesh.PARTITIONERS.unregister("tower")
    return total, [p.detach() for p in model.parameters()]


@pytest.mark.sends
def test_the_loop_under_a_pipeline_is_that_of_one_process():
    ((total, params),) = run_ranks(run_alone, 1)
    for rank, (found, names, trained) in enumerate(run_ranks(run_loop, 2)):
        assert found == pytest.approx(total, rel=1e-6)
        assert any(name.startswith("embed") for name in names) == (rank == 0)
        assert any(name.startswith("head") for name in names) == (rank == 1)
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(trained, params, strict=True))


def cut(rank, world_size):
    """Where each of the page's ways cuts, as this rank's layers; the output is that of one process."""
    found = {}
    for name in ("tower", "points", "skips"):
        changes = {}
        if name == "skips":
            run(snippet("extending.md", "my_partitioner.py"), {"Skips": Skips})
            model = Skips(8)
        else:
            model = make_tower(4)
        if name == "points":
            halfmesh.PARTITIONERS.unregister("tower")
            changes = run(snippet("pipeline.md", "split_config.py"))["parallel"]["pipeline"]
        x, _ = here(samples(8))
        expected = here(model).eval()(x).detach()
        with make_engine(model, **changes) as engine:
            output = engine.eval()(x)
            assert not engine.context.is_last_stage or torch.allclose(output, expected, atol=1e-6)
            found[name] = {key.rpartition(".")[0] for key in engine.model.state_dict()}
    return found


@pytest.mark.sends
def test_its_partitions():
    first, second = run_ranks(cut, 2)
    half = {"embed", "layers.0", "layers.1"}
    assert first == {"tower": half, "points": half, "skips": {"first"}}
    assert not any(first[name] & second[name] for name in first)


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


WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved")
"""Others keep activations for the gradients of weights, after this hook."""


def rows_of_schedules():
    return {row[0].strip("`"): row[1:] for row in find_rows(read_page("pipeline.md"), "schedule | order")}


def count_activations(rank, world_size):
    """The most layers that wait on a rank, in microbatches of all of its layers."""
    found = {}
    for name in WHOLE_BACKWARDS:
        chunks = 2 if name == "interleaved" else 1
        engine = make_engine(nn.Sequential(*(Counted() for _ in range(2 * chunks))), schedule=name, chunks=chunks)
        x, y = here(samples(8))
        loss = engine.criterion(engine(x), y)
        Counted.alive = Counted.most = 0
        engine.backward(loss)
        found[name] = Counted.most / chunks
        engine.close()
    return found


@pytest.mark.sends
def test_the_activations_that_a_schedule_keeps():
    numbers = {"p": 2, "m": 4, "v": 2}
    rows = rows_of_schedules()
    expected = {name: eval(rows[name][3].partition(",")[0], numbers) for name in WHOLE_BACKWARDS}
    assert run_ranks(count_activations, 2)[0] == expected == {"gpipe": 4, "1f1b": 2, "interleaved": 2.5}


# --- docs/context-parallel.md ---------------------------------------------------------------------------------------


def train_decoder(rank, world_size):
    names = run(snippet("context-parallel.md", "decoder.py"))
    torch.manual_seed(0)
    model = names["Decoder"](words=32, length=16)
    engine = halfmesh.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        config={"parallel": {"context": 2}},
        device=rank_device(),
    )
    names |= {"engine": engine, "ids": here(torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0)))}
    for _ in range(20):
        run(snippet("context-parallel.md", "train.py"), names)
    assert names["logits"].shape == (4, 8, 32)
    return names["loss"].item()


def test_a_decoder_trains_on_sharded_sequences():
    one, other = run_ranks(train_decoder, 2)
    assert one == other < 3.0


# --- docs/tensor-parallel.md ----------------------------------------------------------------------------------------


def divide(rank, world_size):
    """Shapes after initialize. The output is that of one process."""
    halfmesh.TENSOR_PLANS.unregister("my_block")
    names = run(snippet("tensor-parallel.md", "my_block.py"))
    model, (x, _), _ = names["build"]()
    x = here(x)
    expected = here(model).eval()(x)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfmesh.initialize(model, sgd, config={"parallel": {"tensor": 2}}, device=rank_device()) as engine:
        assert torch.allclose(engine.eval()(x), expected, atol=1e-6)
        return {name: tuple(param.shape) for name, param in engine.model.named_parameters()}


def test_a_tensor_plan_divides_a_layer():
    for shapes in run_ranks(divide, 2):
        assert (shapes["0.up.weight"], shapes["0.down.weight"]) == ((32, 16), (16, 32))
        assert shapes["1.weight"] == (3, 16)


def test_the_plan_of_nano_gpt_is_the_one_that_trains():
    assert run(snippet("tensor-parallel.md", "nano_gpt.py"))["parallel"]["tensor"]["plan"] == nano_gpt.PLAN


# --- docs/nodes.md ----------------------------------------------------------------------------------------------------


def drift(rank, world_size):
    names = stand_ins()
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    engine = halfmesh.initialize(*given, {"debug": "sync"})

    def train():
        for images, labels in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(images), labels))
            engine.step()
            if engine.global_step == 3 and rank == 1:
                with torch.no_grad():  # the mistake: on one rank only
                    names["model"][0].bias[2] += 1e-3

    return say(train, halfmesh.SyncError)


def test_ranks_that_drift_apart():
    def rounded(text):
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)

    page = read_page("nodes.md")
    shown = page[page.index("```\nafter step 4") + 4 :].partition("\n```")[0]
    first, second = run_ranks(drift, 2)
    assert first == second
    assert rounded(first).startswith(rounded(shown) + "\nLook for ")


# -- checkpoints.md: weights for other programs ----------------------------------------------------------------------


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16, use_cache=False, tie_word_embeddings=True))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def save_pretrained(rank, world_size, parallel, folder):
    """After an update."""
    model = make_llama()
    config = {"parallel": parallel, "bf16": {"mode": "naive"}}
    engine = halfmesh.initialize(model, adamw(model), language_loss, config=config, device=rank_device())
    ids = here(torch.arange(32).view(4, 8) % 16)
    rows = ids.chunk(engine.context.dp_size)[engine.context.dp_rank]
    engine.backward(engine.criterion(engine(input_ids=rows), rows))
    engine.step()
    engine.save_pretrained(folder)
    weights = engine.full_state_dict()
    engine.close()
    return weights


def language_loss(output, ids):
    return nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), ids.flatten())


@pytest.mark.promise("whole weights from a sharded model")
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"data": "fsdp"},
        pytest.param({"pipeline": {"size": 2, "microbatches": 2}}, marks=pytest.mark.sends),
    ],
    ids=lambda parallel: next(iter(parallel)),
)
def test_a_sharded_model_becomes_a_folder_of_hugging_face(parallel, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = str(tmp_path / "model")
    weights, other = run_ranks(save_pretrained, 2, parallel, folder)
    assert other == {}
    assert not torch.equal(weights["lm_head.weight"], make_llama().state_dict()["lm_head.weight"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(loaded) is transformers.LlamaForCausalLM
    torch.testing.assert_close(dict(loaded.state_dict()), weights, rtol=0, atol=0)
