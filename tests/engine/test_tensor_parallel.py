"""An engine whose layers are divided: its loop, state, collectives and refusals are those of one process."""

from __future__ import annotations

import collections
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.models import (
    CLASSES,
    FEATURES,
    MODES,
    TOLERANCES,
    difference,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}


class Divisible(nn.Module):
    """A layer that is divided by features, one that every rank has whole, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(FEATURES, 16)
        self.down = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(nn.functional.gelu(self.up(x)))))


def tensor_config(size: int = 2, **more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": size, "plan": PLAN}}, **more}


def make(config: dict[str, Any], **options: Any) -> halfmesh.Engine:
    return make_engine(config, model=options.pop("model", None) or Divisible(), **options)


def joined_losses(rank: int, world_size: int) -> dict[str, Any]:
    """2 x 2 ranks; each data rank has other samples, in microbatches of different size."""

    def summed(output: torch.Tensor, target: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(output, target, reduction="sum")

    criteria = {
        "mean": nn.functional.cross_entropy,
        "sum": summed,
        "weighted": lambda output, target: (summed(output, target), len(target)),
    }
    found = {}
    x, y = make_data(24)
    for reduction, criterion in criteria.items():
        engine = make(tensor_config(loss_reduction=reduction, gradient_accumulation=2), criterion=criterion)
        even = ((0, 3), (3, 6)), ((6, 9), (9, 12))
        uneven = ((0, 5), (5, 7)), ((7, 8), (8, 12))
        for begin in (0, 12):
            for part in (uneven if reduction == "weighted" else even)[engine.context.dp_rank]:
                piece = slice(begin + part[0], begin + part[1])
                engine.backward(engine.criterion(engine(x[piece]), y[piece]))
                engine.step()
        engine.close()
        found[reduction] = engine.model.state_dict()
    return found


def test_losses_are_joined_over_data_ranks_only():
    x, y = make_data(24)
    results = run_ranks(joined_losses, 4)
    for reduction in ("mean", "sum", "weighted"):
        how = "sum" if reduction == "sum" else "mean"
        expected = reference(zip(x.split(12), y.split(12), strict=True), model=Divisible(), reduction=how)
        for found in results:
            assert difference(found[reduction], expected) < 1e-5


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    """What one step sends, by kind and bytes, after the first (which compares inputs and gradients)."""
    counts: dict[str, list[int]] = collections.defaultdict(list)
    plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")}
    others = ("broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[-1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
            counts[name].append(sent.numel() * sent.element_size())
            return plain[name](*args, **kwargs)

        return call

    engine = make({**MODES["torch_fp16"], **tensor_config(clip_grad_norm=1.0)}, loader=make_loader(32, 4))
    for step, (x, y) in enumerate(engine.dataloader):
        if step == 2:
            for name in plain:
                setattr(dist, name, counted(name))
            for name in others:
                setattr(dist, name, lambda *_, name=name, **__: pytest.fail(name))
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        if step == 2:
            break
    return dict(counts)


def test_collectives_of_a_step():
    batch, half = 4, 2  # bytes of an fp16 number
    local = 8 * 8 + 8 + 12 * 8 + 12 + 12 + 12 + 2 * 12 + 2  # up, down with its bias, norm, head
    for counts in run_ranks(collectives, 4):
        assert counts == {
            "all_reduce": [
                batch * 12 * half,  # forward: the output of `down`
                batch * 12 * half,  # backward: the gradient of the head's input
                local * 4 + 8 * 4,  # over the data ranks, with a flag for each parameter
                8,  # the norm, which says the verdict, over all ranks
            ],
            "all_gather_into_tensor": [batch * CLASSES // 2 * half],  # the head's output
        }


def state(rank: int, world_size: int, mode: str) -> dict[str, Any]:
    """Stop after 3 steps, go on in a new engine; and what cannot be loaded."""
    config = {**MODES[mode], **tensor_config()}
    x, y = make_data(40)
    batches = list(zip(x.split(8), y.split(8), strict=True))

    def run(engine: halfmesh.Engine, some: list[Any]) -> None:
        for a, b in some:
            engine.backward(engine.criterion(engine(a), b))
            engine.step()

    through = make(config)
    run(through, batches)
    first = make(config)
    run(first, batches[:3])
    saved = first.state_dict()
    second = make(config, model=Divisible(seed=5))
    second.load_state_dict(saved)
    run(second, batches[3:])
    second_before = {name: value.clone() for name, value in second.state_dict()["model"].items()}
    through_before = through.state_dict()["model"]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, saved["layout"])
    try:
        second.load_state_dict({**saved, "layout": everyone[1 - rank]})
        message = ""
    except InputError as error:
        message = str(error)
    whole = Divisible(seed=7).state_dict()
    second.model.load_state_dict(whole)
    masters = {name: value.shape for name, value in second.state_dict()["model"].items()}
    for engine in (first, second, through):
        engine.close()
    return {
        "same": all(torch.equal(second_before[name], through_before[name]) for name in through_before),
        "message": message,
        "masters": masters,
        "loaded": all(torch.equal(second.model.state_dict()[name], whole[name]) for name in whole),
    }


@pytest.mark.parametrize("mode", ["none", "naive_bf16"])
def test_state(mode):
    for rank, found in enumerate(run_ranks(state, 2, mode)):
        assert found["same"]
        assert f"holds part {1 - rank} of 2 (tensor) of stage 0 of 1" in found["message"]
        assert found["masters"]["up.weight"] == (8, FEATURES)
        assert found["loaded"], "a whole state dict goes to the masters in full precision"


def layouts(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Two engines at once: one divides layers, the other does not."""
    engines = [make(tensor_config()), make({}), make(tensor_config(4, **MODES["torch_bf16"]))]
    x, y = make_data(32)
    for a, b in zip(x.split(8), y.split(8), strict=True):
        for engine in engines:
            size, place = engine.context.dp_size, engine.context.dp_rank
            engine.backward(engine.criterion(engine(a.chunk(size)[place]), b.chunk(size)[place]))
            engine.step()
    assert [engine.context.shape for engine in engines] == [(1, 2, 2), (1, 4, 1), (1, 1, 4)]
    for engine in engines:
        engine.close()
    return [engine.model.state_dict() for engine in engines]


def test_engines_on_different_layouts():
    x, y = make_data(32)
    expected = reference(zip(x.split(8), y.split(8), strict=True), model=Divisible())
    for found in run_ranks(layouts, 4):
        for weights, tolerance in zip(found, (1e-5, 1e-5, TOLERANCES["torch_bf16"]), strict=True):
            assert difference(weights, expected) < tolerance


def schedule(rank: int, world_size: int) -> list[Any]:
    """A scheduler waits for the verdict: overflow on one rank of one tensor group only."""
    model = Divisible()
    optimizer = sgd(model.parameters())
    groups = optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = make_engine(
        {**MODES["naive_fp16"], **tensor_config()}, model=model, optimizer=optimizer, lr_scheduler=scheduler
    )
    assert engine.optimizer is optimizer
    assert optimizer.param_groups is groups
    found = []
    x, y = make_data(40)
    for step, (a, b) in enumerate(zip(x.split(8), y.split(8), strict=True)):
        loss = engine.criterion(engine(a), b)
        engine.backward(loss * math.inf if step == 1 and rank == 3 else loss)
        result = engine.step()
        found.append((result.lr, result.skipped, result.loss_scale, result.grad_norm))
    return found


def test_a_skipped_step_is_skipped_and_scheduled_alike_everywhere():
    results = run_ranks(schedule, 4)
    lrs = [lr for lr, *_ in results[0]]
    assert lrs == [0.05, 0.025, 0.025, 0.0125, 0.00625]
    assert [skipped for _, skipped, *_ in results[0]] == [False, True, False, False, False]
    for found in results[1:]:
        assert repr(found) == repr(results[0])  # nan is not equal to itself


def untouched(rank: int, world_size: int) -> list[str]:
    """Refusals, in the words that the user reads; the model is as it was."""
    messages = []
    lamb = type("Lamb", (torch.optim.SGD,), {"step": _lamb_step})
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"size": 2}, sgd),
        ({"size": 2, "plan": {"upp": "colwise"}}, sgd),
        ({"size": 2, "plan": PLAN, "sequence_parallel": True}, sgd),
        ({"size": 2, "plan": PLAN}, lambda params: lamb(params, lr=0.1)),
    ]
    for tensor, optimizer in cases:
        model = Divisible()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            make_engine({"parallel": {"tensor": tensor}}, model=model, optimizer=optimizer)
        except IncompatibleConfigError as error:
            messages.append(str(error))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert type(model.up) is nn.Linear
    return messages


def _lamb_step(self: Any, closure: Any = None) -> None:
    for group in self.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


def test_refusals_leave_the_model_alone():
    messages = run_ranks(untouched, 2)[0]
    assert len(messages) == 4
    for message, words in zip(
        messages,
        [
            ["no plan is registered for any layer of Divisible", "down (Linear) with 204 numbers", "'colwise'"],
            ["the pattern 'upp' matches no module; did you mean 'up'?"],
            ["no plan says where the sequence is divided", "set sequence_parallel=False"],
            ["Lamb steps a parameter as a whole", "tensor=1"],
        ],
        strict=True,
    ):
        assert "parallel.tensor with this model and optimizer" in message
        for part in words:
            assert part in message


def evaluate(rank: int, world_size: int) -> Any:
    engine = make(tensor_config(), loader=make_loader(24, 4), eval_dataloader=make_loader(22, 4))
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in engine.eval().eval_dataloader:
            counts += torch.tensor([(engine(x).argmax(1) == y).sum().item(), len(y)])
    engine.context.all_reduce(counts, "dp")
    return counts.tolist(), len(engine.dataloader)


def test_evaluation_counts_each_sample_once():
    model = Divisible()
    x, y = make_data(22)
    hits = (model(x).argmax(1) == y).sum().item()
    for counts, batches in run_ranks(evaluate, 4):
        assert counts == [hits, 22]
        assert batches == 3


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples with noise from torch's and python's generators, whichever are in use."""

    def __init__(self) -> None:
        self.x, self.y = make_data(24)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.randn(FEATURES) * random.random(), self.y[index]


def augmented(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank 1 draws numbers of its own between the batches, as a script that plots or samples does."""
    loader = torch.utils.data.DataLoader(Augmented(), 4, shuffle=True)
    engine = make(tensor_config(), loader=loader)
    seen = []
    for _ in range(2):
        for x, y in engine.dataloader:
            if rank == 1:
                torch.rand(3), random.random()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            seen.append(x)
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_tensor_group_sees_the_same_batches_whatever_its_ranks_draw(world_size):
    results = run_ranks(augmented, world_size)
    for seen in results[1:2]:
        torch.testing.assert_close(seen, results[0], rtol=0, atol=0)
    epochs = len(results[0]) // 2
    assert epochs == (6 if world_size == 2 else 3)
    everything = torch.cat([torch.cat(seen) for seen in results[::2]])
    assert len(everything.unique(dim=0)) == 48, "each sample comes once an epoch, with other noise each time"
