"""Dropout in a sharded model: which ranks drop alike, and that activation checkpointing meets the same masks again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.parallel.rng import CPU, RandomFork
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import rng_state

pytestmark = pytest.mark.distributed

SEQUENCES = {"transformer.h.0": "sequence_begin", "transformer.ln_f": "sequence_end", "*.h.*.ln_?": "sequence"}
SEQUENCES |= {"*.h.*.attn": "region", "*.h.*.mlp": "region", "*.resid_dropout": "sequence", "*.mlp.dropout": "sequence"}


def make_engine(sequence: bool, part: str | None = None, **options: Any) -> halfmesh.Engine:
    """Drops in sharded layers, too. `part`: of each block, is computed again in backward; options: of `checkpoint`."""
    torch.manual_seed(0)
    model = GPT(dropout=0.5)
    for block in model.transformer["h"]:
        block.mlp.gelu = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
        if part is not None:
            inner = block.get_submodule(part)
            inner.forward = lambda x, run=inner.forward: checkpoint(run, x, **options)
    tensor = {"size": 2, "sequence_parallel": sequence, "plan": PLAN | (SEQUENCES if sequence else {})}
    return halfmesh.initialize(
        model,
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda output, ids: nn.functional.cross_entropy(output.flatten(0, 1).float(), ids.flatten()),
        config={"parallel": {"tensor": tensor}},
        device=rank_device(),
    )


def ids() -> torch.Tensor:
    return here(torch.randint(WORDS, (3, CONTEXT), generator=torch.Generator().manual_seed(1)))


def masks(rank: int, world_size: int, sequence: bool) -> dict[str, torch.Tensor]:
    """What each dropout drops in two forwards, between which rank 1 draws numbers of its own."""
    found: dict[str, torch.Tensor] = {}
    engine = make_engine(sequence)

    def note(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if module.training:
            found[f"{name} {engine.global_step}"] = output == 0

    for name, module in engine.model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(partial(note, name))
    for _ in range(2):
        state = rng_state()
        engine.backward(engine.criterion(engine(ids()), ids()))
        engine.step()
        assert torch.equal(rng_state(), state), "outside as if the model had drawn nothing"
        if rank == 1:
            torch.rand(3, device=rank_device())
    state = rng_state()
    with torch.no_grad():
        engine.eval()(ids())
    assert torch.equal(rng_state(), state), "evaluation draws nothing"
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_masks(sequence):
    """Ranks of a tensor group drop alike where activations are whole, and differently where they are sharded."""
    ranks = run_ranks(masks, 4, sequence)  # (dp, tp): 0 0, 0 1, 1 0, 1 1
    sharded = ("attn_dropout", "gelu.1", *(("resid_dropout", "mlp.dropout") if sequence else ()))
    assert len(ranks[0]) == 2 * (1 + 2 * 4)
    for name in ranks[0]:
        first, second, third, fourth = (found[name] for found in ranks)
        differ = name.split()[0].endswith(sharded)
        assert torch.equal(first, second) != differ, name
        assert torch.equal(third, fourth) != differ, name
        assert not torch.equal(first, third), name
    for found in ranks:
        assert len({mask.numpy().tobytes() for mask in found.values()}) == len(found), "no mask comes twice"


def checkpointed(rank: int, world_size: int) -> list[Any]:
    """Losses, gradients and the next random number, without and with activation checkpointing."""
    found = []
    for part, reentrant in [(None, False), ("", True), ("mlp.gelu", False)]:
        engine, losses = make_engine(True, part, use_reentrant=reentrant), []
        for _ in range(2):
            outputs = [engine(ids()), engine(ids())]  # two forwards before the first backward
            loss = sum(engine.criterion(output, ids()) for output in outputs)
            engine.backward(loss)
            grads = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
            engine.step()
            losses.append(loss.item())
        found.append((losses, torch.rand(3, device=rank_device()).tolist(), grads))
        engine.close()
    return found


def test_activation_checkpointing_repeats_the_masks():
    for (losses, after, grads), *found in run_ranks(checkpointed, 2):
        assert losses[0] != losses[1]
        for got in found:
            assert got[:2] == (losses, after)
            torch.testing.assert_close(got[2], grads, rtol=1e-5, atol=1e-6)


def test_a_state_from_long_ago_still_shows_how_its_fork_goes_on():
    """As a recomputation has it that begins inside a fork, with thousands of microbatches and layers after it."""
    torch.manual_seed(7)
    fork = RandomFork(3, CPU)
    fork.open()
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        torch.set_rng_state(state)
        assert fork.is_open
        inside = float(torch.rand(()))
        fork.close()
        found.append((inside, float(torch.rand(()))))
        for _ in range(5000):
            fork.open()
            fork.close()
    assert found[0] == found[1]
    assert not fork.is_open
