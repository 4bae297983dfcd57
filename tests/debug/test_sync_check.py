"""`debug="sync"`: ranks that train alike are left alone, and of others the first thing that differs is named."""

import itertools

import pytest
import torch

from halfmesh.errors import SyncError
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def run(layout, mode="none", steps=8, before=lambda engine, number: None, **options):
    """How many steps were taken. `before` each batch may do harm."""
    config = {"clip_grad_norm": 1.0, "on_nonfinite": "skip", "debug": "sync"}
    config |= {"bf16": {"mode": "naive"}} if mode == "bf16" else {}
    with make_engine(layout, "none" if mode == "bf16" else mode, samples=64, **config, **options) as engine:
        batches = itertools.chain.from_iterable(itertools.repeat(engine.dataloader))
        for number, (x, y) in enumerate(itertools.islice(batches, steps)):
            before(engine, number)
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        return engine.global_step


def clean(rank, world_size, cells):
    options = {"dropout": 0.2, "shuffle": True}
    return [run(*cell, gradient_accumulation=2 if "torch" in cell else 1, **options) for cell in cells]


def test_training_that_is_alike_on_all_ranks_is_left_alone():
    cells = [("dp2", "naive"), ("tp2", "torch"), ("pp2", "none"), ("zero1", "naive"), ("fsdp", "bf16")]
    expected = [4 if mode == "torch" else 8 for _, mode in cells]
    assert run_ranks(clean, 2, cells, timeout=200) == [expected] * 2


@torch.no_grad()
def add(tensor, index, value):
    """Also to a rank's part."""
    getattr(tensor, "to_local", lambda: tensor)()[index] += value


def weight(engine):
    add(engine.model.first.weight, (0, 3), 1e-6)


def buffer(engine):
    engine.model.steps[1] = 7.0


def statistics(engine):
    """After they were averaged."""
    engine.optimizer.register_step_pre_hook(lambda *_: add(engine.model.norm.running_mean, 5, 1.0))


def lr(engine):
    engine.optimizer.param_groups[0]["lr"] = 0.02


def state(engine):
    param = engine.optimizer.param_groups[0]["params"][0]
    add(engine.optimizer.state[param]["exp_avg_sq"].view(-1), 3, 1.0)


def master(engine):
    add(engine.optimizer.param_groups[0]["params"][0], (0, 3), 1e-7)  # less than the model can show


HARM = [  # layout, mode, lr, what is done on rank 1 before the third batch; what the message begins with, and says
    ("dp2", "none", 0.01, weight, "the weight first.weight", "rank 1: differs in 1 of "),
    ("dp2", "none", 0.01, buffer, None, None),  # each data rank may have its own
    ("dp2", "none", 0.01, statistics, "the buffer norm.running_mean", "rank 1: differs in "),
    ("dp2", "none", 0.01, lr, "lr of parameter group 0", "rank 1: 0.02 instead of 0.01"),
    ("dp2", "none", 0.0, state, "the optimizer's exp_avg_sq of first.weight", "at [0, 3]: "),
    ("dp2", "naive", 0.01, master, "the fp32 master of first.weight", "in 1 of 128 elements, first at [0, 3]"),
    ("tp2", "none", 0.01, buffer, "the buffer steps", "rank 1 (tp 1): differs in 1 of 3 elements"),
]


def harmed(rank, world_size, layout, mode, lr, harm):
    """What this rank was told."""

    def before(engine, number):
        if (rank, number) == (1, 2):
            harm(engine)

    try:
        run(layout, mode, 4, before, optimizer=lambda params: torch.optim.AdamW(params, lr=lr))
    except SyncError as error:
        return str(error)


def test_the_first_thing_that_differs_is_named_on_all_ranks():
    for *given, named, said in HARM:
        told, other = run_ranks(harmed, 2, *given, timeout=100)
        assert told == other
        assert (told is None) == (named is None), told
        if named is not None:
            title = told.partition("\n")[0]
            assert ("after step 2" in title, named in title, said in told) == (True,) * 3, told
