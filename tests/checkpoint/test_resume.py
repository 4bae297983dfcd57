"""Training that goes on from a checkpoint in the same layout goes on bit by bit as it would have."""

from __future__ import annotations

import io

import pytest
import torch

import halfmesh
from tests.support import models
from tests.support.checkpoint_runs import LAYOUTS, differing, make_engine, train, whole_state
from tests.support.ranks import run_ranks

SAVED_AT, AFTER = 6, 10
"""In the first epoch of 8 batches, at the end of an accumulation cycle, with a growth of the scale ahead."""


def cosine(optimizer):
    return halfmesh.CosineAnnealingWarmupLR(optimizer, total_steps=50, warmup_steps=3)


def resumed(layout, mode, folder, saved_at=SAVED_AT):
    """What differs between a run and one that goes on from its checkpoint, over the batches after it."""

    def make(seed):
        larger = LAYOUTS[layout][0] // 2 or 1  # a microbatch for BatchNorm has two samples
        options = {"dropout": 0.3, "shuffle": True, "lr_scheduler": cosine, "batch": 4 * larger, "samples": 32 * larger}
        return make_engine(layout, mode, seed=seed, **options, gradient_accumulation=2, clip_grad_norm=1.0)

    engine = make(seed=1)
    expected = train(engine, saved_at + AFTER, save_at=saved_at, folder=folder)[saved_at - 1 :]
    counters, state = (engine.global_step, engine.dataloader.epoch), whole_state(engine)
    other = make(seed=2)
    train(other, 2)  # a state of its own, to be overwritten
    other.load(folder)
    assert other.global_step == saved_at // 2
    found = ["losses or scales"] * (train(other, AFTER) != expected[1:])
    found += ["counters"] * ((other.global_step, other.dataloader.epoch) != counters)
    found += ["no growth was ahead"] * (mode != "none" and len({scale for _, scale in expected}) == 1)
    return found + differing(whole_state(other), state)


def resumed_cells(rank, world_size, cells, folder):
    return {cell: found for cell in cells if (found := resumed(*cell, f"{folder}/{'_'.join(cell)}"))}


@pytest.mark.parametrize(("mode", "saved_at"), [("naive", 6), ("torch", 8)])
def test_one_process_goes_on_within_an_epoch_and_at_its_edges(mode, saved_at, tmp_path):
    assert resumed("one", mode, tmp_path, saved_at) == []


@pytest.mark.distributed
@pytest.mark.sends
def test_each_layout_goes_on_in_the_middle_of_an_epoch(tmp_path):
    cells = [("dp2", "torch"), ("tp2", "naive"), ("pp2", "torch"), ("zero1", "naive"), ("fsdp", "torch")]
    assert run_ranks(resumed_cells, 2, cells, str(tmp_path), timeout=120) == [{}] * 2


def test_from_a_state_dict():
    """Dropout, shuffling, accumulation, a growth ahead; through torch.save."""
    (key, mode), *_ = models.MODES["torch_fp16"].items()
    config = {key: {**mode, "growth_interval": 3}, "gradient_accumulation": 2, "clip_grad_norm": 1.0}

    def make(seed):
        torch.manual_seed(seed)
        loader = models.make_loader(16, 4, shuffle=True)
        model, optimizer = models.MLP(dropout=0.3), models.adamw
        return models.make_engine(config, model=model, optimizer=optimizer, loader=loader, lr_scheduler=cosine)

    engine, file = make(11), io.BytesIO()
    models.train(engine, epochs=2)
    torch.save(engine.state_dict(), file)
    expected = [repr(result) for result in models.train(engine, epochs=2)]
    other = make(12)
    models.train(other, epochs=1)  # a state of its own, to be overwritten
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [repr(result) for result in models.train(other, epochs=2)] == expected
    assert differing(whole_state(other), whole_state(engine)) == []
