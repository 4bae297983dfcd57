"""What an engine under a pipeline refuses in the loop, on all ranks alike, and what it warns of."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from halfmesh.distributed.rank_process import RankError
from halfmesh.errors import InputError
from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import make, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def deep(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES))


class Apply(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Any) -> Any:
        return self.how(x)


class KeepsTerm(nn.Module):
    """A layer with a loss term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        self.term = x.square().mean()
        return x


class Gives(nn.Linear):
    """A stage that returns something beside its output."""

    def __init__(self, beside: Any) -> None:
        super().__init__(FEATURES, 16)
        self.beside = beside

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x, self.beside(x)


class Takes(nn.Linear):
    def forward(self, pair: Any) -> torch.Tensor:
        return super().forward(pair[0])


MODELS: dict[str, tuple[Any, str]] = {
    "own loss": (
        lambda: nn.Sequential(deep(), Apply(lambda x: x.square().mean())),
        "the model returns its own loss, but a pipeline computes the loss of each microbatch on its last stage",
    ),
    "if": (
        lambda: deep(Apply(lambda x: x * 2 if x.sum() > 0 else x)),
        "the model's forward failed on tensors without data",
    ),
    "numpy": (
        lambda: deep(Apply(lambda x: x + torch.from_numpy(x.detach().numpy()))),
        "the model's forward failed on tensors without data",
    ),
    "wrong size": (
        lambda: deep(nn.Linear(5, 5)),
        "the model's forward failed on tensors without data",
    ),
    "kept": (lambda: deep(KeepsTerm()), "2.term is kept on the model with its graph"),
    "complex": (
        lambda: nn.Sequential(Gives(lambda x: x * 1j), Takes(16, CLASSES)),
        "complex tensors cannot be sent through a pipeline; send their real and imaginary parts as two tensors",
    ),
}


class Named(NamedTuple):
    y: torch.Tensor
    names: list[str]


def misuse(rank: int, world_size: int) -> dict[str, str]:
    """Each mistake on both ranks; the engine works afterwards."""
    found: dict[str, str] = {}
    x, y = here(make_data(8))
    engine = make(model=deep())
    output = engine(x)
    loss = engine.criterion(output, y)
    found["step"] = said(engine.step)
    found["tensor"] = said(engine.backward, here(torch.ones((), requires_grad=True)))
    found["output"] = said(engine.backward, output)
    found["own criterion"] = said(nn.functional.cross_entropy, output, y)
    found["own backward"] = said(loss.backward)
    found["read"] = said(lambda: loss.item())
    found["scaled"] = said(lambda: engine.backward(loss / 2))
    found["targets"] = said(engine.criterion, output, y[:5])
    found["rows"] = said(engine, x, here(torch.ones(3, 2)))
    found["names"] = said(engine.criterion, output, y, [str(number) for number in range(8)])
    found["numpy target"] = said(engine.criterion, output, y.cpu().numpy())
    found["boxes"] = said(engine.criterion, output, here([torch.ones(i % 3, 4) for i in range(8)]))
    found["named tuple"] = said(engine.criterion, output, Named(y, [str(number) for number in range(8)]))
    found["nothing"] = said(engine)
    found["model"] = said(engine.model, x)
    engine.model.load_state_dict(deep().state_dict())  # of a whole one each rank takes its part
    found["input gradient"] = said(engine, x.clone().requires_grad_())
    engine.eval()
    found["mode"] = said(engine.backward, loss)
    engine.train()
    for name, index in (("input changed", 0), ("target changed", 1)):
        batch = [x.clone(), y.clone()]
        loss = engine.criterion(engine(batch[0]), batch[1])
        batch[index].zero_()
        found[name] = said(engine.backward, loss)
    output = engine(x)
    loss = engine.criterion(output, y)
    engine.backward(loss)
    found["twice"] = said(engine.backward, loss)
    found["same output"] = said(engine.criterion, output, y)
    found["not kept"] = said(lambda: output.argmax(1))
    found["masters"] = said(engine.master_params)
    assert engine.step() is not None
    found["after"] = said(step, engine, x, y)
    engine.close()

    for name, (make_model, _) in MODELS.items():
        engine = make(model=make_model())
        found[name] = said(step, engine, x, y)
        engine.close()
    model = deep()
    engine = make(model=model)
    found["given again"] = said(make, model=model)
    found["pickled"] = said(pickle.dumps, model)
    assert [n for n, _ in copy.deepcopy(model).named_parameters()] == [n for n, _ in model.named_parameters()]
    found["different"] = said(engine, x + rank)
    engine.close()
    engine = make(model=deep(nn.BatchNorm1d(16)))
    plain = dict(deep(nn.BatchNorm1d(16)).state_dict())  # without versions, as of a file
    found["batch norm"] = said(engine.model.load_state_dict, plain)
    engine.close()
    engine = make(model=deep(), criterion=None)
    found["no criterion"] = said(engine.criterion, engine(x), y)
    engine.close()
    return found


CHANGED = "an input or a target was changed in place between engine(...) and engine.backward(loss)"
NO_TENSOR = "target has 8 items, as many as the batch has rows, but is not a tensor"
MESSAGES = {
    "step": "engine.step() was called before engine.backward(loss)",
    "tensor": "backward under a pipeline takes what engine.criterion(output, ...) returned, but a Tensor was given",
    "output": "but a PipelineOutput was given; compute the loss in the criterion",
    "own criterion": "the output of engine(...) is not computed before engine.backward(loss) under a pipeline",
    "own backward": "loss.backward() does not run the pipeline; write engine.backward(loss)",
    "read": "the loss is not computed before engine.backward(loss) under a pipeline",
    "scaled": "To change the loss (scale it, add to it) do so in the criterion",
    "targets": "engine.criterion(...): target has 5 rows, and the batch has 8",
    "rows": "engine(...): argument 2 has 3 rows, and the batch has 8; arguments are split along their first dim",
    "names": "engine.criterion(...): weight has 8 items, as many as the batch has rows",
    "numpy target": f"engine.criterion(...): {NO_TENSOR}",
    "boxes": NO_TENSOR,
    "named tuple": NO_TENSOR,
    "input gradient": "an input of engine(...) requires gradients",
    "nothing": "engine(...) was given no tensor with a batch dim",
    "model": "the model itself was called, but this rank holds only stage",
    "batch norm": "nothing",
    "mode": "the model's mode or attributes changed between engine(...) and",
    "input changed": CHANGED,
    "target changed": CHANGED,
    "twice": "engine.backward(loss) was called twice for one output; call engine(...) again before",
    "same output": "the output of engine(...) was not kept",
    "not kept": "the output of engine(...) was not kept: set parallel = dict(pipeline=dict(..., keep_outputs=True))",
    "masters": "master_params() was called between backward and step",
    "after": "nothing",
    **{name: message for name, (_, message) in MODELS.items()},
    "different": "the 2 ranks of a pipeline were given different inputs",
    "given again": "model: this rank holds a part of it for another engine",
    "pickled": "a sharded model cannot be pickled; save engine.state_dict()",
    "no criterion": "no criterion was given to initialize",
}


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(misuse, 2, timeout=90)


@pytest.mark.parametrize("name", MESSAGES)
def test_mistakes_in_the_loop(name, told):
    first, second = (found[name] for found in told)
    assert MESSAGES[name] in first
    assert first == second or name == "model", "only this names what the rank has"


# -- what would be silently wrong ------------------------------------------------------------------------------------


def parts_later(rank: int, world_size: int, changed: str) -> str:
    """One rank's batches become others; what is not compared at once is compared later."""
    engine = make()
    x, y = make_data(8)
    for number in range(1, 12):
        if rank == 1 and number > 3:
            x, y = (x, y.roll(1)) if changed == "targets" else (x.roll(1, 0), y)
        try:
            step(engine, x, y)
        except InputError as error:
            return f"{number}: {error}"
    return "nothing"


@pytest.mark.promise(
    "ranks that compute one batch get the same inputs",
    "inputs and targets are compared over stages and tensor ranks",
    of="SageMaker",
    page="pipeline.md",
)
@pytest.mark.parametrize("changed", ["targets", "inputs"])
def test_batches_that_part_later_are_noticed(changed):
    for found in run_ranks(parts_later, 2, changed):
        assert f"10: the 2 ranks of a pipeline were given different {changed}" in found


def grows(rank: int, world_size: int) -> dict[str, str]:
    """Layers and parameters that come after initialize."""
    found: dict[str, str] = {}
    x, y = make_data(8)
    model = deep()
    engine = make(model=model)
    step(engine, x, y)
    model.append(here(nn.Linear(CLASSES, CLASSES)))
    found["module"] = said(step, engine, x, y)
    engine.optimizer.add_param_group({"params": list(model[-1].parameters())})
    del model[-1]
    found["parameters"] = said(step, engine, x, y)
    return found


def test_layers_that_come_after_initialize():
    for found in run_ranks(grows, 2):
        assert "3: modules that were added to the model after initialize, or removed" in found["module"]
        assert "came into the optimizer after initialize" in found["parameters"]


def goes_on(rank: int, world_size: int) -> None:
    """A loop that leaves out batches with errors; the second has a word that there is not."""
    engine = make(model=nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(16, CLASSES)))
    y = torch.arange(4) % CLASSES
    for word in (1, 9, 2):
        try:
            step(engine, torch.full((4, 2), word), y)
        except IndexError:
            continue


def list_made_before(rank: int, world_size: int) -> None:
    """Of the parameters that one rank holds, the other has forgotten all but the objects."""
    model = deep()
    params = list(model.parameters())
    engine = make(model=model, optimizer=lambda _: torch.optim.SGD(params[2:], lr=0.1))
    engine.optimizer.add_param_group({"params": params[:2]})
    step(engine, *make_data(8))


def penalty(rank: int, world_size: int) -> None:
    model = deep()

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) + sum(p.square().sum() for p in model.parameters())

    step(make(model=model, criterion=criterion), *make_data(8))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        pytest.param(
            goes_on,
            r"left this pipeline in the middle of a batch \(IndexError",
            marks=pytest.mark.on_cpu("on a GPU a word that there is not ends the process"),
        ),
        (list_made_before, "came into the optimizer after initialize"),
        (penalty, "the criterion's loss depends on the model otherwise than through its output"),
    ],
)
def test_loops_that_end_on_all_ranks(loop, message):
    with pytest.raises(RankError, match=message):
        run_ranks(loop, 2)


def raises(rank: int, world_size: int) -> str:
    """The criterion fails on the last stage, of which the first hears when the connection closes."""

    def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise LookupError("no such class")

    engine = make(criterion=criterion)
    if engine.context.is_last_stage:
        with pytest.raises(LookupError, match=r"^no such class$"):
            step(engine, *make_data(8))
        return "raised"
    with pytest.raises(RuntimeError):
        step(engine, *make_data(8))
    return "lost"


def test_errors_of_a_stage_are_raised_as_they_are():
    assert run_ranks(raises, 2, timeout=30, fresh=True) == ["lost", "raised"]


def clips(rank: int, world_size: int) -> list[str]:
    """torch's own clipping, of each stage by itself."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    engine = make()
    x, y = here(make_data(8))
    step(engine, x, y)
    engine.backward(engine.criterion(engine(x), y))
    nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-3)
    engine.step()
    engine.close()
    return [line for line in lines if "engine.clip_grad_norm_(max_norm)" in line]


def test_clipping_of_one_stage_by_itself_is_told():
    told = run_ranks(clips, 4)
    assert "each rank has its shards of them only" in told[0][0]
