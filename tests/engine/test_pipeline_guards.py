"""What an engine under a pipeline rejects in the loop, on all ranks alike, and what it warns of."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.distributed.local_ranks import RankError
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


NO_DATA = "the model's forward failed on the tensors without data"
MODELS: list[tuple[Any, str]] = [
    (
        lambda: nn.Sequential(deep(), Apply(lambda x: x.square().mean())),
        "the model returns its own loss, but a pipeline computes that of each microbatch on its last stage",
    ),
    (lambda: deep(Apply(lambda x: x * 2 if x.sum() > 0 else x)), NO_DATA),
    (lambda: deep(KeepsTerm()), "2.term keeps its graph on the model"),
]


class Told:
    """Messages of the calls that were rejected."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, words: str, call: Any, *args: Any, **options: Any) -> None:
        """It is rejected with these words; or with "nothing"."""
        self.messages.append(said(call, *args, **options))
        assert words in self.messages[-1]


def in_the_loop(rank: int, world_size: int) -> list[str]:
    """Each mistake on both ranks; the engine works afterwards."""
    told = Told()
    x, y = here(make_data(8))
    engine = make(model=deep())
    output = engine(x)
    loss = engine.criterion(output, y)
    told("engine.step() was called before engine.backward(loss)", engine.step)
    words = "under a pipeline backward takes the loss of engine.criterion(...), not a Tensor"
    told(words, engine.backward, here(torch.ones((), requires_grad=True)))
    told("not a PipelineOutput; compute the loss in the criterion", engine.backward, output)
    told("To change the loss (scale it, add to it), do so in the criterion", lambda: engine.backward(loss / 2))
    told("engine.criterion(...): target has 5 rows, and the batch has 8", engine.criterion, output, y[:5])
    words = "engine(...): argument 2 has 3 rows, and the batch has 8; arguments are split along their first dim"
    told(words, engine, x, here(torch.ones(3, 2)))
    words = "target has 8 items, one for each row of the batch, but only tensors are split"
    told(words, engine.criterion, output, [str(number) for number in range(8)])
    told("engine(...) got no tensor with a batch dim", engine)
    assert "this rank holds only stage" in said(engine.model, x)
    engine.model.load_state_dict(deep().state_dict())  # of a whole one each rank takes its part
    told("an input of engine(...) requires gradients", engine, x.clone().requires_grad_())
    engine.eval()
    told("the model's mode or attributes changed between engine(...) and", engine.backward, loss)
    engine.train()
    for index in (0, 1):
        batch = [x.clone(), y.clone()]
        loss = engine.criterion(engine(batch[0]), batch[1])
        batch[index].zero_()
        words = "an input or a target was changed in place between engine(...) and engine.backward(loss)"
        told(words, engine.backward, loss)
    output = engine(x)
    loss = engine.criterion(output, y)
    engine.backward(loss)
    words = "engine.backward(loss) was called twice for one output; call engine(...) again first"
    told(words, engine.backward, loss)
    told("the output of engine(...) was not kept", engine.criterion, output, y)
    told("master_params() was called between backward and step", engine.master_params)
    assert engine.step() is not None
    told("nothing", step, engine, x, y)
    engine.close()
    return told.messages


def of_models(rank: int, world_size: int) -> list[str]:
    """Models that cannot run in a pipeline, and what a model in one cannot do."""
    told = Told()
    x, y = here(make_data(8))
    for make_model, message in MODELS:
        engine = make(model=make_model())
        told(message, step, engine, x, y)
        engine.close()
    model = deep()
    engine = make(model=model)
    told("model: another engine sharded it", make, model=model)
    told("a sharded model cannot be pickled; save engine.state_dict()", pickle.dumps, model)
    told("the ranks of a pipeline got different inputs", engine, x + rank)
    engine.close()
    return told.messages


@pytest.mark.parametrize("mistakes", [in_the_loop, of_models])
def test_mistakes_are_rejected_alike_on_all_ranks(mistakes):
    first, second = run_ranks(mistakes, 2)
    assert first == second


# -- what would be silently wrong ------------------------------------------------------------------------------------


def parts_later(rank: int, world_size: int) -> dict[str, str]:
    """One rank's batches become others; what is not compared at once is compared later."""
    found = {}
    for changed in ("targets", "inputs"):
        engine = make()
        x, y = make_data(8)
        for number in range(1, 12):
            if rank == 1 and number > 3:
                x, y = (x, y.roll(1)) if changed == "targets" else (x.roll(1, 0), y)
            if message := said(step, engine, x, y).removeprefix("nothing"):
                found[changed] = f"{number}: {message}"
                break
    return found


def test_batches_that_part_later_are_noticed():
    for found in run_ranks(parts_later, 2):
        for changed in ("targets", "inputs"):
            assert f"10: the ranks of a pipeline got different {changed}" in found[changed]


def goes_on(rank: int, world_size: int) -> None:
    """A loop that leaves out batches with errors; the second has a word that there is not."""
    engine = make(model=nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(16, CLASSES)))
    y = torch.arange(4) % CLASSES
    for word in (1, 9, 2):
        try:
            step(engine, torch.full((4, 2), word), y)
        except IndexError:
            continue


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
            r"stopped this pipeline in the middle of a batch \(IndexError",
            marks=pytest.mark.on_cpu("on a GPU a word that there is not ends the process"),
        ),
        (penalty, "the criterion uses more of the model than its output"),
    ],
)
def test_loops_that_end_on_all_ranks(loop, message):
    with pytest.raises(RankError, match=message):
        run_ranks(loop, 2)
