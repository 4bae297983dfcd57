"""Training that goes on from a checkpoint in the same layout goes on bit by bit as it would have."""

import io

import pytest
import torch

import halfmesh
from tests.support.checkpoint_runs import LAYOUTS, differing, make_engine, train, whole_state
from tests.support.ranks import run_ranks

SAVED_AT, AFTER = 6, 10
"""In the first epoch of 8 batches, at the end of an accumulation cycle, with a growth of the scale ahead."""


def cosine(optimizer):
    return halfmesh.CosineAnnealingWarmupLR(optimizer, total_steps=50, warmup_steps=3)


def resumed(layout, mode, folder, saved_at=SAVED_AT, by_state=False):
    """What differs between a run and one that goes on from its checkpoint or state dict, over the batches after it."""

    def make(seed):
        larger = LAYOUTS[layout][0] // 2 or 1  # a microbatch for BatchNorm has two samples
        options = {"dropout": 0.3, "shuffle": True, "lr_scheduler": cosine, "batch": 4 * larger, "samples": 32 * larger}
        return make_engine(layout, mode, seed=seed, **options, gradient_accumulation=2, clip_grad_norm=1.0)

    engine, file = make(seed=1), io.BytesIO()
    look = lambda: torch.save(engine.state_dict(), file)  # noqa: E731
    expected = train(engine, saved_at + AFTER, saved_at, folder, look if by_state else None)[saved_at - 1 :]
    counters, state = (engine.global_step, engine.dataloader.epoch), whole_state(engine)
    other = make(seed=2)
    train(other, 2)  # a state of its own, to be overwritten
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True)) if by_state else other.load(folder)
    assert other.global_step == saved_at // 2
    found = ["losses or scales"] * (train(other, AFTER) != expected[1:])
    found += ["counters"] * ((other.global_step, other.dataloader.epoch) != counters)
    found += ["no growth was ahead"] * (mode != "none" and len({scale for _, scale in expected}) == 1)
    return found + differing(whole_state(other), state)


def resumed_cells(rank, world_size, cells, folder):
    return {cell: found for cell in cells if (found := resumed(*cell, f"{folder}/{'_'.join(cell)}"))}


@pytest.mark.parametrize(
    ("mode", "saved_at", "by_state"), [("naive", 6, False), ("torch", 8, False), ("torch", 6, True)]
)
def test_one_process_goes_on_within_an_epoch_and_at_its_edges(mode, saved_at, by_state, tmp_path):
    assert resumed("one", mode, tmp_path, saved_at, by_state) == []


@pytest.mark.distributed
@pytest.mark.sends
def test_each_layout_goes_on_in_the_middle_of_an_epoch(tmp_path):
    cells = [("dp2", "torch"), ("tp2", "naive"), ("pp2", "torch"), ("zero1", "naive"), ("fsdp", "torch")]
    assert run_ranks(resumed_cells, 2, cells, str(tmp_path), timeout=120) == [{}] * 2
