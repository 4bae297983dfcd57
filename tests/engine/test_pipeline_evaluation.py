"""Evaluation under a pipeline runs in microbatches, in which stages overlap, and gives the outputs of one process."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.parallel.pipeline.schedules import forward_order
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import SCHEDULES, Deep, make, pipe
from tests.support.ranks import here, run_ranks

LOOPED, IN_A_V = [0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "count", "ticks"),
    [
        ([0, 1, 2, 3], 5, 5 + 3),
        ([0, 1, 2, 3], 1, 4),
        (LOOPED, 4, 3 * 4 + 1),
        (IN_A_V, 6, 2 * 6 + 4),
        ([0, 1], 7, 8),
    ],
)
def test_the_order_of_forwards_keeps_all_ranks_busy(ranks, count, ticks):
    order = list(forward_order(ranks, count))
    assert len(order) == ticks, "each rank computes without a pause once it has begun, or nearly so"
    done = [0] * len(ranks)
    for tick in order:
        assert len({ranks[stage] for stage, _ in tick}) == len(tick), "a rank computes one at a time"
        assert all(done[stage] < (done[stage - 1] if stage else count) for stage, _ in tick), "it has its input"
        for stage, number in tick:
            assert number == done[stage]
            done[stage] += 1
    assert done == [count] * len(ranks)


# -- on ranks --------------------------------------------------------------------------------------------------------


PARTS = {7: (2, 2, 2, 1), 1: (1,)}
"""Rows of a batch, and of its microbatches."""


def what_happens(rank: int, world_size: int) -> dict[int, tuple[list[str], list[str], Any]]:
    """In an evaluation: this rank's forwards, with their rows, and messages, in order; collectives; and the output."""
    found = {}
    for rows in PARTS:
        engine = make(pipe(microbatches=4))
        x = here(make_data(rows)[0])
        engine.eval()
        engine(x)  # compares what ranks were given, and tries microbatches
        stage, events, collectives = next(iter(engine._executor.stages)), [], []

        def note(patch: Any, owner: Any, name: str, say: Callable[..., None]) -> None:
            inner = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **options: say(*args) or inner(*args, **options))

        with pytest.MonkeyPatch.context() as patch:
            note(patch, stage, "compute", lambda call, _, to=events: to.append(f"{len(call.args[0])} rows"))
            for name in ("isend", "irecv"):
                note(patch, dist, name, lambda tensor, *_, name=name, to=events: to.append(f"{name} {len(tensor)}"))
            for name in ("broadcast", "all_reduce", "all_gather_object", "broadcast_object_list"):
                note(patch, dist, name, lambda *_, name=name, to=collectives: to.append(name))
            output = engine(x)
        found[rows] = events, collectives, output.detach() if engine.context.is_last_stage else None
        engine.close()
    return found


@pytest.mark.promise("arguments without a batch dimension, outputs on request")
@pytest.mark.distributed
@pytest.mark.sends
def test_each_microbatch_is_sent_on_as_soon_as_it_is_computed():
    """So that the next stage computes it while this one computes the following one. Nothing else is sent, but whether
    all modules of all ranks are in evaluation mode."""
    first, second = run_ranks(what_happens, 2)
    for rows, parts in PARTS.items():
        assert first[rows][0] == [event for part in parts for event in (f"{part} rows", f"isend {part}")]
        assert second[rows][0] == [event for part in parts for event in (f"irecv {part}", f"{part} rows")]
        assert first[rows][1] == second[rows][1] == ["all_reduce"] * (len(parts) > 1)
        torch.testing.assert_close(second[rows][2], Deep()(make_data(rows)[0]).detach())


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x - x.mean(0)


class Doubles(nn.Module):
    """Returns something beside its output."""

    def __init__(self, beside: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.beside(x)


class Counts(nn.Module):
    """Carries a number from batch to batch, in a buffer or an attribute."""

    def __init__(self, start: int | torch.Tensor, writes: bool = True) -> None:
        super().__init__()
        if isinstance(start, torch.Tensor):
            self.register_buffer("steps", start)
        else:
            self.steps = start
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.steps += 1
        return x * self.steps


def layers(*more: nn.Module, end: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    ends = [] if end is None else [end]
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *more, nn.Linear(16, CLASSES), *ends)


def trained_norm() -> nn.Module:
    return layers(nn.BatchNorm1d(16))


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "mixed rows": lambda: layers(Mixes()),
    "a mean": lambda: layers(end=Doubles(lambda x: x.mean())),
    "a table": lambda: layers(end=Doubles(lambda x: x.T @ x)),
    "rows second": lambda: layers(end=Doubles(lambda x: x.T)),
    "the number of rows": lambda: layers(end=Doubles(len)),
    "BatchNorm in training mode": trained_norm,
    "BatchNorm in training mode on the last stage's rank": lambda: layers(end=nn.BatchNorm1d(CLASSES)),
    "a counter in the last stage": lambda: layers(end=Counts(0)),
    "a buffer": lambda: layers(Counts(torch.zeros(()))),
}
"""Models whose microbatches do not give the output of a batch."""
ON_ONE_RANK = ("BatchNorm in training mode on the last stage's rank",)
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "plain": layers,
    "BatchNorm": trained_norm,
    "an attribute": lambda: layers(Counts(1, writes=False)),
}


def evaluated(rank: int, world_size: int) -> dict[str, Any]:
    """The rows of each forward on the first stage in the second evaluation, and the outputs of both."""
    found = {}
    x = here(make_data(8)[0])
    for name, build in (WHOLE | SPLIT).items():
        model = build()
        engine = make(pipe(microbatches=4), model)
        engine.eval()
        if name == "BatchNorm in training mode" or (name in ON_ONE_RANK and engine.context.is_last_stage):
            model[-1 if name in ON_ONE_RANK else 2].train()
        once = engine(x)
        rows: list[int] = []
        if engine.context.pp_rank == 0:
            model[0].register_forward_hook(lambda module, args, output, rows=rows: rows.append(len(output)))
        found[name] = rows, [once, engine(x)]
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_what_microbatches_would_change_is_evaluated_whole():
    first, second = run_ranks(evaluated, 2)
    x = make_data(8)[0]
    for name, build in (WHOLE | SPLIT).items():
        model = build().eval()
        if "training mode" in name:
            model[-1 if name in ON_ONE_RANK else 2].train()
        with torch.no_grad():
            expected = [model(x), model(x)]
        torch.testing.assert_close(second[name][1], expected, msg=lambda text, name=name: f"{name}: {text}")
        assert first[name][0] == ([8] if name in WHOLE else [2] * 4), name


def of_every_schedule(rank: int, world_size: int) -> dict[Any, Any]:
    found = {}
    for schedule, options in SCHEDULES.items():
        engine = make(pipe(microbatches=4, schedule=schedule, eval_outputs="all", **options))
        for rows in (7, 3):
            found[schedule, rows] = engine.eval()(here(make_data(rows)[0])).detach()
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_batches_of_any_size_under_every_schedule():
    model = Deep()
    for found in run_ranks(of_every_schedule, 2):
        for (_, rows), output in found.items():
            torch.testing.assert_close(output, model(make_data(rows)[0]).detach())


def without_bias(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.GELU(), middle, nn.Linear(16, CLASSES, bias=False))


def after_nothing(rank: int, world_size: int) -> list[tuple[list[int], Any]]:
    """After a batch of which all outputs are 0 or nan, for a model that mixes rows and one that does not: the rows of
    each forward of the third batch, and the output."""
    found = []
    x = here(make_data(8)[0])
    for value in (0.0, nan):
        for middle in (Mixes(), nn.GELU()):
            engine = make(pipe(microbatches=4), without_bias(middle))
            engine.eval()
            engine(torch.full_like(x, value))
            engine(x)
            rows: list[int] = []
            engine.model[0].register_forward_hook(lambda module, args, output, rows=rows: rows.append(len(output)))
            output = engine(x)
            found.append((rows, output))
            engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_outputs_that_say_nothing_leave_the_question_open():
    first, second = run_ranks(after_nothing, 2)
    assert [rows for rows, _ in first] == [[8], [2] * 4] * 2
    x = make_data(8)[0]
    expected = [without_bias(middle).eval()(x).detach() for middle in (Mixes(), nn.GELU())]
    torch.testing.assert_close([output for _, output in second], expected * 2)


def of_uneven_ranks(rank: int, world_size: int) -> list[Any]:
    """What one data rank has of each batch, whose rows are other ones on the other data rank."""
    found = []
    x = make_data(8)[0]
    for data in ("replicate", "fsdp"):
        engine = make({"parallel": {"pipeline": {"size": 2, "microbatches": 2}, "data": data}}, layers())
        engine.eval()
        outputs = [engine(here(x[:rows])) for rows in (4, 1 + 3 * engine.context.dp_rank)]
        found += [output.detach() for output in outputs] if engine.context.is_last_stage else []
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_data_ranks_whose_batches_have_other_rows():
    """2 microbatches on one, 1 on the other: under fsdp they wait for each other in forward."""
    found = [outputs for outputs in run_ranks(of_uneven_ranks, 4) if outputs]
    x = make_data(8)[0]
    expected = layers().eval()(x).detach()
    torch.testing.assert_close(found, [[expected[:4], expected[:rows]] * 2 for rows in (1, 4)])
