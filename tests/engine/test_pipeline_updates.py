"""Updates under a pipeline: what is sent, frozen, added and skipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import Deep, make, pipe, step, whole
from tests.support.ranks import here, run_ranks

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


CALLS = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")
MODES = {"fp32": {}, "torch": {"bf16": {"mode": "torch"}}, "naive": {"bf16": {"mode": "naive"}}}


def traffic(rank: int, world_size: int, mode: str) -> tuple[list[int], list[Any]]:
    """Bytes of the gradients; and what a rank sends in each batch of an update of two, to other stages and to all."""
    config = pipe(microbatches=4) | {"clip_grad_norm": 1.0, "gradient_accumulation": 2} | MODES[mode]
    config["parallel"]["data"] = {"bucket_mb": 1e-4}  # a bucket for each parameter
    engine = make(config)
    batch, found = make_data(8), []
    step(engine, *batch), step(engine, *batch)

    class Recorded(dist.P2POp):
        def __init__(self, op: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().__init__(op, tensor, *args, **kwargs)
            if op is dist.isend:
                sent.append(tensor.numel() * tensor.element_size())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", Recorded)
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


@pytest.mark.promise("outputs are sent on request")
@pytest.mark.parametrize(("mode", "size"), [("fp32", 4), ("torch", 2), ("naive", 2)])
def test_what_is_sent_in_an_update(mode, size):
    """Activations once forward and their gradients once back, the loss, and one verdict with the norm."""
    for _, found in run_ranks(traffic, 2, mode):
        assert [sent for sent, _ in found] == [[2 * 16 * size] * 4] * 2
        assert [collectives for _, collectives in found] == [
            [("broadcast", 16)],
            [("broadcast", 16), ("all_reduce", 8)],
        ]


class Residual(nn.Linear):
    """Whose sum is in half precision where its input is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(torch.tanh(x))


def residuals(rank: int, world_size: int, config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    inner = (Residual(16, 16) for _ in range(4))
    model = nn.Sequential(nn.Linear(FEATURES, 16), *inner, nn.Linear(16, CLASSES))
    splits = 1 if "parallel" in config else 4
    engine = make(config, model)
    for _ in range(3):
        engine.zero_grad()
        for x, y in zip(*(part.chunk(splits) for part in here(make_data(8))), strict=True):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    return whole(engine)


@pytest.mark.parametrize("config", [{"bf16": {"mode": "torch"}}, {"fp16": {"mode": "torch", "init_scale": 256.0}}])
def test_half_precision_crosses_as_it_is_and_ends_in_the_bits_of_one_process(config):
    [expected] = run_ranks(residuals, 1, config | {"gradient_accumulation": 4})
    for found in run_ranks(residuals, 3, config | pipe(3, microbatches=4)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def received(rank: int, world_size: int, schedule: str) -> tuple[int, int]:
    """Bytes that are received into at most at one time, and after a step, with batches of two shapes."""
    engine, most = make(pipe(microbatches=8, schedule=schedule)), 0
    seen: dict[StorageWeakRef, int] = {}

    def held() -> int:
        return sum(size for ref, size in seen.items() if not ref.expired())

    class Recorded(dist.P2POp):
        def __init__(self, op: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            nonlocal most
            super().__init__(op, tensor, *args, **options)
            if op is dist.irecv:
                seen[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
                most = max(most, held())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", Recorded)
        for rows in (8, 16, 8):
            step(engine, *make_data(rows))
    return most, held()


@pytest.mark.not_simulated("messages that let go of their tensors")
@pytest.mark.parametrize(("schedule", "most"), [("1f1b", (1, 1)), ("gpipe", (1, 8))])
def test_memory_to_receive_into_is_there_while_it_is_used(schedule, most):
    """Of two rows of 16 numbers; gradients on rank 0, and activations on rank 1."""
    for found, times in zip(run_ranks(received, 2, schedule), most, strict=True):
        assert found == (times * 2 * 16 * 4, 0)


def groups(rank: int, world_size: int) -> tuple[list[list[int]], set[str], set[str]]:
    """The ranks of both groups of the pipeline; and which of them are used, in a step and an evaluation, for what is
    sent from stage to stage, and for collectives."""
    engine = make(pipe(keep_outputs=True))
    context, x, y = engine.context, *here(make_data(8))
    names = {context.subgroup(range(context.pp_size), "pp"): "send_group", context.group("pp"): "pp"}
    sent: set[str] = set()
    collectives: set[str] = set()

    def note(module: Any, call: str, found: set[str]) -> None:
        inner = getattr(module, call)

        def record(*args: Any, group: Any = None, **options: Any) -> Any:
            found.add(names.get(group or dist.group.WORLD, "all"))
            return inner(*args, group=group, **options)

        patch.setattr(module, call, record)

    class Recorded(dist.P2POp):
        def __init__(self, op: Any, tensor: torch.Tensor, peer: Any = None, group: Any = None, **options: Any) -> None:
            super().__init__(op, tensor, peer, group, **options)
            sent.add(names.get(group, "another"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", Recorded)
        for call in ("broadcast", "all_gather_object"):
            note(dist, call, collectives)
        step(engine, x, y)  # the first one, in which inputs are compared
        for call in ("isend", "irecv"):
            note(dist, call, sent)
        engine.eval()
        engine(x)
    return [dist.get_process_group_ranks(group) for group in names], sent, collectives


@pytest.mark.parametrize("size", [2, 4])
def test_what_stages_send_has_a_group_of_its_own(size):
    """NCCL runs all that uses one group in one order. With 2 ranks the other group is that of all ranks."""
    for rank, (ranks, sent, collectives) in enumerate(run_ranks(groups, size)):
        assert ranks == [[rank % (size // 2), rank % (size // 2) + size // 2]] * 2
        assert sent == {"send_group"}
        # All ranks tell what forward wrote, and whether it mixes rows.
        assert collectives - {"all"} == {"pp"}


def test_without_a_pipeline_there_is_no_such_group():
    for made in run_ranks(groups_made, 2):
        assert set(made.values()) <= {"dp", "stage"}


def groups_made(rank: int, world_size: int) -> dict[str, str]:
    engine = make({})
    step(engine, *make_data(8))
    return engine.context.groups


def test_gradients_are_reduced_in_the_last_backward_once_per_update():
    """With a flag for each parameter, whether it has one. The last bucket waits for the end of backward."""
    for grads, ((_, first), (_, second)) in run_ranks(traffic, 4, "fp32"):
        assert first == [("broadcast", 16)]
        *reduced, loss, last, verdict = second
        assert {call for call, _ in (*reduced, last)} == {"all_reduce"}
        assert sorted(size for _, size in (*reduced, last)) == sorted(grad + 4 for grad in grads)
        assert (loss, verdict) == (("broadcast", 16), ("all_reduce", 8))


IDLE = {"first": 0, "middle": 2, "last": 5}


def idle_stages(rank: int, world_size: int) -> dict[str, Any]:
    """Stages with nothing to train, and one without parameters; the loss overflows once."""
    x, y = make_data(8)
    found = {}
    for name, index in IDLE.items():
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.GELU(), nn.Linear(16, CLASSES))
        model = nn.Sequential(*layers)
        model[index].requires_grad_(False)
        criterion = Factored()
        config = pipe(4, 4, partition=("2", "4", "5"))
        config |= {"fp16": {"mode": "torch", "init_scale": 64.0}, "clip_grad_norm": 0.1}
        engine = make(config, model, criterion=criterion)
        results = []
        for criterion.factor in (1.0, torch.inf, 1.0):
            result = step(engine, x, y)[2]
            results.append((result.skipped, result.loss_scale, result.grad_norm))
        found[name] = results, whole(engine)
    return found


class Factored:
    factor: float = 1.0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * self.factor


def test_stages_without_trainable_parameters_share_the_verdict():
    results = run_ranks(idle_stages, 4)
    for name in IDLE:
        steps = [result[name][0] for result in results]
        assert [(skipped, scale) for skipped, scale, _ in steps[0]] == [(False, 64), (True, 64), (False, 32)]
        assert all(repr(other) == repr(steps[0]) for other in steps)
        assert 0 < steps[0][0][2] < 10
        weights = [result[name][1] for result in results]
        assert all(torch.equal(v, other[n]) for other in weights for n, v in weights[0].items())
