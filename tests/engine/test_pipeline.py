"""Training and evaluation under a pipeline: losses and outputs, random numbers, ragged batches, and what is sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.counts.test_sent import CLIPPED, NUMBERS, PIPELINE, TENSORS, sent_in_an_update
from tests.support.models import CLASSES, FEATURES, make_data, make_loader, said
from tests.support.pipeline_parts import SCHEDULES, Deep, make, pipe, step
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def readings(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank reads in another pattern: none may wait for another."""
    engine = make(pipe(keep_outputs=True))
    x, y = make_data(8)
    read: list[Any] = []
    for number in range(4):
        output, loss, _ = step(engine, x, y)
        if rank == number % 2:
            read.append((number, loss.item(), output.argmax(1).tolist()))
    engine.eval()
    late = float(loss), [output[i].sum().item() for i in range(8)]
    engine.close()
    return {"read": read, "late": late}


def test_reading_on_one_rank_does_not_hang():
    first, second = run_ranks(readings, 2)
    assert [number for number, *_ in first["read"]] == [0, 2]
    assert [number for number, *_ in second["read"]] == [1, 3]
    assert first["late"] == second["late"]
    model, (x, y) = Deep(), make_data(8)
    assert first["read"][0][1] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
    assert first["read"][0][2] == model(x).argmax(1).tolist()


ROWS = 7, 1


def evaluated(rank: int, world_size: int) -> tuple[list[Any], list[Any], list[str]]:
    """The outputs under every schedule; for the last stage alone an output, or what is said of it, and the criterion of
    it; and the forwards and messages of one such evaluation."""
    found, events = [], list[str]()
    for schedule, options in SCHEDULES.items():
        engine = make(pipe(microbatches=4, schedule=schedule, eval_outputs="all", **options)).eval()
        found.append([engine(here(make_data(rows)[0])) for rows in ROWS])
        engine.close()
    engine, (x, y) = make(pipe(microbatches=4)).eval(), here(make_data(7))
    uses = (lambda output: output.argmax(1), lambda output: engine.criterion(output, y))
    last = [use(engine(x)).detach() if engine.context.is_last_stage else said(use, engine(x)) for use in uses]
    stage = next(iter(engine._executor.stages))
    with pytest.MonkeyPatch.context() as patch:

        def note(owner: Any, name: str, says: Callable[..., str]) -> None:
            inner = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **more: events.append(says(*args)) or inner(*args, **more))

        note(stage, "compute", lambda call, _: f"{len(call.args[0])} rows")
        for name in ("isend", "irecv"):
            note(dist, name, lambda tensor, *_, name=name: f"{name} {len(tensor)}")
        for name in ("send", "recv", "broadcast", "all_reduce", "all_gather_object", "broadcast_object_list"):
            note(dist, name, lambda *_, name=name: name)
        engine(x)
    engine.close()
    return found, last, events


@pytest.mark.promise("arguments without a batch dimension, outputs on request")
def test_evaluation_gives_the_outputs_of_one_process_and_sends_on_each_microbatch():
    """So that the next stage computes it while this one computes the following one. One number tells if all modules of
    all ranks are in evaluation mode."""
    (found, said_of_it, first), (others, last, second) = run_ranks(evaluated, 2)
    with torch.no_grad():
        expected = [Deep()(make_data(rows)[0]) for rows in ROWS]
    torch.testing.assert_close([found, others], [[expected] * len(SCHEDULES)] * 2)
    loss = nn.functional.cross_entropy(expected[0], make_data(7)[1])
    torch.testing.assert_close(last, [expected[0].argmax(1), loss])
    assert all("only the ranks with the last stage have the output" in message for message in said_of_it)
    assert first == ["all_reduce", *(event for n in (2, 2, 2, 1) for event in (f"{n} rows", f"isend {n}"))]
    assert second == ["all_reduce", *(event for n in (2, 2, 2, 1) for event in (f"irecv {n}", f"{n} rows"))]


class Apply(nn.Module):
    """Computes its output from the input, and whether it trains."""

    def __init__(self, how: Callable[[torch.Tensor, bool], Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(x, self.training)


class Counts(nn.Module):
    """Carries a number from batch to batch, in a buffer or an attribute."""

    def __init__(self, start: int | torch.Tensor) -> None:
        super().__init__()
        if isinstance(start, torch.Tensor):
            self.register_buffer("steps", start)
        else:
            self.steps = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps


def layers(*more: nn.Module, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    *middle, last = more or (nn.Identity(),)
    first = nn.Linear(FEATURES, 16, bias=bias), nn.GELU()
    return nn.Sequential(*first, *middle, nn.Linear(16, CLASSES, bias=bias), last)


def mixes(x: torch.Tensor, training: bool) -> torch.Tensor:
    return x if training else x - x.mean(0)


NOTHING = nn.Identity()
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "mixed rows": lambda: layers(Apply(mixes), NOTHING),
    "mixed rows, after outputs of zero": lambda: layers(Apply(mixes), NOTHING, bias=False),
    "a mean": lambda: layers(Apply(lambda x, _: (x, x.mean()))),
    "rows second": lambda: layers(Apply(lambda x, _: (x, x.T))),
    "the number of rows": lambda: layers(Apply(lambda x, _: (x, len(x)))),
    "BatchNorm in training mode": lambda: layers(nn.BatchNorm1d(CLASSES)),
    "a counter in the last stage": lambda: layers(Counts(0)),
    "a buffer": lambda: layers(Counts(torch.zeros(())), NOTHING),
}
"""Models whose microbatches do not give the output of a batch."""
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "plain, after outputs of zero": lambda: layers(bias=False),
    "BatchNorm": lambda: layers(nn.BatchNorm1d(16), NOTHING),
}


def evaluations_of(rank: int, world_size: int) -> dict[str, Any]:
    """The rows of each forward on the first stage in the second evaluation, and the outputs of both."""
    found, x = {}, here(make_data(8)[0])
    for name, build in (WHOLE | SPLIT).items():
        engine = make(pipe(microbatches=4), build()).eval()
        if "training mode" in name and engine.context.is_last_stage:
            engine.model[-1].train()  # the other rank has to know
        if "zero" in name:
            engine(torch.zeros_like(x))
        once, rows = engine(x), list[int]()
        if engine.context.pp_rank == 0:
            engine.model[0].register_forward_hook(lambda module, args, output, rows=rows: rows.append(len(output)))
        found[name] = rows, [once, engine(x)]
        engine.close()
    return found


def test_what_microbatches_would_change_is_evaluated_whole():
    first, second = run_ranks(evaluations_of, 2)
    x = make_data(8)[0]
    for name, build in (WHOLE | SPLIT).items():
        model = build().eval()
        model[-1].train("training mode" in name)
        with torch.no_grad():
            expected = [model(x), model(x)]
        torch.testing.assert_close(second[name][1], expected, msg=lambda text, name=name: f"{name}: {text}")
        assert first[name][0] == ([8] if name in WHOLE else [2] * 4), name


def of_uneven_ranks(rank: int, world_size: int) -> list[Any]:
    """What one data rank has of each batch, whose rows are other ones on the other data rank."""
    found, x = [], make_data(8)[0]
    for data in ("replicate", "fsdp"):
        engine = make({"parallel": {"pipeline": {"size": 2, "microbatches": 2}, "data": data}}, layers()).eval()
        outputs = [engine(here(x[:rows])) for rows in (4, 1 + 3 * engine.context.dp_rank)]
        found += outputs if engine.context.is_last_stage else []
        engine.close()
    return found


def test_data_ranks_whose_batches_have_other_rows():
    """2 microbatches on one, 1 on the other: under fsdp they wait for each other in forward."""
    found = [outputs for outputs in run_ranks(of_uneven_ranks, 4) if outputs]
    expected = layers().eval()(make_data(8)[0]).detach()
    torch.testing.assert_close(found, [[expected[:4], expected[:rows]] * 2 for rows in (1, 4)])


class Recorded(nn.Dropout):
    """Keeps its masks, and draws from the generators of python and numpy, too."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        drawn = random.random(), float(np.random.rand())
        if type(x) is torch.Tensor:  # not a tensor without memory
            self.seen.append(((output != 0).flatten().tolist(), drawn))
        return output


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    random.random(), np.random.rand()
    return nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), target)


def draws(rank: int, world_size: int) -> dict[str, Any]:
    """Of this rank's dropout in two updates: 2 stages x 2 ranks, each with dropout of the same shape; one rank draws
    numbers of its own between."""
    torch.manual_seed(rank)
    layers = [nn.Linear(FEATURES, 16), Recorded(), nn.Linear(16, 16), Recorded(), nn.Linear(16, CLASSES)]
    engine = make(pipe(partition=("2",)) | {"seed": 3}, nn.Sequential(*layers), criterion=noisy)
    torch.manual_seed(7)
    for _ in range(2):
        if rank == 1:
            torch.rand(5, device=rank_device())
        step(engine, *make_data(8))
    outside, of_host = torch.rand(3, device=rank_device()), (random.random(), float(np.random.rand()))
    torch.manual_seed(7)
    as_from_the_start = torch.equal(outside, torch.rand(3, device=rank_device()))
    return {"seen": layers[1 if engine.context.pp_rank == 0 else 3].seen, "outside": (as_from_the_start, of_host)}


def test_every_microbatch_stage_and_data_rank_draws_otherwise_and_what_users_draw_stays():
    results = run_ranks(draws, 4)
    masks = [mask for result in results for mask, _ in result["seen"]]
    assert len(masks) == 4 * 2 * 2
    assert all(first != second for i, first in enumerate(masks) for second in masks[:i])
    for result in results:
        assert len({drawn for _, drawn in result["seen"]}) == 4, "each microbatch draws anew"
    assert [result["outside"][0] for result in results] == [True, False, True, True]
    assert len({result["outside"][1] for result in results}) == 1


def tails(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    loaders = {"loader": make_loader(22, 8), "eval_dataloader": make_loader(22, 5)}
    engine = make(config | {"gradient_accumulation": 2}, **loaders)
    losses = [step(engine, x, y)[1].item() for _ in range(2) for x, y in engine.dataloader]
    engine.eval()
    outputs = [engine(x) for x, _ in engine.eval_dataloader]
    seen = engine.context.all_reduce(here(torch.tensor(sum(map(len, outputs)) if engine.context.is_last_stage else 0)))
    return {"losses": losses, "seen": int(seen), "weights": close_whole(engine)}


@pytest.mark.promise(
    "batches that microbatches do not divide",
    "run in other microbatches, or rejected",
    of="SageMaker",
    page="pipeline.md",
)
@pytest.mark.parametrize("schedule", [name for name in ("1f1b", "interleaved", "zbv") if name in SCHEDULES])
def test_ragged_last_batches_are_run_in_other_microbatches_or_rejected(schedule):
    expected = tails(0, 1, {"parallel": {}})
    assert expected["seen"] == 22
    for found in run_ranks(tails, 2, pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# After batches of 8 in 4 microbatches, rows of a batch and into how many microbatches it is split.
COUNTS = {
    "1f1b": {8: 4, 6: 6, 10: 5, 3: 3, 1: None},
    "interleaved": {8: 4, 6: 6, 5: None},
    "1f1b with BatchNorm": {8: 4, 6: 3, 5: None},  # which needs two samples at a time
}


def splits(rank: int, world_size: int) -> dict[str, dict[int, tuple[str, list[int]]]]:
    """What is said of each batch, and the rows that the criterion sees."""
    found: dict[str, dict[int, tuple[str, list[int]]]] = {}
    x, y = make_data(10)
    for name, counts in COUNTS.items():
        schedule, _, norm = name.partition(" ")
        calls: list[int] = []

        def criterion(output: torch.Tensor, target: torch.Tensor, calls: Any = calls) -> torch.Tensor:
            calls.append(len(target))
            return nn.functional.cross_entropy(output, target)

        config = pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule])
        engine = make(config, Deep(nn.BatchNorm1d(16)) if norm else None, criterion=criterion)
        found[name] = {rows: (said(step, engine, x[:rows], y[:rows]), calls.copy()) for rows in counts}
        engine.close()
    return found


def test_a_batch_that_the_microbatches_do_not_divide():
    for found in run_ranks(splits, 2):
        for name, counts in COUNTS.items():
            seen = 0
            for rows, count in counts.items():
                text, calls = found[name][rows]
                rejected = f"a batch of {rows} samples cannot be split into 4 microbatches"
                assert ("nothing" if count else rejected) in text
                if calls and count:  # on the last stage; of the first batch the whole loss is computed, too
                    assert calls[seen : seen + count] == [rows // count] * count
                seen = len(calls)
        assert "drop_last=True" in found["interleaved"][5][0]
        assert "2 samples or more in each, which BatchNorm needs" in found["1f1b with BatchNorm"][5][0]


def joins_later(rank: int, world_size: int, config: Any) -> list[Any]:
    """The middle layer is trained from the third update on, in a group of its own. Losses, weights, and the optimizer's
    state and groups by names of parameters."""
    model, batch, losses = Deep(), make_data(8), []
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[-1].parameters()], lr=0.01)
    engine = make(config, model, optimizer=optimizer)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        losses.append(step(engine, *batch)[1].item())
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    groups = [group["params"] for group in full["optimizer"]["param_groups"]]
    return [losses, full["model"], full["optimizer"]["state"], groups]


def test_a_layer_that_is_trained_later_trains_as_in_one_process():
    *expected, groups = joins_later(0, 1, {})
    for *found, ours in run_ranks(joins_later, 2, pipe(partition="auto")):
        assert ours == groups
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_reduced_once_per_update():
    """Each of a stage's, and a flag whether it is there, in an update of two batches."""
    parallel = {**PIPELINE, "data": {"size": 2}}
    reduced = {"all_reduce float32": (1, (NUMBERS + TENSORS) // 2)}
    for sent in run_ranks(sent_in_an_update, 4, CLIPPED | {"parallel": parallel}):
        assert {kind: sent[kind] for kind in reduced} == reduced
