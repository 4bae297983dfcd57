"""Optimizers that step parameters as a whole have their state at the owners: Muon, LAMB, Adafactor, and own ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
from halfmesh.parallel import whole_steps
from tests.support.models import BF16_NAIVE, MLP, make_data, make_engine, step_on
from tests.support.nano_gpt import GPT
from tests.support.optimizers import Whitened, muon_and_adamw, of_timm
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

X, Y = make_data(16)
TENSOR = {"tensor": {"size": 2, "plan": {"first": "colwise_gather", "last": "rowwise_split"}}}


def start(optimizer: Any, parallel: Any, config: Any = None, **options: Any) -> Any:
    config = {"clip_grad_norm": 0.5, "parallel": parallel, **(config or {})}
    return make_engine(config, optimizer=optimizer, **options)


def train(engine: Any, updates: Any) -> None:
    size = len(X) // engine.context.dp_size
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for update in updates:
        engine.zero_grad()
        step_on(engine, X.roll(update, 0)[own], Y.roll(update, 0)[own])


# -- state -------------------------------------------------------------------------------------------------------------


def go_on(rank: int, world_size: int, make: Any, parallel: Any, saved: Any, folder: Any) -> dict[str, Any]:
    """Trains on what was saved, if anything was, and saves it before the last update."""
    engine = start(make, parallel)
    average = engine.averaged_model(0.5)
    assert ("whole matrices on one rank each" in engine.plan.rows["update"]) == bool(parallel)
    train(engine, [7] if saved else [0, 1])  # a state of its own, to be overwritten
    if saved:
        engine.load(saved)
    engine.save(folder)
    train(engine, [2])
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    with average.applied():
        averaged = engine.full_state_dict(rank0_only=False)
    engine.close()
    return {"weights": full["model"], "average": averaged, "state": full["optimizer"]["state"]}


@pytest.mark.parametrize(
    ("make", "parallel"),
    [
        (partial(of_timm, "Lamb", lr=0.01, max_grad_norm=None), {"data": "zero1"}),
        (partial(optim.Adafactor, lr=0.01), {"data": "fsdp"}),
        (partial(Whitened, lr=0.01), TENSOR),
    ],
)
def test_state_is_resharded(make, parallel, tmp_path):
    """From one process to a layout, and from that to one process."""
    expected = go_on(0, 1, make, {}, None, tmp_path / "one")
    by_rank = run_ranks(go_on, 2, make, parallel, tmp_path / "one", tmp_path / "many")
    for found in (*by_rank, go_on(0, 1, make, {}, tmp_path / "many", tmp_path / "again")):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def with_state(rank: int, world_size: int, parallel: Any, half: bool) -> dict[str, torch.Tensor]:
    """An optimizer that has stepped before it is given; of a model in half precision its state is cast."""
    model = MLP().to(torch.bfloat16 if half else torch.float32)
    optimizers = muon_and_adamw(model.parameters())
    for param in model.parameters():
        param.grad = param.detach().sin()
    for optimizer in optimizers:
        optimizer.step()
    engine = start(optimizers, parallel, model=model, config=BF16_NAIVE if half else {})
    assert all(v.dtype == torch.float32 for state in engine.optimizer.state.values() for v in state.values())
    train(engine, [0])
    return engine.full_state_dict(rank0_only=False)


@pytest.mark.parametrize(("parallel", "half", "close"), [(TENSOR, False, 2e-3), ({"data": "zero1"}, True, 2e-2)])
def test_state_that_was_given_goes_to_the_owners(parallel, half, close):
    """Muon rounds to bf16, which makes more of a last bit that differs."""
    expected = with_state(0, 1, {}, half)
    for found in run_ranks(with_state, 2, parallel, half):
        torch.testing.assert_close(found, expected, rtol=0, atol=close)


def in_a_loop(rank: int, world_size: int, parallel: Any, folder: Any) -> dict[str, torch.Tensor]:
    """A group is added, and its state saved after its first step and loaded before it; a frozen parameter is trained
    from then on; and a hook of the user's fails."""
    found = list[Any]()
    for loads in (False, True):
        model = MLP()
        late = [model.last.weight, model.first.weight]
        late[0].requires_grad_(False)
        others = [param for param in model.parameters() if all(param is not one for one in late)]
        engine = start(Whitened(others, lr=0.01), parallel, model=model)
        train(engine, [] if loads else [0])
        engine.optimizer.add_param_group({"params": late})
        if loads:
            engine.load(folder)
        else:
            train(engine, [1])
            engine.save(folder)
        late[0].requires_grad_(True)
        train(engine, [2])
        hook = engine.optimizer.register_step_post_hook(lambda *_: [][0])
        with pytest.raises(IndexError):
            train(engine, [3])
        hook.remove()
        train(engine, [4])
        full = engine.full_state_dict(optimizer=True, rank0_only=False)
        found.append([full["model"], full["optimizer"]["state"]])
        engine.close()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return found[0][0]


def test_groups_are_followed_and_a_failed_step_keeps_the_state(tmp_path):
    expected = in_a_loop(0, 1, {}, tmp_path / "one")
    for found in run_ranks(in_a_loop, 2, TENSOR, tmp_path / "two"):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


# -- what each rank holds and sends ------------------------------------------------------------------------------------


def held_and_sent(rank: int, world_size: int, parallel: Any, widths: Sequence[int]) -> tuple[int, int]:
    """The elements of optimizer state on this rank, and those that it sends in an update besides the reductions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths)))
    engine = halfmesh.initialize(
        model, optim.Muon(model.parameters(), lr=0.1), nn.functional.mse_loss, None, {"parallel": parallel}
    )
    sent, send = [0], whole_steps.send_rows

    def counted(flat: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> torch.Tensor:
        sent[0] += sum(sizes) - sizes[group.rank()]
        return send(flat, sizes, received, group)

    whole_steps.send_rows = counted
    try:
        engine.backward(engine.criterion(engine(torch.ones(2, 8)), torch.zeros(2, 8)))
        engine.step()
    finally:
        whole_steps.send_rows = send
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    return sum(value.numel() for value in state if value.dim()), sent[0]


def test_owners_have_equal_shares_and_slices_are_sent_once():
    """Of 8 matrices each of 4 ranks steps a large one or three small ones. zero1 sends no more than it does for other
    optimizers; fsdp sends the slices of gradients and weights that are elsewhere, and back those of new weights."""
    widths = [8, 8, 24, 8, 8, 8, 8, 8, 8]
    assert run_ranks(held_and_sent, 4, {"data": "zero1"}, widths) == [(192, 0)] * 4
    assert run_ranks(held_and_sent, 4, {"data": "fsdp"}, widths) == [(192, 3 * 192 * 3 // 4)] * 4


def test_a_matrix_that_would_be_mostly_padding_is_cut_and_put_together():
    """One matrix for 4 ranks: a chunk of it for each would send 4 times as much."""
    found = run_ranks(held_and_sent, 4, {"data": "zero1"}, [8, 8])
    assert sorted(found) == [(0, 2 * 16), (0, 2 * 16), (0, 2 * 16), (64, 3 * 16)]


def tied_slice(rank: int, world_size: int) -> list[int]:
    pipeline = {"size": 2, "microbatches": 2, "partition": ["transformer.h.1"]}
    engine = start(muon_and_adamw, {"data": "zero1", "pipeline": pipeline}, model=GPT())
    shards = engine._update.master_weights.shards
    return [shard.param.numel() for shard in shards if shard.name in ("lm_head.weight", "transformer.wte.weight")]


def test_stages_that_share_a_parameter_cut_it_in_the_same_way():
    """Their gradients are summed slice by slice, and each stage has other loads to balance."""
    numel = GPT().lm_head.weight.numel()
    assert run_ranks(tied_slice, 4) == [[numel // 2]] * 4
