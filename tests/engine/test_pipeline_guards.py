"""What an engine under a pipeline refuses, before anything runs or on all ranks alike, and with what words."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.errors import ConfigError, IncompatibleConfigError
from tests.support.models import CLASSES, FEATURES, make_data, make_engine, make_loader, said, sgd
from tests.support.ranks import run_ranks


def pipe(size: int = 2, microbatches: int | None = 2, **options: Any) -> dict[str, Any]:
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **options}}}


def deep(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES))


# -- before anything runs --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """No partitioner knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sparse(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 16, sparse=True), nn.Linear(16, CLASSES))


def compiled() -> nn.Module:
    model = deep()
    model[0].compile()
    return model


def hooked(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda *_: None)
    return model


MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch": (
        deep,
        pipe(microbatches=3),
        "parallel.pipeline.microbatches=3 does not divide the dataloader's batch_size=8; use batch_size=6 or 9, or "
        "microbatches=2",
    ),
    "too few blocks": (
        deep,
        pipe(4, 4),
        "pipeline.size=4 needs 4 stages, but Sequential has 3 pieces only (0, 1, 2); use fewer stages (3 at most), or "
        "a model with more blocks",
    ),
    "too few for chunks": (
        deep,
        pipe(2, 4, schedule="interleaved", chunks=3),
        "pipeline.size=2 x chunks=3 needs 6 stages, but Sequential has 3 pieces",
    ),
    "no partitioner": (
        Blocks,
        pipe(2),
        "no partitioner knows Blocks; name the modules that begin a stage, for example partition=('blocks.3',)",
    ),
    "no partitioner, four stages": (
        Blocks,
        pipe(2, 2, schedule="interleaved", chunks=2),
        "for example partition=('blocks.1', 'blocks.2', 'blocks.4')",
    ),
    "wrong partitioner": (Blocks, pipe(partition="sequential"), "the partitioner 'sequential' does not know Blocks"),
    "wrong point": (Blocks, pipe(partition=("block.3",)), "'block.3' is not a module of the model; did you mean"),
    "wrong number of points": (
        Blocks,
        pipe(partition=("blocks.1", "blocks.2")),
        "2 split point(s) make 3 stages, but pipeline.size=2 needs 2; name the 1 modules",
    ),
    "non_split": (
        deep,
        pipe(non_split=("inputs",)),
        "non_split: neither Sequential.forward nor the criterion has an argument 'inputs'; did you mean 'input'?",
    ),
    "sparse": (Sparse, pipe(), "0: sparse gradients do not work under a pipeline"),
    "compiled": (compiled, pipe(), "the model is compiled, and cannot be cut any more; pass it uncompiled"),
    "hooks": (
        lambda: hooked(deep()),
        pipe(),
        "the model itself: hooks are registered on it, but under a pipeline it is not called as a whole",
    ),
    "time": (
        Blocks,
        pipe(partition=("blocks.3",), balance="time"),
        "parallel.pipeline.balance='time': partition names where the stages begin, so there is nothing to balance",
    ),
}


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, whose rendezvous would never be answered."""
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("case", MODELS)
def test_a_refusal_leaves_the_model_alone(case, two_ranks):
    make_model, config, message = MODELS[case]
    model = make_model()
    optimizer = sgd(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError, match=re.escape(message)):
        halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), config, device="cpu")
    assert not dist.is_initialized()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_all_that_is_wrong_is_said_at_once(two_ranks):
    config = pipe(4, 4, non_split=("y",)) | {"parallel": pipe(4, 3, schedule="gpipe")["parallel"]}
    config["parallel"]["pipeline"]["non_split"] = ("y",)
    with pytest.raises(IncompatibleConfigError) as error:
        make_engine(config, model=deep())
    assert len(error.value.problems) == 3


def test_suggested_split_points_work(two_ranks):
    from halfmesh.parallel.pipeline.partition import resolve

    for count in (2, 3, 4, 6):
        _, [message] = resolve(Blocks(), count, 1)
        points = eval(re.search(r"partition=(\([^)]*\))", message).group(1))  # the config that a user would write
        partition, problems = resolve(Blocks(), count, 1, points)
        assert not problems
        assert len(partition.stages) == count


CONFIGS = [
    (
        pipe(microbatches=None),
        "parallel.pipeline.microbatches: is required when pipeline.size > 1; "
        "pipeline=dict(size=2, microbatches=4) is a start",
    ),
    (pipe(4, 2), "2 is fewer than the 4 stages, which schedule='1f1b' has to fill; use 4 or more, or schedule='gpipe'"),
    (pipe(4, 6, schedule="interleaved", chunks=2), "6 is not a multiple of the 4 stages, which schedule='interleaved'"),
    (pipe(schedule="interleaved"), "1 chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"),
    (pipe(chunks=2), "2 chunks per rank need schedule='interleaved'"),
    (pipe(schedule="1fb1"), "'1fb1' is not one of 'gpipe', '1f1b', 'interleaved'; did you mean '1f1b'?"),
    (pipe(balance="speed"), "balance: 'speed'"),
    (pipe(partition="timm_vitt"), "'timm_vitt' is not one of 'auto', 'sequential'"),
    (pipe() | {"NUM_MICRO_BATCHES": 4}, "NUM_MICRO_BATCHES: set parallel.pipeline.microbatches instead"),
    (pipe() | {"fp16": {"mode": "apex"}}, "apex fp16 x pipeline: apex's contract has no verdict shared"),
    ({"microbatches": 2}, "microbatches: unknown key; it belongs at 'parallel.pipeline.microbatches'"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message[:30] for _, message in CONFIGS])
def test_mistakes_in_the_config(config, message, two_ranks):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_engine(config, model=deep())


# -- in the loop -----------------------------------------------------------------------------------------------------


class OwnLoss(nn.Sequential):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES), Mean())


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class ByData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class ThroughNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy())


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0]


def misuse(rank: int, world_size: int) -> dict[str, str]:
    """Each mistake on both ranks; the engine works afterwards."""
    found: dict[str, str] = {}
    x, y = make_data(8)
    engine = make_engine(pipe(), model=deep())
    output = engine(x)
    loss = engine.criterion(output, y)
    found["step"] = said(engine.step)
    found["tensor"] = said(engine.backward, torch.ones((), requires_grad=True))
    found["pair"] = said(engine.backward, (loss, 1))
    found["output"] = said(engine.backward, output)
    found["own criterion"] = said(nn.functional.cross_entropy, output, y)
    found["own backward"] = said(loss.backward)
    found["read"] = said(lambda: loss.item())
    found["scaled"] = said(lambda: engine.backward(loss / 2))
    found["two outputs"] = said(engine.criterion, (output, engine(x)), y)
    found["retained"] = said(engine.backward, loss, retain_graph=True)
    found["loss_id"] = said(engine.backward, loss, 1)
    found["targets"] = said(engine.criterion, output, y[:5])
    found["rows"] = said(engine, x, torch.ones(3, 2))
    found["names"] = said(engine.criterion, output, y, [str(number) for number in range(8)])
    found["numpy"] = said(engine.criterion, output, y.numpy())
    found["nothing"] = said(engine)
    found["model"] = said(engine.model, x)
    output = engine(x)
    loss = engine.criterion(output, y)
    engine.backward(loss)
    found["twice"] = said(engine.backward, loss)
    found["same output"] = said(engine.criterion, output, y)
    found["not kept"] = said(lambda: output.argmax(1))
    found["masters"] = said(engine.master_params)
    assert engine.step() is not None
    found["after"] = said(lambda: (engine.backward(engine.criterion(engine(x), y)), engine.step()))
    engine.close()
    for name, model in (
        ("own loss", OwnLoss()),
        ("by data", deep(ByData())),
        ("picky", deep(Picky())),
        ("through numpy", deep(ThroughNumpy())),
        ("wrong size", deep(nn.Linear(5, 5))),
    ):
        engine = make_engine(pipe(), model=model)
        found[name] = said(engine, x)
        engine.close()
    model = deep(nn.Dropout(0.1))
    engine = make_engine(pipe(), model=model)
    found["given again"] = said(make_engine, pipe(), model=model)
    found["pickled"] = said(pickle.dumps, model)
    copied = copy.deepcopy(model)
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in model.named_parameters()]
    found["different"] = said(engine, x + rank)
    engine.close()
    engine = make_engine(pipe(), model=deep(), criterion=None)
    found["no criterion"] = said(engine.criterion, engine(x), y)
    engine.close()
    found["samples"] = said(make_engine, pipe(balance="time"), model=deep(), loader=Broken())
    return found


class Broken(torch.utils.data.DataLoader):
    """A loader whose samples are not what the model takes."""

    def __init__(self) -> None:
        super().__init__(torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8)), 4)


MESSAGES = {
    "step": "engine.step() was called before engine.backward(loss)",
    "tensor": "backward under a pipeline takes what engine.criterion(output, ...) returned, but a Tensor was given",
    "pair": "but a tuple was given",
    "output": "but a PipelineOutput was given; compute the loss in the criterion",
    "own criterion": "the output of engine(...) is not computed before engine.backward(loss) under a pipeline",
    "own backward": "loss.backward() does not run the pipeline; write engine.backward(loss)",
    "read": "the loss is not computed before engine.backward(loss) under a pipeline",
    "scaled": "To change the loss (scale it, add to it) do so in the criterion",
    "two outputs": "engine.criterion was given several outputs of engine(...)",
    "retained": "retain_graph=True has no meaning under a pipeline",
    "loss_id": "loss_id",
    "targets": "engine.criterion(...): target has 5 rows, and the batch has 8",
    "rows": "engine(...): argument 2 has 3 rows, and input has 8; arguments are split into microbatches",
    "names": "engine.criterion(...): weight has 8 items, as many as the batch has rows",
    "numpy": "engine.criterion(...): target has 8 items, as many as the batch has rows, but is no tensor",
    "nothing": "engine(...) was given no tensor with a batch dim",
    "model": "the model itself was called, but this rank holds stage",
    "twice": "engine.backward(loss) was called twice for one output; call engine(...) again before",
    "same output": "the output of engine(...) was not kept",
    "not kept": "the output of engine(...) was not kept: set parallel = dict(pipeline=dict(..., keep_outputs=True))",
    "masters": "engine.master_params() was called between backward and step",
    "after": "nothing",
    "own loss": "the model returns its own loss, which a pipeline has on its last stage only",
    "by data": "the model's forward asks for the values of its activations",
    "picky": "the model's forward asks for the values of its activations",
    "through numpy": "the model's forward failed where it was run on tensors without data",
    "wrong size": "the model's forward failed where it was run on tensors without data",
    "different": "the 2 ranks of a pipeline were given different inputs",
    "given again": "model: this rank holds stages of it for another engine; close that one first",
    "pickled": "a model that is cut into stages cannot be pickled; save engine.state_dict()",
    "no criterion": "no criterion was given to initialize",
    "samples": "balance='time': the model could not be run on the first samples of the dataloader",
}


@pytest.mark.distributed
def test_mistakes_in_the_loop():
    first, second = run_ranks(misuse, 2, timeout=90)
    assert first.keys() == MESSAGES.keys()
    for name, message in MESSAGES.items():
        assert message in first[name], name
        if name != "model":  # which names the stage
            assert first[name] == second[name]
