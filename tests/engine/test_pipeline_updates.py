"""Updates under a pipeline: what changes on the way, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import Deep, make, pipe, step
from tests.support.ranks import here, run_ranks
from tests.support.versions import SPLIT_SCHEDULES

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


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


class Annealed(nn.Module):
    """Reads numbers that the user changes on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 16)
        self.last = nn.Linear(16, CLASSES)
        self.alpha = 1.0
        self.doubles = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        rows = x.size(0)
        assert x.dim() == 2, "a batch is needed"
        x = self.first(x) * self.alpha * scale
        if x.shape[0] != rows:
            raise ValueError(f"{rows} rows went in")
        return self.last(x + x if self.doubles else x)


def anneals(start: Any) -> Any:
    model, (x, y) = Annealed(), here(make_data(8))
    engine = start(model)
    for number in range(6):
        model.alpha, model.doubles = 1 + number, number > 3
        engine.zero_grad()
        rows = slice(0, 4 if number in (2, 4) else 8)
        loss = engine.criterion(engine(x[rows], scale=1 + number / 10), y[rows])
        engine.backward(loss)
        engine.step()
        yield loss.item()
    yield engine


def run_loop(rank: int, world_size: int, loop: Any, config: Any) -> list[Any]:
    """Losses, weights, and the optimizer's state and groups by names of parameters."""
    *losses, engine = loop(partial(make, config))
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    optimizer = full["optimizer"]
    return [losses, full["model"], optimizer["state"], [group["params"] for group in optimizer["param_groups"]]]


@pytest.mark.parametrize(("loop", "partition"), [(joins_later, "auto"), (anneals, ("last",))])
def test_what_changes_on_the_way_changes_as_in_one_process(loop, partition):
    *expected, groups = run_loop(0, 1, loop, {})
    for *found, ours in run_ranks(run_loop, 2, loop, pipe(partition=partition)):
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
CUTS = {
    "1f1b": {"partition": ("2",)},
    "interleaved": {"partition": ("1", "2", "3"), "chunks": 2},
    "zero_bubble": {"partition": ("1", "2", "3"), "chunks": 2},
}


@pytest.mark.not_simulated("one process, on the CPU, whose autocast casts other operations")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", *SPLIT_SCHEDULES[:1]])
def test_activations_sent_in_autocasts_dtype_are_rounded_once_at_each_cut(schedule):
    """As in one process that rounds there, and the gradients with it; by default nothing is rounded."""
    options, weights = CUTS[schedule] | {"schedule": schedule}, []
    for send_dtype, cuts in (("same", ()), ("compute", options["partition"])):
        expected = trained_residuals(0, 1, AUTOCAST | {"gradient_accumulation": 2}, cuts)
        weights.append(expected[0])
        for found in run_ranks(trained_residuals, 2, pipe(send_dtype=send_dtype, **options) | AUTOCAST):
            there = expected if found[1] is not None else (expected[0], None)
            torch.testing.assert_close(found, there, rtol=1e-6, atol=1e-7, check_device=False)
    same, rounded = weights
    assert any((same[name] - rounded[name]).abs().max() > 1e-5 for name in same)


def test_nothing_is_rounded_where_nothing_casts():
    plain, compute = (
        run_ranks(trained_residuals, 2, pipe(partition=("2",), send_dtype=kind)) for kind in ("same", "compute")
    )
    for (weights, _), (others, _) in zip(plain, compute, strict=True):
        assert all(torch.equal(weights[name], others[name]) for name in weights)


CALLS = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")


class Recorded(dist.P2POp):
    """Tells of each message before it begins."""

    tell: Any = None

    def __init__(self, op: Any, tensor: torch.Tensor, peer: Any = None, group: Any = None, **options: Any) -> None:
        super().__init__(op, tensor, peer, group, **options)
        Recorded.tell(op, tensor, group)


@contextmanager
def telling(tell: Any) -> Iterator[pytest.MonkeyPatch]:
    """A scope in which each message tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", Recorded)
        patch.setattr(Recorded, "tell", tell)
        yield patch


def traffic(rank: int, world_size: int) -> tuple[list[int], list[Any]]:
    """Bytes of the gradients; and what a rank sends in each batch of an update of two, to other stages and to all."""
    config = pipe(microbatches=4) | {"clip_grad_norm": 1.0, "gradient_accumulation": 2}
    config["parallel"]["data"] = {"bucket_mb": 1e-4}  # a bucket for each parameter
    engine = make(config)
    batch, found = make_data(8), []
    step(engine, *batch), step(engine, *batch)

    def tell(op: Any, tensor: torch.Tensor, group: Any) -> None:
        if op is dist.isend:
            sent.append(tensor.numel() * tensor.element_size())

    with telling(tell) as patch:
        for call in CALLS:
            inner = getattr(dist, call)

            def record(tensor: Any, *args: Any, call: Any = call, inner: Any = inner, **options: Any) -> Any:
                collectives.append((call, tensor.numel() * tensor.element_size()))
                return inner(tensor, *args, **options)

            patch.setattr(dist, call, record)
        for _ in range(2):
            sent: list[int] = []
            collectives: list[tuple[str, int]] = []
            step(engine, *batch)[1].item()
            found.append((sent, collectives))
    return [4 * p.numel() for p in engine.model.parameters()], found


def test_gradients_are_reduced_in_the_last_backward_once_per_update():
    """Each with zeros up to 32 bytes, and a flag whether it is there. The last bucket waits for the end of backward."""
    for grads, ((_, first), (_, second)) in run_ranks(traffic, 4):
        assert first == [("broadcast", 16)]
        *reduced, loss, last, verdict = second
        assert {call for call, _ in (*reduced, last)} == {"all_reduce"}
        assert sorted(size for _, size in (*reduced, last)) == sorted(-(-grad // 32) * 32 + 4 for grad in grads)
        assert (loss, verdict) == (("broadcast", 16), ("all_reduce", 8))


def received(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """By schedule, bytes that are received into at most at one time, and after a step, with batches of two shapes."""
    found = {}
    for schedule in ("1f1b", "gpipe"):
        engine, most = make(pipe(microbatches=8, schedule=schedule)), [0]
        seen: dict[StorageWeakRef, int] = {}

        def held(seen: Any = seen) -> int:
            return sum(size for ref, size in seen.items() if not ref.expired())

        def tell(op: Any, tensor: torch.Tensor, group: Any, seen: Any = seen, most: Any = most) -> None:
            if op is dist.irecv:
                seen[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
                most.append(held(seen))

        with telling(tell):
            for rows in (8, 16, 8):
                step(engine, *make_data(rows))
        found[schedule] = max(most), held(seen)
        engine.close()
    return found


@pytest.mark.not_simulated("messages that let go of their tensors")
def test_memory_to_receive_into_is_there_while_it_is_used():
    """Of two rows of 16 numbers; gradients on rank 0, and activations on rank 1."""
    size = 2 * 16 * 4
    first, second = run_ranks(received, 2)
    assert first == {"1f1b": (size, 0), "gpipe": (size, 0)}
    assert second == {"1f1b": (size, 0), "gpipe": (8 * size, 0)}


def groups(rank: int, world_size: int) -> tuple[list[list[int]], set[str], set[str]]:
    """The ranks of both groups of the pipeline; and which of them are used, in a step and an evaluation, for what is
    sent from stage to stage, and for collectives."""
    engine = make(pipe(keep_outputs=True))
    context, x, y = engine.context, *here(make_data(8))
    names = {context.subgroup(range(context.pp_size), "pp"): "send_group", context.group("pp"): "pp"}
    sent: set[str] = set()
    collectives: set[str] = set()

    def note(call: str, found: set[str]) -> None:
        inner = getattr(dist, call)

        def record(*args: Any, group: Any = None, **options: Any) -> Any:
            found.add(names.get(group or dist.group.WORLD, "all"))
            return inner(*args, group=group, **options)

        patch.setattr(dist, call, record)

    with telling(lambda op, tensor, group: sent.add(names.get(group, "another"))) as patch:
        for call in ("broadcast", "all_gather_object"):
            note(call, collectives)
        step(engine, x, y)  # the first one, in which inputs are compared
        for call in ("isend", "irecv"):
            note(call, sent)
        engine.eval()
        engine(x)
    return [dist.get_process_group_ranks(group) for group in names], sent, collectives


def test_what_stages_send_has_a_group_of_its_own():
    """NCCL runs all that uses one group in one order. With 2 ranks the other group is that of all ranks."""
    for rank, (ranks, sent, collectives) in enumerate(run_ranks(groups, 4)):
        assert ranks == [[rank % 2, rank % 2 + 2]] * 2
        assert sent == {"send_group"}
        # All ranks tell what forward wrote, and whether it mixes rows.
        assert collectives - {"all"} == {"pp"}
