"""Training and evaluation under a pipeline: losses and outputs, random numbers, ragged batches, and what is sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.parallel.pipeline.schedules import forward_order
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


# -- evaluation ------------------------------------------------------------------------------------------------------


def evaluations(rank: int, world_size: int) -> list[Any]:
    """An output, or what is said of it; and the criterion of it."""
    engine = make(pipe(eval_outputs="last")).eval()
    x, y = here(make_data(5))
    uses = (lambda output: output.argmax(1), lambda output: engine.criterion(output, y))
    return [use(engine(x)).detach() if engine.context.is_last_stage else said(use, engine(x)) for use in uses]


def test_evaluation_gives_the_last_stage_its_outputs_at_once():
    first, second = run_ranks(evaluations, 2)
    model, (x, y) = Deep(), make_data(5)
    expected = [model(x).argmax(1), nn.functional.cross_entropy(model(x), y).detach()]
    torch.testing.assert_close(second, expected)
    assert all("only the ranks with the last stage have the output" in message for message in first)


LOOPED, IN_A_V = [0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "count", "ticks"),
    [([0, 1, 2, 3], 5, 5 + 3), ([0, 1, 2, 3], 1, 4), (LOOPED, 4, 3 * 4 + 1), (IN_A_V, 6, 2 * 6 + 4), ([0, 1], 7, 8)],
)
def test_the_order_of_forwards_keeps_all_ranks_busy(ranks, count, ticks):
    order, done = list(forward_order(ranks, count)), [0] * len(ranks)
    assert len(order) == ticks, "each rank computes without a pause once it has begun, or nearly so"
    for tick in order:
        assert len({ranks[stage] for stage, _ in tick}) == len(tick), "a rank computes one at a time"
        assert all(done[stage] < (done[stage - 1] if stage else count) for stage, _ in tick), "it has its input"
        for stage, number in tick:
            assert number == done[stage]
            done[stage] += 1
    assert done == [count] * len(ranks)


ROWS = 7, 1


def evaluated(rank: int, world_size: int) -> tuple[list[Any], list[str]]:
    """The outputs under every schedule; and the forwards and messages of one evaluation for the last stage alone."""
    found, events = [], list[str]()
    for schedule, options in SCHEDULES.items():
        engine = make(pipe(microbatches=4, schedule=schedule, eval_outputs="all", **options)).eval()
        found.append([engine(here(make_data(rows)[0])) for rows in ROWS])
        engine.close()
    engine, x = make(pipe(microbatches=4)).eval(), here(make_data(7)[0])
    engine(x)  # compares what ranks were given, and tries microbatches
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
    return found, events


@pytest.mark.promise("arguments without a batch dimension, outputs on request")
def test_evaluation_gives_the_outputs_of_one_process_and_sends_on_each_microbatch():
    """So that the next stage computes it while this one computes the following one. One number tells if all modules of
    all ranks are in evaluation mode."""
    (found, first), (others, second) = run_ranks(evaluated, 2)
    with torch.no_grad():
        expected = [Deep()(make_data(rows)[0]) for rows in ROWS]
    torch.testing.assert_close([found, others], [[expected] * len(SCHEDULES)] * 2)
    assert first == ["all_reduce", *(event for n in (2, 2, 2, 1) for event in (f"{n} rows", f"isend {n}"))]
    assert second == ["all_reduce", *(event for n in (2, 2, 2, 1) for event in (f"irecv {n}", f"{n} rows"))]


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


NOTHING = nn.Identity()
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "mixed rows": lambda: layers(Mixes(), NOTHING),
    "mixed rows, after outputs of zero": lambda: layers(Mixes(), NOTHING, bias=False),
    "a mean": lambda: layers(Doubles(lambda x: x.mean())),
    "a table": lambda: layers(Doubles(lambda x: x.T @ x)),
    "rows second": lambda: layers(Doubles(lambda x: x.T)),
    "the number of rows": lambda: layers(Doubles(len)),
    "BatchNorm in training mode": lambda: layers(nn.BatchNorm1d(CLASSES)),
    "a counter in the last stage": lambda: layers(Counts(0)),
    "a buffer": lambda: layers(Counts(torch.zeros(())), NOTHING),
}
"""Models whose microbatches do not give the output of a batch."""
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "plain": layers,
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
    """Keeps its masks."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if type(x) is torch.Tensor:  # not a tensor without memory
            self.masks.append((output != 0).detach())
        return output


def masks(rank: int, world_size: int) -> dict[str, Any]:
    """Of this rank's dropout in two updates: 2 stages x 2 ranks, each with dropout of the same shape; one rank draws
    numbers of its own between."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(FEATURES, 16), Recorded(), nn.Linear(16, 16), Recorded(), nn.Linear(16, CLASSES))
    engine = make(pipe(partition=("2",)) | {"seed": 3}, model)
    torch.manual_seed(7)
    for _ in range(2):
        if rank == 1:
            torch.rand(5, device=rank_device())
        step(engine, *make_data(8))
    found = (model[1] if engine.context.pp_rank == 0 else model[3]).masks
    outside = torch.rand(3, device=rank_device())
    torch.manual_seed(7)
    return {"masks": found, "as from the start": torch.equal(outside, torch.rand(3, device=rank_device()))}


def test_every_microbatch_stage_and_data_rank_drops_otherwise():
    results = run_ranks(masks, 4)
    flat = [mask.flatten().tolist() for result in results for mask in result["masks"]]
    assert len(flat) == 4 * 2 * 2
    assert all(first != second for i, first in enumerate(flat) for second in flat[:i])
    # What the user draws does not depend on the model.
    assert [result["as from the start"] for result in results] == [True, False, True, True]


class Jumps(nn.Module):
    """Draws of every kind."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random(), float(np.random.rand())
        self.seen.append(drawn)
        return x + self.factor * (sum(drawn) + torch.rand_like(x))


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    random.random(), np.random.rand()
    return nn.functional.cross_entropy(output + 0.01 * torch.randn_like(output), target)


def draws(rank: int, world_size: int) -> dict[str, Any]:
    model = Deep(Jumps(0.1))
    engine = make(pipe() | {"seed": 7}, model, criterion=noisy)
    x, y = here(make_data(8))
    engine.model.eval()
    model[3].train()  # as Monte Carlo dropout
    with torch.no_grad():
        engine(x)
    engine.train()
    model[3].seen.clear()
    for _ in range(3):
        step(engine, x, y)
    saved = engine.state_dict()["random"]["host"]
    outside = torch.rand(2, device=rank_device()).tolist(), random.random(), float(np.random.rand())
    return {"outside": outside, "seen": list(model[3].seen), "saved": saved is not None}


def test_what_a_stage_or_the_criterion_draws_does_not_part_the_ranks():
    first, second = run_ranks(draws, 2)
    assert first["outside"] == second["outside"]
    assert first["saved"]
    assert second["saved"]
    [seen] = [result["seen"] for result in (first, second) if len(set(result["seen"])) > 1]
    assert len(set(seen)) == len(seen) == 3 * 2  # each microbatch draws anew


# -- ragged batches


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


def joins_later(start: Any) -> Any:
    """The middle layer is trained from the third update on, in a group of its own."""
    model, batch = Deep(), make_data(8)
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[-1].parameters()], lr=0.01)
    engine = start(model, optimizer=optimizer)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        yield step(engine, *batch)[1].item()
    yield engine


def run_loop(rank: int, world_size: int, loop: Any, config: Any) -> list[Any]:
    """Losses, weights, and the optimizer's state and groups by names of parameters."""
    *losses, engine = loop(partial(make, config))
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    optimizer = full["optimizer"]
    return [losses, full["model"], optimizer["state"], [group["params"] for group in optimizer["param_groups"]]]


def test_what_changes_on_the_way_changes_as_in_one_process():
    *expected, groups = run_loop(0, 1, joins_later, {})
    for *found, ours in run_ranks(run_loop, 2, joins_later, pipe(partition="auto")):
        assert ours == groups
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


class Residual(nn.Module):
    """Its sum is in fp32 under autocast. `rounds`: at the end, as a stage that sends it in bf16."""

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self.layer, self.rounds = nn.Linear(FEATURES, FEATURES), rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layer(x).tanh()
        return x.bfloat16().float() if self.rounds else x


def residuals(cuts: Sequence[str] = ()) -> nn.Module:
    """Three of them, of which those before a cut round."""
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(str(after) in cuts) for after in (1, 2, 3)), nn.Linear(FEATURES, CLASSES))


def trained_residuals(rank: int, world_size: int, config: Any, cuts: Sequence[str] = ()) -> tuple[Any, Any]:
    """The weights after four updates of two microbatches, and the output of an evaluation."""
    x, y = make_data(8)
    engine = make(config, residuals(cuts))
    batches = [(x[:4], y[:4]), (x[4:], y[4:])] if engine.config.gradient_accumulation == 2 else [(x, y)]
    for batch in batches * 4:
        step(engine, *batch)
    weights = engine.full_state_dict(rank0_only=False)
    engine.eval()
    with torch.no_grad():
        output = engine(here(x))
    return weights, output.cpu() if engine.context.is_last_stage else None


AUTOCAST = {"bf16": {"mode": "torch"}}


@pytest.mark.not_simulated("one process, on the CPU, whose autocast casts other operations")
def test_activations_sent_in_autocasts_dtype_are_rounded_once_at_each_cut():
    """As in one process that rounds there, and the gradients with it; by default nothing is rounded."""
    cuts, weights = ("1", "2", "3"), []
    for send_dtype, rounded in (("same", ()), ("compute", cuts)):
        expected = trained_residuals(0, 1, AUTOCAST | {"gradient_accumulation": 2}, rounded)
        weights.append(expected[0])
        config = pipe(send_dtype=send_dtype, schedule="interleaved", chunks=2, partition=cuts) | AUTOCAST
        for found in run_ranks(trained_residuals, 2, config):
            there = expected if found[1] is not None else (expected[0], None)
            torch.testing.assert_close(found, there, rtol=1e-6, atol=1e-7, check_device=False)
    same, compute = weights
    assert any((same[name] - compute[name]).abs().max() > 1e-5 for name in same)


CALLS = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")


def traffic(rank: int, world_size: int) -> tuple[list[int], list[list[tuple[str, int]]]]:
    """Bytes of the gradients; and the collectives of each batch of an update of two."""
    config = pipe(microbatches=4) | {"clip_grad_norm": 1.0, "gradient_accumulation": 2}
    config["parallel"]["data"] = {"bucket_mb": 1e-4}  # a bucket for each parameter
    engine = make(config)
    batch, found = make_data(8), []
    step(engine, *batch), step(engine, *batch)
    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            inner = getattr(dist, call)

            def record(tensor: Any, *args: Any, call: Any = call, inner: Any = inner, **options: Any) -> Any:
                found[-1].append((call, tensor.numel() * tensor.element_size()))
                return inner(tensor, *args, **options)

            patch.setattr(dist, call, record)
        for _ in range(2):
            found.append([])
            step(engine, *batch)[1].item()
    return [4 * p.numel() for p in engine.model.parameters()], found


def test_gradients_are_reduced_in_the_last_backward_once_per_update():
    """Each with zeros up to 32 bytes, and a flag whether it is there. The last bucket waits for the end of backward."""
    for grads, (first, second) in run_ranks(traffic, 4):
        assert first == [("broadcast", 16)]
        *reduced, loss, last, verdict = second
        assert {call for call, _ in (*reduced, last)} == {"all_reduce"}
        assert sorted(size for _, size in (*reduced, last)) == sorted(-(-grad // 32) * 32 + 4 for grad in grads)
        assert (loss, verdict) == (("broadcast", 16), ("all_reduce", 8))
