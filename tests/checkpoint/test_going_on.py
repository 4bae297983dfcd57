"""A run that was told to end goes on exactly, in loops of each shape; and what the config key resume takes."""

import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import CheckpointError, InputError, Preempted
from tests.checkpoint.loops import NOWHERE, ahead, at, loop, made, step, steps_in, twice
from tests.support.checkpoint_runs import differing, make_engine, weights
from tests.support.models import make_data


def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)


BY_HAND = {"lr_scheduler": halved, "lr_interval": "manual"}
CASES = {  # the update after which it is told, the one that is saved, how it trains, and options
    "the last batch of an epoch": (12, 12, loop, {}),
    "the last batch of all": (36, 36, loop, {}),
    "after an epoch": (12, 12, partial(loop, lr="epochs"), BY_HAND),
    "by epoch": (24, 24, loop, {"lr_scheduler": halved, "lr_interval": "epoch"}),
    "in a cycle": (4, 5, loop, {"gradient_accumulation": 3}),  # after its second microbatch: it is completed first
    "two steps with a batch": (5, 6, twice, {}),
    "epochs that are left": (5, 5, partial(loop, left_after=4), {}),
    **{f"a batch ahead, {number}": (number, number, ahead, {}) for number in (11, 12)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_told_to_end_goes_on_exactly(name, tmp_path):
    number, saved, train, options = CASES[name]
    expected = train(whole := made(None, mode="torch", **options))
    first = made(tmp_path, mode="torch", **options)
    with pytest.raises(Preempted) as ended:
        train(first, at(number, 2 if name == "in a cycle" else 1))
    assert ended.value.code == halfmesh.EXIT_PREEMPTED == 75
    assert ended.value.folder == tmp_path / f"step-{saved:08d}"
    assert steps_in(tmp_path) == [saved]
    first.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # another one changes nothing: the process is to end
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    second = made(tmp_path, seed=2, mode="torch", **options)
    assert second.global_step == saved
    found = train(second)
    assert found == expected[len(expected) - len(found) :]
    assert differing(weights(second), weights(whole)) == []
    assert second.global_step == whole.global_step
    second.close()


def test_a_loop_with_a_loader_of_its_own_goes_on_exactly(tmp_path):
    """The next forward in training is the boundary: neither a second one of a step, nor an evaluation."""

    def train(engine, batches, when=NOWHERE):
        for x, y in batches:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y) + engine.criterion(engine(x), y))
            engine.step()
            when(engine)
            with torch.no_grad():
                engine(x)
            engine.lr_scheduler.step()

    x, y = make_data(80)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    train(whole := made(None, mode="torch", **BY_HAND), batches)
    with pytest.raises(Preempted):
        train(made(tmp_path, mode="torch", **BY_HAND), batches, at(4))
    train(second := made(tmp_path, mode="torch", **BY_HAND), batches[4:])
    assert differing(weights(second), weights(whole)) == []
    assert second.lr_scheduler.last_epoch == whole.lr_scheduler.last_epoch == 10


def test_resume_from_a_folder(tmp_path, caplog):
    with caplog.at_level("INFO", "halfmesh"), made(tmp_path / "runs") as engine:
        assert engine.global_step == 0
    assert "training starts from scratch" in caplog.text
    step(engine := made(None))
    place = engine.save(tmp_path)
    for path in (tmp_path, place):
        other = make_engine("one", "none", resume=str(path), seed=2)
        assert other.global_step == 1
        assert differing(weights(other), weights(engine)) == []
    with pytest.raises(CheckpointError, match=r"loading from .*nothing failed: there is no such folder"):
        make_engine("one", "none", resume=str(tmp_path / "nothing"))


def test_resume_never_begins_anew_beside_damage_or_another_model(tmp_path):
    place = made(None).save(tmp_path)
    with pytest.raises(InputError, match="does not fit the model and optimizer of this engine"):
        made(tmp_path, model=nn.Linear(8, 4))
    (place / "common.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: common.pt"):
        made(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
