"""Several data ranks: equal to one process on the joined batch, equal to torch DDP, equal to each other."""

from __future__ import annotations

import copy
import logging
import logging.handlers
import math
import multiprocessing
import os
import random
import socket
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist_harness import run_ranks
from models import (
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
    train,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halfmesh
from halfmesh.errors import InputError, NonFiniteError

pytestmark = pytest.mark.distributed


def joined(batches: int, size: int, world_size: int, accumulation: int = 1) -> list:
    """The batches of one process that sees what all ranks see together."""
    x, y = make_data(batches * size * world_size)
    return list(zip(x.split(size * world_size * accumulation), y.split(size * world_size * accumulation), strict=True))


# -- parity ----------------------------------------------------------------------------------------------------------


def parity(rank: int, world_size: int) -> dict[str, Any]:
    """Every mode, alone and with accumulation (a short last cycle) and clipping, in one launch."""
    results = {}
    for mode, base in MODES.items():
        growing = {"growth_interval": 2} if "fp16" in mode else {}
        base = {key: {**value, **growing} for key, value in base.items()}
        for accumulation in (1, 2):
            config = base | {"gradient_accumulation": accumulation, "clip_grad_norm": 0.7}
            engine = make_engine(config, loader=make_loader(world_size * 4 * 10, 4), model=MLP(seed=rank))
            if rank != 0:  # weights must have come from rank 0
                torch.testing.assert_close(engine.model.first.bias, MLP().first.bias.to(engine.model.first.bias.dtype))
            steps = [r for r in train(engine) if r is not None]
            results[f"{mode} x{accumulation}"] = {
                "weights": full_weights(engine),
                "exact": [(r.skipped, r.grad_norm, r.loss_scale, r.lr) for r in steps],
            }
            engine.close()
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process_on_the_joined_batch(world_size):
    results = run_ranks(parity, world_size, timeout=120)
    for case, mine in results[0].items():
        mode, accumulation = case.split(" x")
        for other in results[1:]:
            assert other[case]["exact"] == mine["exact"], case
            torch.testing.assert_close(other[case]["weights"], mine["weights"], rtol=0, atol=0)
        model = MLP()
        expected = reference(joined(10, 4, world_size, int(accumulation)), max_norm=0.7, model=model)
        assert difference(mine["weights"], expected) < TOLERANCES[mode], case


def against_ddp(rank: int, world_size: int) -> float:
    engine = make_engine(optimizer=adamw, loader=make_loader(64, 4))
    train(engine)
    ddp = DistributedDataParallel(MLP())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
    x, y = make_data(64)
    for begin in range(0, 64, 4 * world_size):
        part = slice(begin + rank, begin + 4 * world_size, world_size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[part]), y[part]).backward()
        optimizer.step()
    return difference(full_weights(engine), ddp.module)


def test_bitwise_equal_to_torch_ddp():
    assert run_ranks(against_ddp, 2) == [0.0, 0.0]


def reductions(rank: int, world_size: int) -> dict[str, int]:
    counts = {}
    for accumulation in (1, 4):
        engine = make_engine({"gradient_accumulation": accumulation}, loader=make_loader(world_size * 4 * 8, 4))
        train(engine)
        counts[f"x{accumulation}"] = engine._cycle.reducer.collectives
        counts[f"bytes x{accumulation}"] = engine._cycle.reducer.bytes_reduced
        engine.close()
    return counts


def test_one_reduction_per_update():
    parameters = sum(p.numel() for p in MLP().parameters())
    one = 4 * (parameters + len(list(MLP().parameters())))
    for counts in run_ranks(reductions, 2):
        assert counts == {"x1": 8, "bytes x1": 8 * one, "x4": 2, "bytes x4": 2 * one}


# -- one verdict -----------------------------------------------------------------------------------------------------


def overflow_on_one_rank(rank: int, world_size: int, mode: str) -> list:
    engine = make_engine(MODES[mode], loader=make_loader(40, 4))
    history = []
    for step, (x, y) in enumerate(engine.dataloader):
        loss = engine.criterion(engine(x), y)
        engine.zero_grad()
        engine.backward(loss * math.inf if step in (0, 3) and rank == 1 else loss)
        result = engine.step()
        history.append((result.skipped, result.loss_scale, result.lr))
    return [history, full_weights(engine), engine.skipped_steps]


@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_overflow_on_one_rank_skips_on_all(mode):
    first, second = run_ranks(overflow_on_one_rank, 2, mode)
    assert first[0] == second[0]
    assert [skipped for skipped, *_ in first[0]] == [True, False, False, True, False]
    torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)
    assert first[2] == second[2] == 2


def storm(rank: int, world_size: int) -> str:
    engine = make_engine(FP16_TORCH | {"max_consecutive_skips": 3})
    try:
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y) * (math.nan if rank == 1 else 1))
            engine.step()
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_a_storm_stops_all_ranks():
    for message in run_ranks(storm, 2):
        assert "3 updates in a row had gradients with inf or nan" in message
        assert "'first.weight'" in message


def weighted(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Ranks with different numbers of samples: equal to the joined batch all the same."""

    def criterion(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    config = FP16_NAIVE | {"loss_reduction": "weighted", "gradient_accumulation": 2}
    engine = make_engine(config, criterion=criterion)
    x, y = make_data(24)
    for begin in range(0, 24, 12):
        for part in ((0, 5), (5, 7)) if rank == 0 else ((7, 8), (8, 12)):
            piece = slice(begin + part[0], begin + part[1])
            engine.backward(engine.criterion(engine(x[piece]), y[piece]))
            engine.step()
    return full_weights(engine)


def test_weighted_over_ranks_and_microbatches():
    x, y = make_data(24)
    expected = reference(zip(x.split(12), y.split(12), strict=True))
    for weights in run_ranks(weighted, 2):
        assert difference(weights, expected) < TOLERANCES["naive_fp16"]


def summed(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    engine = make_engine(
        {"loss_reduction": "sum"}, criterion=nn.CrossEntropyLoss(reduction="sum"), loader=make_loader(24, 4)
    )
    train(engine)
    return full_weights(engine)


def test_sum_over_ranks():
    x, y = make_data(24)
    expected = reference(zip(x.split(8), y.split(8), strict=True), reduction="sum")
    for weights in run_ranks(summed, 2):
        assert difference(weights, expected) < 1e-5


def two_backwards(rank: int, world_size: int) -> list:
    """Two losses, one step: as one loss that is their sum, in every reduction."""
    found = []
    for reduction in ("mean", "sum", "weighted"):
        weights = []
        for parts in (1, 2):
            engine = make_engine(
                FP16_TORCH | {"loss_reduction": reduction},
                criterion=lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum") / 4,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            )
            x, y = make_data(16)
            x, y = x[rank::2], y[rank::2]
            for _ in range(2):
                for half in (slice(0, 8),) if parts == 1 else (slice(0, 4), slice(4, 8)):
                    loss = engine.criterion(engine(x[half]), y[half])
                    engine.backward((loss, 2.0 / parts) if reduction == "weighted" else loss)
                engine.step()
            weights.append(full_weights(engine))
            engine.close()
        found.append(max((weights[0][n] - weights[1][n]).abs().max().item() for n in weights[0]))
    return found


def test_two_backwards_before_a_step_in_every_reduction():
    for differences in run_ranks(two_backwards, 2):
        assert max(differences) < 2e-4


def outside_backward(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A backward that does not go through the engine, after the engine has reduced."""
    x, y = make_data(16)
    x, y = x[rank::2], y[rank::2]
    engine = make_engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.backward(engine.criterion(engine(x), y))
    nn.functional.cross_entropy(engine.model(x), y).backward()
    engine.step()
    weights = full_weights(engine)
    engine.close()
    engine = make_engine({"loss_reduction": "sum"})
    engine.backward(engine.criterion(engine(x), y))
    nn.functional.cross_entropy(engine.model(x), y).backward()
    messages = []
    for call in (lambda: engine.backward(engine.criterion(engine(x), y)), engine.step):
        try:
            call()
        except InputError as error:
            messages.append(str(error))
    return weights, messages


def test_a_backward_outside_the_engine_is_reduced_or_refused():
    (first, messages), (second, _) = run_ranks(outside_backward, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    x, y = make_data(16)
    expected = reference([(x, y)], lambda p: torch.optim.SGD(p, lr=0.2))
    assert difference(first, expected) < 1e-5
    assert len(messages) == 2
    assert all("gradients were added by a backward outside this engine" in message for message in messages)


def frozen_within_a_cycle(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    engine = make_engine({"gradient_accumulation": 2}, loader=make_loader(32, 4))
    for i, (x, y) in enumerate(engine.dataloader):
        engine.model.last.requires_grad_(i != 1)
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    return full_weights(engine)


def test_a_parameter_frozen_within_a_cycle():
    first, second = run_ranks(frozen_within_a_cycle, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class OneBranch(MLP):
    """Its last layer but one is used on rank 0 only, in the first microbatch of each cycle."""

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(self.again(x) if use else x)


def frozen_after_one_rank_used_it(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    engine = make_engine({"gradient_accumulation": 2}, model=OneBranch(), loader=make_loader(32, 4))
    for i, (x, y) in enumerate(engine.dataloader):
        engine.model.again.requires_grad_(i % 2 == 0)
        engine.backward(engine.criterion(engine(x, use=rank == 0 and i % 2 == 0), y))
        engine.step()
    return full_weights(engine)


def test_a_parameter_frozen_within_a_cycle_that_one_rank_had_used():
    first, second = run_ranks(frozen_after_one_rank_used_it, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["again.weight"], MLP().again.weight)


def workers_after_a_foreign_state(rank: int, world_size: int) -> list[float]:
    multiprocessing.current_process().daemon = False
    engine = halfmesh.initialize(MLP(), sgd, None, DataLoader(Noise(4), 2, num_workers=1), {}, device="cpu")
    states: list = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [x for batch in engine.dataloader for x in batch.tolist()]


def test_workers_differ_after_a_state_of_another_rank():
    first, second = run_ranks(workers_after_a_foreign_state, 2)
    assert not set(first) & set(second)


def persistent_workers(rank: int, world_size: int) -> list[int]:
    multiprocessing.current_process().daemon = False
    loader = DataLoader(Numbers(16), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    engine = halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu")
    return [i for _ in range(2) for batch in engine.dataloader for i in batch.tolist()]


def test_a_loader_that_was_looked_into_before():
    first, second = run_ranks(persistent_workers, 2)
    assert first == [*range(0, 16, 2)] * 2
    assert second == [*range(1, 16, 2)] * 2


class OwnGenerator(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(16).tolist())

    def __len__(self) -> int:
        return 16


class Circular(torch.utils.data.SequentialSampler):
    loader: Any = None


def order_differs(rank: int, world_size: int) -> tuple[str, int]:
    circular = Circular(Numbers(8))
    loader = DataLoader(Numbers(8), 2, sampler=circular)
    circular.loader, circular.inner = loader, circular
    with halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu") as engine:
        count = len(list(engine.dataloader))
    loader = DataLoader(Numbers(16), 4, sampler=OwnGenerator())
    engine = halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu")
    try:
        list(engine.dataloader)
    except InputError as error:
        return str(error), count
    return "", count


def test_an_order_that_differs_between_ranks_is_refused_on_all():
    for message, count in run_ranks(order_differs, 2):
        assert "the OwnGenerator gives different data on each rank, or was iterated on some ranks only" in message
        assert count == 2


def constant_buffer(rank: int, world_size: int) -> str:
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("halfmesh").addHandler(handler)
    model = MLP()
    model.register_buffer("positions", torch.arange(4.0))
    engine = make_engine(model=model)
    engine.load_state_dict(copy.deepcopy(engine.state_dict()))
    train(engine)
    return "\n".join(record.getMessage() for record in handler.buffer)


def test_buffers_that_were_loaded_are_not_taken_for_trained():
    assert all("change during training" not in text for text in run_ranks(constant_buffer, 2))


def different_configs(rank: int, world_size: int) -> str:
    try:
        make_engine({"gradient_accumulation": 1 + rank})
    except InputError as error:
        return str(error)
    return ""


def test_different_configs_are_refused_on_every_rank():
    for message in run_ranks(different_configs, 2):
        assert "the ranks were given different configs" in message


def foreign_random_state(rank: int, world_size: int) -> tuple[float, float]:
    """A state that rank 0 saved, loaded by all: the ranks' dropout must stay different."""
    engine = make_engine(optimizer=adamw)
    states: list = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return torch.rand(1).item(), torch.rand(1).item()


def test_a_state_of_another_rank_does_not_bring_its_dropout():
    first, second = run_ranks(foreign_random_state, 2)
    assert first[0] != second[0]


class OddBuffers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.rand(1).expand(3, 4))
        self.register_buffer("short", torch.randint(0, 100, (3,), dtype=torch.int16))
        self.register_buffer("unsigned", torch.randint(0, 100, ()).to(torch.uint16))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("rotation", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0))


def odd_buffers(rank: int, world_size: int) -> tuple[list, str]:
    torch.manual_seed(rank)
    model = OddBuffers()
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.dtype == torch.float32 and buffer.numel():
            buffer.data = buffer.data + rank
    make_engine(model=model).close()
    sparse = MLP()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    try:
        make_engine(model=sparse)
    except InputError as error:
        return [b.to(torch.float32).tolist() for b in model.buffers() if not b.is_complex()], str(error)
    return [], ""


def test_buffers_of_any_dtype_and_layout_start_equal():
    (first, message), (second, _) = run_ranks(odd_buffers, 2)
    assert first == second
    assert "the buffers s are sparse" in message


# -- options of the reduction ----------------------------------------------------------------------------------------


def data_options(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    parameters = sum(p.numel() for p in MLP().parameters())
    for name, data in {
        "bfloat16": {"reduce_dtype": "bfloat16"},
        "small buckets": {"bucket_mb": 0.0005},
        "one in flight": {"max_inflight": 1, "bucket_mb": 0.0001},
        "many in flight": {"max_inflight": 8, "bucket_mb": 0.0001},
    }.items():
        engine = make_engine({"parallel": {"data": data}})
        most = 0
        inner = engine._cycle.reducer._all_reduce

        def watched(flat, divide=True, reducer=engine._cycle.reducer, inner=inner):
            nonlocal most
            most = max(most, len(reducer._inflight) + 1)
            return inner(flat, divide)

        engine._cycle.reducer._all_reduce = watched
        train(engine, max_batches=1)
        reducer = engine._cycle.reducer
        found[name] = (reducer.collectives, round(reducer.bytes_reduced / parameters), most)
        engine.close()
    return found


def test_options_of_the_reduction_have_an_effect():
    for found in run_ranks(data_options, 2):
        assert found["bfloat16"] == (1, 2, 1)
        assert found["small buckets"][:2] == (4, 4)
        assert found["one in flight"] == (9, 4, 1)
        assert found["many in flight"] == (9, 4, 8)


# -- data ------------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def shuffled(kind: str, items: list[int]) -> list[int]:
    if kind == "python":
        random.shuffle(items)
    elif kind == "numpy":
        np.random.shuffle(items)
    elif kind == "torch":
        items = [items[i] for i in torch.randperm(len(items)).tolist()]
    elif kind == "by rank":
        items = items[dist.get_rank() :: dist.get_world_size()]
    return items


class Stream(IterableDataset):
    def __init__(self, kind: str = "in order") -> None:
        self.kind = kind

    def __iter__(self):
        return iter(torch.tensor(shuffled(self.kind, list(range(20)))))


class Shuffled:
    """A batch sampler of the user's own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self):
        return iter(torch.tensor(shuffled(self.kind, list(range(16)))).view(4, 4).tolist())

    def __len__(self) -> int:
        return 4


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield from range(8)


class Noise(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def shards(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def epochs(loader, count=1, **options):
        engine = halfmesh.initialize(MLP(), sgd, None, loader, {}, device="cpu", **options)
        result = [[b.tolist() for b in engine.dataloader] for _ in range(count)]
        length = len(engine.dataloader) if not isinstance(loader.dataset, IterableDataset) else None
        evaluated = [b.tolist() for b in engine.eval_dataloader] if options else None
        engine.close()
        return result, length, evaluated

    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    seen["in order"] = epochs(DataLoader(Numbers(16), 4))
    seen["shuffled"] = epochs(DataLoader(Numbers(16), 4, shuffle=True), 2)
    generator = torch.Generator().manual_seed(rank)
    seen["own generator"] = epochs(DataLoader(Numbers(16), 4, shuffle=True, generator=generator))
    seen["ragged"] = epochs(DataLoader(Numbers(11), 4), eval_dataloader=DataLoader(Numbers(11), 4))
    seen["drop last"] = epochs(DataLoader(Numbers(11), 4, drop_last=True))
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16, replacement=False)
    seen["weighted sampler"] = epochs(DataLoader(Numbers(16), 4, sampler=weights))
    batches = [[0, 1, 2], [3], [4, 5, 6, 7]]
    seen["batch sampler"] = epochs(DataLoader(Numbers(8), batch_sampler=batches))
    plain = torch.utils.data.BatchSampler(range(8), 2, False)
    seen["plain batch sampler"] = epochs(DataLoader(Numbers(8), batch_sampler=plain))
    own = torch.utils.data.DistributedSampler(Numbers(16), world_size, rank, shuffle=True)
    seen["own distributed sampler"] = epochs(DataLoader(Numbers(16), 4, sampler=own), 2)
    seen["no batches"] = epochs(DataLoader(Numbers(4), batch_size=None))
    seen["iterable"] = epochs(DataLoader(Stream(), 4), eval_dataloader=DataLoader(Stream(), 4))
    multiprocessing.current_process().daemon = False  # so that it may have workers
    seen["workers"] = epochs(DataLoader(Noise(4), 2, num_workers=1), 2)
    for name, kind in {"python": "python", "numpy": "numpy", "torch": "torch"}.items():
        seen[f"shuffled by {name}"] = epochs(DataLoader(Numbers(16), batch_sampler=Shuffled(kind)), 2)
        seen[f"stream by {name}"] = epochs(DataLoader(Stream(kind), 2), 2)
    endless = halfmesh.initialize(MLP(), sgd, None, DataLoader(Numbers(8), 2, sampler=Endless()), {}, device="cpu")
    seen["endless"] = [batch.tolist() for batch, _ in zip(endless.dataloader, range(3), strict=False)]
    endless.close()
    try:
        epochs(DataLoader(Stream("by rank"), 2))
    except InputError as error:
        seen["shards itself"] = str(error)
    try:
        wrong = torch.utils.data.DistributedSampler(Numbers(16), 4, 1)
        epochs(DataLoader(Numbers(16), 4, sampler=wrong))
    except InputError as error:
        seen["refused"] = str(error)
    try:
        epochs(DataLoader(Numbers(3), 4, drop_last=True))
    except InputError as error:
        seen["empty"] = str(error)
    return seen


def test_every_kind_of_loader_is_sharded_once():
    first, second = run_ranks(shards, 2, timeout=120)

    def flat(epoch):
        return [i for batch in epoch for i in (batch if isinstance(batch, list) else [batch])]

    for kind in ("in order", "shuffled", "own generator", "weighted sampler", "own distributed sampler"):
        for mine, theirs in zip(first[kind][0], second[kind][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(16)), kind
            assert [len(b) for b in mine] == [len(b) for b in theirs] == [4, 4]
        assert first[kind][1] == 2
    for kind in ("python", "numpy", "torch"):
        for mine, theirs in zip(first[f"shuffled by {kind}"][0], second[f"shuffled by {kind}"][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(16)), kind
        for mine, theirs in zip(first[f"stream by {kind}"][0], second[f"stream by {kind}"][0], strict=True):
            assert sorted(flat(mine) + flat(theirs)) == list(range(20)), kind
        epoch, following = first[f"stream by {kind}"][0]
        assert epoch != following
    assert first["endless"] == [[0, 2], [4, 6], [0, 2]]
    assert "the Stream gives different data on each rank" in first["shards itself"]
    assert first["in order"][0] == [[[0, 2, 4, 6], [8, 10, 12, 14]]]
    for kind in ("shuffled", "own distributed sampler"):
        assert first[kind][0][0] != first[kind][0][1], "a new order in each epoch"
    # Training pads, so that both ranks have as many batches; evaluation counts nothing twice.
    assert first["ragged"][0] == [[[0, 2, 4, 6], [8, 10]]]
    assert second["ragged"][0] == [[[1, 3, 5, 7], [9, 0]]]
    assert first["ragged"][2] == [[0, 2, 4, 6], [8, 10]]
    assert second["ragged"][2] == [[1, 3, 5, 7], [9]]
    assert [len(b) for b in first["drop last"][0][0]] == [len(b) for b in second["drop last"][0][0]] == [4]
    assert first["batch sampler"][0] == [[[0, 1, 2], [4, 5, 6, 7]]]
    assert second["batch sampler"][0] == [[[3], [0, 1, 2]]]
    assert first["plain batch sampler"][0] == [[[0, 2], [4, 6]]]
    assert first["no batches"][0] == [[0, 2]]
    assert first["iterable"][0] == [[[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]]
    assert second["iterable"][0] == [[[4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]]]
    assert second["iterable"][2] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    noise = [*flat(first["workers"][0][0]), *flat(second["workers"][0][0]), *flat(first["workers"][0][1])]
    assert len(set(noise)) == 6, "workers of different ranks and epochs draw different numbers"
    assert "num_replicas=4, rank=1, but this is data rank 0 of 2" in first["refused"]
    assert "the dataloader gave no batch on this rank" in first["empty"]


def seeds(rank: int, world_size: int) -> list:
    orders = []
    for seed in (1, 1, 2):
        loader = DataLoader(Numbers(16), 4, shuffle=True)
        engine = halfmesh.initialize(MLP(), sgd, None, loader, {"seed": seed}, device="cpu")
        orders.append([b.tolist() for b in engine.dataloader])
        orders.append(torch.rand(1).item())
        engine.dataloader.set_epoch(5)
        orders.append([b.tolist() for b in engine.dataloader])
        engine.close()
    return orders


def test_seed_and_epoch_decide_the_order():
    first, second = run_ranks(seeds, 2)
    for orders in (first, second):
        assert orders[0:3] == orders[3:6]
        assert orders[0] != orders[6]
        assert orders[0] != orders[2]
        assert orders[1] != orders[7]
    assert first[1] != second[1], "dropout differs between data ranks"


# -- models that are not just layers ---------------------------------------------------------------------------------


class Picky(nn.Module):
    """A frozen layer, one that only rank 0 uses, one that nobody uses, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = self.norm(self.frozen(x))
        return self.last(self.sometimes(x) if use else x)


def picky(rank: int, world_size: int) -> dict[str, Any]:
    model = Picky()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, FP16_NAIVE, device="cpu")
    x, y = make_data(32)
    for begin in (0, 16):
        part = slice(begin + rank * 8, begin + rank * 8 + 8)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[part], use=rank == 0), y[part]))
        engine.step()
    return full_weights(engine)


def test_frozen_unused_and_running_statistics():
    first, second = run_ranks(picky, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    before = Picky().state_dict()
    torch.testing.assert_close(first["never.weight"], before["never.weight"], rtol=0, atol=0)
    torch.testing.assert_close(first["frozen.weight"].half(), before["frozen.weight"].half(), rtol=0, atol=0)
    assert not torch.equal(first["sometimes.weight"], before["sometimes.weight"])
    assert not torch.equal(first["norm.running_mean"], before["norm.running_mean"].half())


def unfreeze(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = MLP()
    model.last.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    engine = make_engine(FP16_NAIVE, model=model, optimizer=lambda _: sgd(params), loader=make_loader(32, 4))
    for step, (x, y) in enumerate(engine.dataloader):
        if step == 2:
            model.last.requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model.last.parameters())})
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    return full_weights(engine)


def test_parameters_added_later_are_reduced_too():
    first, second = run_ranks(unfreeze, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["last.weight"], MLP().last.weight)


def resume(rank: int, world_size: int) -> bool:
    def make():
        return make_engine(FP16_NAIVE, model=MLP(dropout=0.2), optimizer=adamw, loader=make_loader(32, 4, shuffle=True))

    engine = make()
    train(engine)
    saved = copy.deepcopy(engine.state_dict())
    train(engine)
    other = make()
    other.load_state_dict(saved)
    train(other)
    mine, theirs = full_weights(engine), full_weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_resume_on_two_ranks():
    assert run_ranks(resume, 2) == [True, True]


def own_group(rank: int, world_size: int, port: int) -> tuple[bool, bool]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    engine = make_engine({"timeout": 77.0})
    made = dist.is_initialized() and engine.context.dp_size == world_size
    train(engine, max_batches=1)
    engine.close()
    return made, dist.is_initialized()


def test_initialize_joins_torchruns_group_by_itself():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    assert run_ranks(own_group, 2, port, init=False) == [(True, False)] * 2


def uneven_loader_refused(rank: int, world_size: int) -> list[int]:
    """7 samples over 2 ranks in batches of 2: padded, so that both have 2 batches and nobody waits."""
    engine = make_engine(loader=DataLoader(TensorDataset(*make_data(7)), 2))
    return [len(x) for x, _ in engine.dataloader] + [len(train(engine))]


def test_uneven_tails_never_hang():
    assert run_ranks(uneven_loader_refused, 2) == [[2, 2, 2]] * 2
