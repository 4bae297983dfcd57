"""An `initialize` that fails when model and optimizer are converted already: both come back, and can be given again."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.engine import initialize as assembly
from halfmesh.errors import CheckpointError, HalfmeshError
from tests.support.checkpoint_runs import FP16, LAYOUTS, Net
from tests.support.models import MODES, adamw, make_data, make_loader
from tests.support.ranks import rank_device, run_ranks

X, Y = make_data(8)


@pytest.fixture(autouse=True)
def _signals_have_pythons_handlers():
    """An engine that another test left, without closing it, has its own."""
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)


def start(model, optimizer, config, device="cpu"):
    return halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), config, device=device)


def hooks_of(*objects):
    found = (vars(thing) for thing in objects)
    return [(name, len(value)) for names in found for name, value in names.items() if "hooks" in name and value]


def looks(model, optimizer):
    """What of them is compared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": [(name, tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad) for name, tensor in named],
        "params": [id(param) for param in model.parameters()],
        "hooks": hooks_of(*model.modules(), optimizer),
        "groups": [[id(param) for param in group["params"]] for group in optimizer.param_groups],
        "settings": [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups],
        "state": [id(param) for param in optimizer.state],
        "own": [name in vars(thing) for thing in (model, optimizer) for name in ("step", "forward")],
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    }


def broken(*_, **__):
    raise ZeroDivisionError


def other(folder):
    """A checkpoint of another model."""
    model = nn.Linear(3, 3)
    with halfmesh.initialize(model, adamw(model.parameters()), config={}, device="cpu") as engine:
        engine.save(folder)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *((mode, "missing") for mode in ("none", "torch_fp16", "naive_fp16", "apex_o1")),
        *(("naive_fp16", how) for how in ("other", "LRAdvance", "make_plan", "NonFiniteProbes")),
    ],
)
def test_model_and_optimizer_come_back(mode, how, tmp_path, monkeypatch):
    """From a resume without a checkpoint, or with another model's; and from errors at three steps."""
    model = Net()
    optimizer = adamw(model.parameters())
    keys = MODES[mode] | {"checkpoint": str(tmp_path / "saves"), "activation_checkpoint": {"patterns": ["up"]}}
    resume = {"resume": str(tmp_path / "resumed")} if how in ("missing", "other") else {}
    if how == "other":
        other(tmp_path / "resumed")
    before, values = looks(model, optimizer), copy.deepcopy(model.state_dict())
    with monkeypatch.context() as patch:
        if not resume:
            patch.setattr(assembly, how, broken)
        with pytest.raises((HalfmeshError, ZeroDivisionError)) as error:
            start(model, optimizer, keys | resume)
    assert not getattr(error.value, "__notes__", [])
    assert looks(model, optimizer) == before
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with start(model, optimizer, keys) as engine:
        engine.backward(engine.criterion(engine(X), Y))
        assert not engine.step().skipped


def again_on_ranks(rank, world_size, layout):
    """Whether the model kept its hooks, what was added to the error, and a norm of the next engine's."""
    model, keys = Net(), {"parallel": LAYOUTS[layout][1], **FP16["torch"]}
    optimizer = adamw(model.parameters())
    before = looks(model, optimizer)["hooks"]
    with pytest.raises(CheckpointError) as error:
        start(model, optimizer, keys | {"resume": "nowhere"}, rank_device())
    kept = looks(model, optimizer)["hooks"] == before
    if layout == "fsdp":
        model = Net()
        optimizer = adamw(model.parameters())
    with start(model, optimizer, keys, rank_device()) as engine:
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        return kept, getattr(error.value, "__notes__", [""])[-1], engine.grad_norm


@pytest.mark.distributed
def test_ranks_initialize_again():
    """With sharded parameters the error says that model and optimizer are of no more use."""
    for layout in ("dp2", "fsdp"):
        one, other = run_ranks(again_on_ranks, 2, layout)
        assert one == other
        kept, note, _ = one
        assert kept if layout == "dp2" else "build new ones" in note


def test_an_end_that_fails_keeps_a_second_close_from_nothing():
    """fsdp in one process makes a process group, which ends with the engine."""
    model = Net()
    engine = start(model, adamw(model.parameters()), {"parallel": {"data": "fsdp"}})
    engine._ends.callback(broken)
    with pytest.raises(ZeroDivisionError):
        engine.close()
    engine.close()
    assert not torch.distributed.is_initialized()
