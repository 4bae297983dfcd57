"""`debug="sync"`: ranks that train alike are left alone, and of others the first thing that differs is named."""

import itertools

import pytest
import torch

from halfmesh.errors import SyncError
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def start(layout, mode="none", **config):
    config = {"clip_grad_norm": 1.0, "on_nonfinite": "skip"} | config
    config |= {"bf16": {"mode": "naive"}} if mode == "bf16" else {}
    return make_engine(layout, "none" if mode == "bf16" else mode, debug="sync", samples=64, **config)


def train(engine, steps, before=lambda number: None):
    """`before(number)` each batch may do harm."""
    batches = itertools.chain.from_iterable(itertools.repeat(engine.dataloader))
    for number, (x, y) in enumerate(itertools.islice(batches, steps)):
        before(number)
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


def clean(rank, world_size, cells):
    """For each cell how many steps were taken."""
    found = []
    for layout, mode in cells:
        options = {"dropout": 0.2, "shuffle": True, "gradient_accumulation": 2 if mode == "torch" else 1}
        engine = start(layout, mode, **options)
        train(engine, 8)
        found.append(engine.global_step)
        engine.close()
    return found


def test_training_that_is_alike_on_all_ranks_is_left_alone():
    cells = [("dp2", "naive"), ("tp2", "torch"), ("pp2", "none"), ("zero1", "naive"), ("fsdp", "bf16")]
    expected = [4 if mode == "torch" else 8 for _, mode in cells]
    assert run_ranks(clean, 2, cells, timeout=200) == [expected] * 2


# -- harm, on one rank, before the third batch -----------------------------------------------------------------------


@torch.no_grad()
def add(tensor, index, value):
    """Also to a rank's part."""
    getattr(tensor, "to_local", lambda: tensor)()[index] += value


def statistics(engine):
    """After they were averaged."""
    engine.optimizer.register_step_pre_hook(lambda *_: add(engine.model.norm.running_mean, 5, 1.0))


def setting(name, value):
    return lambda engine: engine.optimizer.param_groups[0].update({name: value})


def state(engine):
    param = engine.optimizer.param_groups[0]["params"][0]
    add(engine.optimizer.state[param]["exp_avg_sq"].view(-1), 3, 1.0)


def master(engine):
    add(engine.optimizer.param_groups[0]["params"][0], (0, 3), 1e-7)  # less than the model can show


def weight(layer, index, value):
    return lambda engine: add(engine.model.get_submodule(layer).weight, index, value)


def buffer(engine):
    engine.model.steps[1] = 7.0


FIRST = weight("first", (0, 3), 1e-6)
HARM = [  # layout, options, what is done on which rank, what the message begins with, and says of whom
    ("dp2", {}, FIRST, 1, "the weight first.weight", "rank 1: differs in 1 of "),
    ("dp2", {}, buffer, 1, None, None),  # each data rank may have its own
    ("dp2", {}, statistics, 1, "the buffer norm.running_mean", "rank 1: differs in "),
    ("dp2", {}, setting("lr", 0.02), 1, "lr of parameter group 0", "rank 1: 0.02 instead of 0.01"),
    ("dp2", {"lr": 0.0}, state, 1, "the optimizer's exp_avg_sq of first.weight", "at [0, 3]: "),
    ("dp2", {"mode": "naive"}, master, 1, "the fp32 master of first.weight", "in 1 of 128 elements, first at [0, 3]"),
    ("tp2", {}, buffer, 1, "the buffer steps", "rank 1 (tp 1): differs in 1 of 3 elements"),
]


def harmed(rank, world_size):
    """What each rank was told, by cell."""
    found = []
    for layout, options, harm, bad, *_ in HARM:
        lr = options.get("lr", 0.01)
        options = {key: value for key, value in options.items() if key != "lr"}
        engine = start(layout, optimizer=lambda params, lr=lr: torch.optim.AdamW(params, lr=lr), **options)

        def before(number, engine=engine, harm=harm, bad=bad):
            return harm(engine) if number == 2 and rank == bad else None

        found.append(None)
        try:
            with engine:
                train(engine, 4, before)
        except SyncError as error:
            found[-1] = str(error)
    return found


def test_the_first_thing_that_differs_is_named_on_all_ranks():
    mine, others = run_ranks(harmed, 2, timeout=200)
    assert mine == others
    for told, (*_, named, said) in zip(mine, HARM, strict=True):
        if named is None:
            assert told is None
        else:
            title = told.partition("\n")[0]
            assert ("after step 2" in title, named in title, said in told) == (True,) * 3, told
