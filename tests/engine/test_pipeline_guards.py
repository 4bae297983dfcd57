"""What an engine under a pipeline rejects in the loop, on all ranks alike, and what it warns of."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.distributed.local_ranks import RankError
from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import SCHEDULES, make, pipe, step
from tests.support.ranks import here, run_ranks
from tests.support.versions import TORCH

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


def reject(messages: list[str], words: str, call: Any, *args: Any, **options: Any) -> None:
    """The call is rejected with these words; or with "nothing". Keeps the message."""
    messages.append(said(call, *args, **options))
    assert words in messages[-1]


def in_the_loop(rank: int, world_size: int) -> list[str]:
    """Each mistake on both ranks; the engine works afterwards."""
    messages: list[str] = []
    told = partial(reject, messages)
    x, y = here(make_data(8))
    engine = make(model=deep())
    output = engine(x)
    loss = engine.criterion(output, y)
    words = "under a pipeline backward takes the loss of engine.criterion(...), not a Tensor"
    told(words, engine.backward, here(torch.ones((), requires_grad=True)))
    told("not a PipelineOutput; compute the loss in the criterion", engine.backward, output)
    told("To change the loss (scale it, add to it), do so in the criterion", lambda: engine.backward(loss / 2))
    told("engine.criterion(...): target has 5 rows, and the batch has 8", engine.criterion, output, y[:5])
    words = "engine(...): argument 2 has 3 rows, and the batch has 8; arguments are split along their first dim"
    told(words, engine, x, here(torch.ones(3, 2)))
    words = "target has 8 items, one for each row of the batch, but only tensors are split"
    told(words, engine.criterion, output, list(range(8)))
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
    return messages


def of_models(rank: int, world_size: int) -> list[str]:
    """Models that cannot run in a pipeline, and what a model in one cannot do."""
    messages: list[str] = []
    told = partial(reject, messages)
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
    return messages


@pytest.mark.parametrize("mistakes", [in_the_loop, of_models])
def test_mistakes_are_rejected_alike_on_all_ranks(mistakes):
    first, second = run_ranks(mistakes, 2)
    assert first == second


def parts_later(rank: int, world_size: int) -> None:
    """One rank's batches become others; what is not compared at once is compared later."""
    for changed in ("targets", "inputs"):
        engine, (x, y) = make(), make_data(8)
        for number in range(1, 11):
            if rank == 1 and number > 3:
                x, y = (x, y.roll(1)) if changed == "targets" else (x.roll(1, 0), y)
            words = f"the ranks of a pipeline got different {changed}" if number == 10 else "nothing"
            assert words in said(step, engine, x, y)


def test_batches_that_part_later_are_noticed():
    run_ranks(parts_later, 2)


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


# -- schedules that compute the gradients of inputs and of weights apart -----------------------------------------------

APART = "zero_bubble", "zbv", "dualpipev"
NEED_WHOLE_BACKWARDS: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"data": "fsdp"}}, "which 'fsdp' would miss; use data='zero1', or schedule='interleaved'"),
    ({"compile": True}, "compiled code has one backward for both; remove compile"),
    ({"activation_checkpoint": "full"}, "activations would be computed or fetched twice; remove that"),
    ({"activation_offload": True}, "activations would be computed or fetched twice"),
    ({"gradient_dtype": "float32"}, "gradients of weights in the dtype of the weights; remove gradient_dtype"),
]


def findings(schedule: str, more: dict[str, Any]) -> list[Any]:
    config = pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule])
    parallel = config["parallel"] | more.get("parallel", {})
    return check(load_config({**config, **more, "parallel": parallel}), 4, "cpu")


@pytest.mark.skipif(TORCH < (2, 13), reason="rejected: torch counts some weights twice")
def test_what_needs_whole_backwards_is_rejected(monkeypatch):
    """And a torch that counts weights twice which a stage uses several times: a GRU's, tied ones."""
    for schedule in APART:
        for more, words in NEED_WHOLE_BACKWARDS:
            [found] = findings(schedule, more)
            assert found.where == "parallel.pipeline.schedule"
            assert words in found.message
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cpu"))
    for schedule in APART:
        [found] = findings(schedule, {})
        assert "where torch 2.12.1+cpu counts some twice" in found.message
    assert findings("interleaved", {}) == []
