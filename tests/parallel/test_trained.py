"""Ranks train the same parameters: from the start, and whenever some are frozen or unfrozen."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh import InputError
from halfmesh.distributed.local_ranks import free_port
from tests.support.models import FP16_NAIVE, full_weights, make_data, make_engine, said, step_on
from tests.support.ranks import here, meet, run_ranks
from tests.support.tensor_parity import rejection
from tests.support.whole import close_whole

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
}


def make_model(frozen: int | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    return model


def from_the_start(rank: int, world_size: int) -> list[str]:
    return [
        said(make_engine, {"parallel": layout}, model=make_model(2 if rank == 0 else 4)) for layout in LAYOUTS.values()
    ]


@pytest.mark.distributed
def test_unlike_from_the_start():
    for messages in run_ranks(from_the_start, 2):
        for message in messages:
            for words in ("'2.weight' is trained on rank 1", " and frozen on rank 0", " (the first of 4 "):
                assert words in message


@pytest.mark.parametrize("optimizer", ["of all", "of some"])
def test_half_precision_stays_frozen_where_it_has_no_masters(optimizer):
    model = make_model(2)
    model[2].to(torch.bfloat16)
    params = [p for p in model.parameters() if optimizer == "of all" or p.requires_grad]
    engine = make_engine({"bf16": {"mode": "torch"}}, model=model, optimizer=torch.optim.SGD(params, lr=0.1))
    before = model[2].weight.clone()
    step_on(engine, *make_data())
    model[2].requires_grad_(True)
    if optimizer == "of some":
        engine.optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(
        InputError, match=r"2\.weight, 2\.bias: in half precision, and no longer frozen. .*small updates"
    ):
        step_on(engine, *make_data())
    assert torch.equal(model[2].weight, before)


def unfrozen_in_half(rank: int, world_size: int) -> dict[str, str]:
    """A layer in bf16 is unfrozen after an update, in layouts that step other parameters than the model's."""
    found = {}
    for name, layout in LAYOUTS.items():
        model = make_model(4)
        model[4].to(torch.bfloat16)
        engine = make_engine({"parallel": layout, "bf16": {"mode": "torch"}}, model=model)
        step_on(engine, *here(make_data()))
        engine.model[4].requires_grad_(True)
        found[name] = said(step_on, engine, *here(make_data()))
        engine.close()
    return found


@pytest.mark.distributed
def test_half_precision_stays_frozen_in_each_layout():
    for found in run_ranks(unfrozen_in_half, 2):
        for name, message in found.items():
            assert message.startswith("4.weight, 4.bias: in half precision, and no longer frozen."), (name, message)


def mid_run(rank: int, world_size: int) -> dict[str, Any]:
    """Random layer freezing, drawn from unequal seeds: after a step, and within a cycle of two batches."""
    x, y = here(make_data())
    found = {}
    for name, layout in LAYOUTS.items():
        for accumulation in (1, 2):
            engine = make_engine({"parallel": layout, "gradient_accumulation": accumulation}, model=make_model())
            step_on(engine, x, y)
            before = {name: value.clone() for name, value in full_weights(engine).items()} if accumulation == 1 else {}
            engine.model[random.Random(rank).choice([2, 4])].requires_grad_(False)
            message = said(step_on, engine, x, y)
            after = engine.model.state_dict() if before else {}
            found[name, accumulation] = message, all(torch.equal(before[n], after[n]) for n in before)
    return found


@pytest.mark.distributed
def test_unlike_in_the_middle_of_a_run():
    assert random.Random(0).choice([2, 4]) != random.Random(1).choice([2, 4])
    for found in run_ranks(mid_run, 2):
        for case, (message, unchanged) in found.items():
            assert "'2.weight' is trained on rank" in message, (case, message)
            assert unchanged, case


def alike(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each rank draws the same; a stage of a pipeline has its own layers only."""
    x, y = here(make_data(16))
    engine = make_engine(config, model=make_model())
    draw, own = random.Random(0), slice(engine.context.dp_rank, None, engine.context.dp_size)
    params = dict(engine.model.named_parameters())
    for _ in range(8):
        frozen = str(draw.choice([0, 2, 4, 5]))
        for name, param in params.items():
            param.requires_grad_(not name.startswith(frozen))
        engine.zero_grad()
        step_on(engine, x[own], y[own])
    return close_whole(engine)


@pytest.mark.distributed
@pytest.mark.sends
def test_alike_in_the_middle_of_a_run():
    expected = alike(0, 1, FP16_NAIVE)
    for ranks, parallel in ((2, {"data": "zero1"}), (4, {"pipeline": {"size": 2, "microbatches": 2}})):
        for found in run_ranks(alike, ranks, {**FP16_NAIVE, "parallel": parallel}):
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def frozen_for_good(rank: int, world_size: int) -> list[int]:
    """Bytes sent in each of three cycles, with a layer frozen within the first."""
    x, y = here(make_data(16))
    engine = make_engine({"gradient_accumulation": 2}, model=make_model())
    for _ in range(2):  # in the first step ranks compare their weights, too
        step_on(engine, x, y)
    sent, all_reduce = [0, 0, 0], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        for batch in range(6):

            def count(tensor: torch.Tensor, *op: Any, cycle: int = batch // 2, **options: Any) -> Any:
                sent[cycle] += tensor.nbytes
                return all_reduce(tensor, *op, **options)

            patch.setattr(dist, "all_reduce", count)
            if batch == 1:
                engine.model[2].requires_grad_(False)
            step_on(engine, x, y)
    return sent


@pytest.mark.distributed
def test_what_was_frozen_within_a_cycle_is_sent_no_more_after_it():
    for first, second, third in run_ranks(frozen_for_good, 2):
        assert first - second == 4 * (8 * 8 + 8 + 2)
        assert third == second


def only_one(rank: int, world_size: int, port: int, folder: str) -> str:
    meet(rank, world_size, folder)
    x, y = here(make_data())
    address = f"tcp://localhost:{port}"
    limit = timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    engine = make_engine({"timeout": 3.0}, model=make_model())
    step_on(engine, x, y)
    if rank == 1:
        engine.model[2].requires_grad_(False)
    return rejection(lambda: step_on(engine, x, y))


@pytest.mark.distributed
def test_one_rank_alone_ends_by_the_time_limit(tmp_path):
    first, second = run_ranks(only_one, 2, free_port(), str(tmp_path), init=False, fresh=True)
    for text in (first, second):  # gloo's: each waits for the other
        assert text.startswith(("RuntimeError", "DistBackendError")), text
