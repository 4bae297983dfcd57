"""An engine whose layers are divided: its loop, state, collectives, data and refusals."""

from __future__ import annotations

import collections
import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError
from halfmesh.utils.torch_private import ALL_GATHER, REDUCE_SCATTER
from tests.support.models import (
    CLASSES,
    FEATURES,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    make_data,
    make_engine,
    make_loader,
    reference,
    said,
    sgd,
)
from tests.support.ranks import here, ranks_on, run_ranks
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}


class Divisible(nn.Module):
    """A layer that is divided by features, one that every rank has whole, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(nn.functional.gelu(self.up(x)))))


def tensor_config(size: int = 2, **more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": size, "plan": PLAN}}, **more}


def make(config: dict[str, Any], **options: Any) -> halfmesh.Engine:
    return make_engine(config, model=options.pop("model", None) or Divisible(), **options)


def step(engine: halfmesh.Engine, x: torch.Tensor, y: torch.Tensor) -> None:
    x, y = here((x, y))
    engine.backward(engine.criterion(engine(x), y))
    engine.step()


def summed(output: torch.Tensor, target: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(output, target, reduction="sum")


CRITERIA = {
    "mean": nn.functional.cross_entropy,
    "sum": summed,
    "weighted": lambda output, target: (summed(output, target), len(target)),
}


def joined_losses(rank: int, world_size: int) -> dict[str, Any]:
    """2 x 2 ranks; each data rank has other samples, in microbatches of different size."""
    found = {}
    x, y = make_data(24)
    for reduction, criterion in CRITERIA.items():
        engine = make(tensor_config(loss_reduction=reduction, gradient_accumulation=2), criterion=criterion)
        even = ((0, 3), (3, 6)), ((6, 9), (9, 12))
        uneven = ((0, 5), (5, 7)), ((7, 8), (8, 12))
        for begin in (0, 12):
            for part in (uneven if reduction == "weighted" else even)[engine.context.dp_rank]:
                piece = slice(begin + part[0], begin + part[1])
                step(engine, x[piece], y[piece])
        found[reduction] = close_whole(engine)
    return found


def test_losses_are_joined_over_data_ranks_only():
    x, y = make_data(24)
    results = run_ranks(joined_losses, 4)
    for reduction in CRITERIA:
        how = "sum" if reduction == "sum" else "mean"
        expected = reference(zip(x.split(12), y.split(12), strict=True), model=Divisible(), reduction=how)
        for found in results:
            assert difference(found[reduction], expected) < 1e-5


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    """What one step sends, by kind and bytes, after the first (which compares inputs and gradients)."""
    counts: dict[str, list[int]] = collections.defaultdict(list)

    def counted(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[-1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
            counts[name].append(sent.numel() * sent.element_size())
            return plain(*args, **kwargs)

        return call

    engine = make({**MODES["torch_fp16"], **tensor_config(clip_grad_norm=1.0)}, loader=make_loader(48, 4))
    batches = iter(engine.dataloader)
    for _ in range(2):
        step(engine, *next(batches))
    batch = next(batches)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", ALL_GATHER, REDUCE_SCATTER):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for name in ("broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
            patch.setattr(dist, name, lambda *_, name=name, **__: pytest.fail(name))
        step(engine, *batch)
    return dict(counts)


def test_collectives_of_a_step():
    batch, half = 4, 2  # bytes of an fp16 number
    of_norm = half if ranks_on() == "gloo-cpu" else 4  # CUDA's autocast has norms give fp32
    local = 8 * 8 + 8 + 12 * 8 + 12 + 12 + 12 + 2 * 12 + 2  # up, down with its bias, norm, head
    for counts in run_ranks(collectives, 4):
        assert counts == {
            "all_reduce": [
                batch * 12 * half,  # forward: the output of `down`
                batch * 12 * of_norm,  # backward: the gradient of the head's input
                local * 4 + 8 * 4,  # over the data ranks, with a flag for each parameter
                8,  # the norm, which says the verdict, over all ranks
            ],
            ALL_GATHER: [batch * CLASSES // 2 * half],  # the head's output
        }


class Dropping(Divisible):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.norm(self.down(self.up(x))), 0.5, self.training))


def state(rank: int, world_size: int) -> dict[str, Any]:
    """Save after 3 steps, go on in a new engine, dropout included; and what cannot be loaded."""
    config = {**MODES["naive_bf16"], **tensor_config()}
    x, y = make_data(40)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    first, second = make(config, model=Dropping()), make(config, model=Dropping(seed=5))
    for batch in batches[:3]:
        step(first, *batch)
    saved = copy.deepcopy(first.state_dict())
    for batch in batches[3:]:
        step(first, *batch)
    second.load_state_dict(saved)
    for batch in batches[3:]:
        step(second, *batch)
    mine, theirs = second.state_dict()["model"], first.state_dict()["model"]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, saved["layout"])
    return {
        "same": all(torch.equal(mine[name], theirs[name]) for name in theirs),
        "another part": said(second.load_state_dict, {**saved, "layout": everyone[1 - rank]}),
        "local": mine["up.weight"].shape,
    }


def test_a_state_resumes_exactly_on_the_rank_that_saved_it():
    for rank, found in enumerate(run_ranks(state, 2)):
        assert found["same"]
        assert f"tp_rank {1 - rank}, and this rank is" in found["another part"]
        assert found["local"] == (8, FEATURES)


def layouts(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Engines of several layouts at once."""
    engines = [make(tensor_config()), make({}), make(tensor_config(4, **MODES["torch_bf16"]))]
    x, y = make_data(32)
    for a, b in zip(x.split(8), y.split(8), strict=True):
        for engine in engines:
            size, place = engine.context.dp_size, engine.context.dp_rank
            step(engine, a.chunk(size)[place], b.chunk(size)[place])
    assert [(*engine.context.sizes.values(),) for engine in engines] == [(1, 2, 2), (1, 4, 1), (1, 1, 4)]
    return [close_whole(engine) for engine in engines]


def test_engines_on_different_layouts():
    x, y = make_data(32)
    expected = reference(zip(x.split(8), y.split(8), strict=True), model=Divisible())
    for found in run_ranks(layouts, 4):
        for weights, tolerance in zip(found, (1e-5, 1e-5, TOLERANCES["torch_bf16"]), strict=True):
            assert difference(weights, expected) < tolerance


def targets(rank: int, world_size: int) -> dict[str, Any]:
    """A loader of the user's own that gives the ranks of a tensor group the same inputs and other targets."""
    engine = make(tensor_config(), criterion=lambda output, *given: nn.functional.cross_entropy(output, given[-1]))
    (x, y), others = here((make_data(8), torch.arange(8).roll(rank) % CLASSES))
    found: dict[str, Any] = {"output alone": said(lambda: engine.criterion(engine(x), engine(x).softmax(-1)))}
    engine.eval()
    found["evaluation"] = said(engine.criterion, engine(x), others)
    engine.train()
    with torch.no_grad():
        found["no graph"] = said(engine.criterion, engine(x), others)
    found["first"] = said(step, engine, x, others)
    found["same"] = [said(step, engine, x, y) for _ in range(8)]
    found["tenth"] = said(step, engine, x, others)
    engine.close()
    return found


@pytest.mark.promise("ranks that compute one batch get the same inputs")
def test_targets_are_compared_over_a_tensor_group():
    for found in run_ranks(targets, 2):
        assert found["output alone"] == found["evaluation"] == found["no graph"] == "nothing"
        assert "the 2 ranks of a tensor group were given different targets" in found["first"]
        assert found["same"] == ["nothing"] * 8
        assert "the 2 ranks of a tensor group were given different targets" in found["tenth"]


def schedule(rank: int, world_size: int) -> list[Any]:
    """A scheduler waits for the verdict: overflow on one rank of one tensor group only."""
    model = Divisible()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = make_engine(
        {**MODES["naive_fp16"], **tensor_config()}, model=model, optimizer=optimizer, lr_scheduler=scheduler
    )
    found = []
    x, y = here(make_data(40))
    for number, (a, b) in enumerate(zip(x.split(8), y.split(8), strict=True)):
        loss = engine.criterion(engine(a), b)
        engine.backward(loss * math.inf if number == 1 and rank == 3 else loss)
        result = engine.step()
        found.append((result.lr, result.skipped, result.loss_scale, result.grad_norm))
    return found


def test_a_skipped_step_is_skipped_and_scheduled_alike_everywhere():
    results = run_ranks(schedule, 4)
    assert [lr for lr, *_ in results[0]] == [0.05, 0.025, 0.025, 0.0125, 0.00625]
    assert [skipped for _, skipped, *_ in results[0]] == [False, True, False, False, False]
    for found in results[1:]:
        assert repr(found) == repr(results[0])  # nan is not equal to itself


class PerHead(Divisible):
    """A whole layer on each half of the features, which no plan speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.gelu(self.up(x)).unflatten(-1, (-1, 8))
        return self.head(self.norm(self.down(self.each(heads).flatten(-2))))


class Lamb(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([param.grad.norm() for param in group["params"]]).norm()
            for param in group["params"]:
                param.data.sub_(param.grad / norm, alpha=group["lr"])


def refusals(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    model, (x, y) = here((Divisible(), make_data(64)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError) as caught:
        make(tensor_config(), model=model, optimizer=lambda params: Lamb(params, lr=0.1))
    found["optimizer"] = str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    engine = make(tensor_config(), optimizer=adamw)
    step(engine, x, y)
    found["second engine"] = said(make, {}, model=engine.model)
    optimizer = adamw(model.parameters())
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    found["whole state"] = said(engine.optimizer.load_state_dict, optimizer.state_dict())
    found["undeclared"] = said(step, make(tensor_config(), model=PerHead()), x, y)
    divided = {"parallel": {"tensor": {"size": 2, "plan": {**PLAN, "head": "colwise"}}}}
    found["divided output"] = said(step, make(divided), x, y)
    return found


def test_what_would_be_silently_wrong_is_refused():
    words = {
        "optimizer": "Lamb steps a parameter by what it reads of others",
        "second engine": "model: this rank holds a part of it for another engine",
        "whole state": "has 'exp_avg' of shape (16, 8) for a parameter of which this rank holds (8, 8)",
        "undeclared": "the gradients of each.weight, each.bias differ",
        "divided output": "the model's output differs between the ranks of a tensor group",
    }
    for found in run_ranks(refusals, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case
