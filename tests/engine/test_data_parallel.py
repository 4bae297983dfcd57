"""Several data ranks: equal to one process on the joined batch, equal to torch DDP, equal to each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfmesh.errors import InputError, NonFiniteError
from tests.support.models import (
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
    train,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def joined(batches: int, size: int, world_size: int, accumulation: int = 1) -> list:
    """The batches of one process that sees what all ranks see together."""
    x, y = make_data(batches * size * world_size)
    return list(zip(x.split(size * world_size * accumulation), y.split(size * world_size * accumulation), strict=True))


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


def with_hooks(rank: int, world_size: int) -> dict[str, Any]:
    """Hooks that divide each gradient by 4, registered before or after initialize."""
    found = {}
    for data in ("replicate", "zero1"):
        for when in ("before", "after"):
            model = MLP()
            if when == "before":
                _divide_gradients(model)
            engine = make_engine({"parallel": {"data": data}}, model=model, loader=make_loader(32, 4))
            if when == "after":
                _divide_gradients(model)
            train(engine)
            found[f"{data} {when}"] = full_weights(engine)
            engine.close()
    return found


def _divide_gradients(model: nn.Module) -> None:
    def hook(param: nn.Parameter) -> None:
        param.grad.div_(4)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)


def test_hooks_on_gradients_take_effect_whenever_they_were_registered():
    model = MLP()
    _divide_gradients(model)
    expected = reference(joined(4, 4, 2), model=model)
    for found in run_ranks(with_hooks, 2):
        for case, weights in found.items():
            assert difference(weights, expected) < 1e-6, case
