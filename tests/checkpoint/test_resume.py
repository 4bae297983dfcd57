"""engine.load in the same layout: training goes on bit by bit as it would have."""

from __future__ import annotations

import pytest
import torch

import halfmesh
from tests.support.checkpoint_runs import make_engine, train
from tests.support.ranks import run_ranks

OPTIONS = {"gradient_accumulation": 2, "clip_grad_norm": 1.0}
SAVED_AT = 10  # of the epoch's 12 batches; the end of an accumulation cycle, and in the middle of a growth interval


def cosine(optimizer):
    return halfmesh.CosineAnnealingWarmupLR(optimizer, total_steps=40, warmup_steps=3)


def weights(engine):
    """What this rank holds, copied."""
    return {name: piece.held.clone() for name, piece in engine._run.holding.weights().items()}


def resumed(layout, mode, folder, saved_at=SAVED_AT, **options):
    """What differs between a run and one that goes on from its checkpoint, over the 20 batches after it."""

    def make(seed):
        chosen = {"dropout": 0.3, "shuffle": True, "batch": 4, "lr_scheduler": cosine} | OPTIONS | options
        return make_engine(layout, mode, seed=seed, **chosen)

    engine = make(seed=1)
    place, seen, expected = None, [], []
    while len(expected) < 20:
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            (seen if place is None else expected).append((loss.item(), engine.loss_scale))
            if len(seen) == saved_at and place is None:
                place = engine.save(folder)
            if len(expected) == 20:
                break
    scales = {scale for _, scale in seen[-1:] + expected}
    before, steps, epoch = weights(engine), engine.global_step, engine.dataloader.epoch
    engine.close()
    other = make(seed=2)
    train(other, 4)  # a state of its own, to be overwritten
    assert other.load(folder) == place
    assert other.global_step == saved_at // 2
    found = []
    if train(other, 20) != expected:
        found.append("losses or scales")
    after = weights(other)
    found += [name for name in before if not torch.equal(after[name], before[name])]
    if (other.global_step, other.dataloader.epoch) != (steps, epoch):
        found.append("counters")
    if len(scales) == 1 and mode != "none":
        found.append("no growth was ahead")
    other.close()
    return found


def run_cells(rank, world_size, cells, folder):
    return {str(cell): resumed(*cell, f"{folder}/{'_'.join(cell)}") for cell in cells}


@pytest.mark.parametrize("mode", ["none", "torch", "naive"])
def test_one_process_goes_on_in_the_middle_of_an_epoch(mode, tmp_path):
    assert resumed("one", mode, tmp_path) == []


@pytest.mark.distributed
def test_two_ranks_go_on_in_the_middle_of_an_epoch(tmp_path):
    cells = [(layout, mode) for layout in ("dp2", "tp2", "pp2", "zero1", "fsdp") for mode in ("torch", "naive")]
    for found in run_ranks(run_cells, 2, cells, str(tmp_path), timeout=120):
        assert {cell: names for cell, names in found.items() if names} == {}


@pytest.mark.parametrize("saved_at", [2, 12, 14, 24])
def test_at_the_edges_of_an_epoch(saved_at, tmp_path):
    assert resumed("one", "torch", tmp_path, saved_at) == []
