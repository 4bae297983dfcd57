"""State of optimizers: resharded by parameter, at the owners of whole matrices, and torchao's in few bits."""

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
from tests.support.models import make_data, make_engine, step_on
from tests.support.optimizers import Whitened, sgd_and_adamw
from tests.support.ranks import run_ranks

X, Y = make_data(16)
ADAFACTOR, WHITENED = partial(optim.Adafactor, lr=0.01), partial(Whitened, lr=0.01)
TENSOR = {"tensor": {"size": 2, "plan": {"first": "colwise_gather", "last": "rowwise_split"}}}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}}
EXACT, COARSE = ((1e-5, 2e-6), (1e-4, 1e-6)), ((1e-3, 1e-5), (1e-3, 1e-5))
CELLS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "two, fsdp": (sgd_and_adamw, {"data": "fsdp"}, EXACT),
    "two, pipeline": (sgd_and_adamw, PIPELINE, EXACT),
    "Adafactor, fsdp": (ADAFACTOR, {"data": "fsdp"}, COARSE),
    "own, tensor": (WHITENED, TENSOR, COARSE),
}
"""The optimizer, `parallel`, and how far weights and state may be from those of one process (rtol, atol)."""


def halving(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train(engine: Any, *updates: int) -> None:
    size = len(X) // engine.context.dp_size
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for update in updates:
        engine.zero_grad()
        step_on(engine, X.roll(update, 0)[own], Y.roll(update, 0)[own])


def go_on(rank: int, world_size: int, saved: Any, folder: Any) -> dict[str, Any]:
    """By cell: trains on what was saved, if anything was, and saves it before the last update."""
    found = {}
    for name, (make, parallel, _) in CELLS.items():
        config = {"clip_grad_norm": 0.5, "parallel": parallel if world_size > 1 else {}}
        engine = make_engine(config, optimizer=make, lr_scheduler=halving)
        average = engine.averaged_model(0.5)
        whole = world_size > 1 and make is not sgd_and_adamw
        assert ("whole matrices on one rank each" in engine.plan.rows["update"]) == whole
        train(engine, *([7] if saved else [0, 1]))  # a state of its own, to be overwritten
        if saved:
            engine.load(saved / name)
        engine.save(folder / name)
        train(engine, 2)
        full = engine.full_state_dict(optimizer=True, rank0_only=False)
        with average.applied():
            averaged = engine.full_state_dict(rank0_only=False)
        engine.close()
        found[name] = {"weights": full["model"], "average": averaged}, full["optimizer"]["state"]
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_state_is_resharded(tmp_path):
    """From one process to each layout, and back."""
    expected = go_on(0, 1, None, tmp_path / "one")
    by_rank = run_ranks(go_on, 2, tmp_path / "one", tmp_path / "many")
    for found in (*by_rank, go_on(0, 1, tmp_path / "many", tmp_path / "again")):
        for name, (*_, close) in CELLS.items():
            for ours, theirs, (rtol, atol) in zip(found[name], expected[name], close, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: name + text)


def held_and_sent(rank: int, world_size: int, parallel: Any, widths: Sequence[int]) -> tuple[int, int]:
    """The elements of optimizer state on this rank, and those that it sends in an update besides the reductions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths)))
    optimizer = optim.Muon(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.functional.mse_loss, None, {"parallel": parallel})
    sent, send = [0], whole_steps.send_rows

    def counted(flat: torch.Tensor, sizes: list[int], received: list[int], group: Any) -> torch.Tensor:
        sent[0] += sum(sizes) - sizes[group.rank()]
        return send(flat, sizes, received, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_steps, "send_rows", counted)
        engine.backward(engine.criterion(engine(torch.ones(2, 8)), torch.zeros(2, 8)))
        engine.step()
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    return sum(value.numel() for value in state if value.dim()), sent[0]


@pytest.mark.distributed
def test_owners_have_equal_shares_and_only_slices_elsewhere_are_sent():
    """Of 8 matrices each of 4 ranks steps a large one or three small ones. Slices of gradients and weights that are
    elsewhere are sent, and back those of new weights. zero1 lays whole ones out, unless most would be padding."""
    widths = [8, 8, 24, 8, 8, 8, 8, 8, 8]
    assert run_ranks(held_and_sent, 4, {"data": "zero1"}, widths) == [(192, 0)] * 4
    found = run_ranks(held_and_sent, 4, {"data": "zero1"}, [8, 8])
    assert sorted(found) == [(0, 2 * 16), (0, 2 * 16), (0, 2 * 16), (64, 3 * 16)]
    assert run_ranks(held_and_sent, 4, {"data": "fsdp"}, widths) == [(192, 3 * 192 * 3 // 4)] * 4


# -- torchao's ---------------------------------------------------------------------------------------------------------

# torchao compiles its step, which takes half a minute: not here.
WIDTH = 128  # smaller tensors are not quantised


def in_8_bits(config: Any) -> halfmesh.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = pytest.importorskip("torchao.optim").AdamW8bit(model.parameters(), lr=1e-2)
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), None, config, device="cpu")


@pytest.mark.parametrize("config", [{}, {"bf16": {"mode": "naive"}}], ids=["none", "naive"])
def test_state_in_8_bits_resumes_bit_for_bit(config, tmp_path):
    engine, again = in_8_bits(config), in_8_bits(config)
    x, y = torch.randn(2, 8, WIDTH).unbind()
    with torch.compiler.set_stance("force_eager"):
        step_on(engine, x, y)
        engine.save(tmp_path)
        again.load(tmp_path)
        for each in (engine, again):
            step_on(each, x, y)
    assert type(next(iter(engine.optimizer.state.values()))["exp_avg"]).__name__.startswith("OptimState")
    torch.testing.assert_close(again.full_state_dict(), engine.full_state_dict(), rtol=0, atol=0)


def test_shards_would_cut_blocks_of_8_bits(monkeypatch):
    """Which the first rank finds before it looks for the others."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in (place | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    words = "it keeps 'exp_avg' as a OptimState8bit, in blocks that shards would cut elsewhere"
    for data in ("zero1", "fsdp"):
        with torch.compiler.set_stance("force_eager"), pytest.raises(halfmesh.IncompatibleConfigError, match=words):
            in_8_bits({"parallel": {"data": data}, "timeout": 1.0})
