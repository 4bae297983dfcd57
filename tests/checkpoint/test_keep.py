"""engine.load(folder, keep=...): the schedule, or the settings of the optimizer, of the run that loads."""

from __future__ import annotations

import copy

import pytest
from torch import optim
from torch.optim import lr_scheduler as schedulers

import halfmesh
from halfmesh.errors import InputError
from tests.checkpoint.schedules import SCHEDULERS, rates, run, saved_run, told, updates
from tests.support.checkpoint_runs import make_engine


def now(engine):
    _ = engine.lr_scheduler  # settles
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if kind not in ("plateau", "own", "numpy")])
def test_a_schedule_that_is_kept_goes_on_where_the_saved_one_was(kind, tmp_path, caplog):
    """As if this run had taken the updates, also after a load without `keep`, and updates of its own."""
    state = copy.deepcopy(saved_run(kind, tmp_path).state_dict())
    settings = {"lr": 0.005, "weight_decay": 0.3}
    updates(expected := run(kind, 12, **settings))
    engine, keep = run(kind, 12, **settings), ("lr_scheduler", "optimizer_settings")

    def from_state(**how):
        engine.load_state_dict(copy.deepcopy(state), **how)

    for load in (lambda **how: engine.load(tmp_path, **how), from_state):
        for spoil in (False, True):
            if spoil:
                load()
                updates(engine, 3)
            caplog.clear()
            load(keep=keep)
            assert now(engine) == now(expected)
            assert told(caplog) == []
            assert engine.optimizer.state_dict()["state"][0]["step"] == 4
    updates(engine, 3)
    updates(expected, 3)
    assert now(engine) == now(expected)
    engine.save(tmp_path / "later")  # these settings are in force from now on
    run(kind, 12, **settings).load(tmp_path / "later")
    assert told(caplog) == []


def test_each_of_the_two_may_be_kept_alone(tmp_path, caplog):
    saved = saved_run("linear", tmp_path)
    updates(new := run("linear", 12, lr=0.005, weight_decay=0.3))
    for keep, rates_of, decays_of, left in [
        (("lr_scheduler",), new, saved, ["optimizer weight_decay: 0.01, not 0.3"]),
        (("optimizer_settings",), saved, new, ["lr_scheduler total_steps: 6, not 12", "optimizer lr: 0.01, not 0.005"]),
    ]:
        caplog.clear()
        engine = run("linear", 12, lr=0.005, weight_decay=0.3)
        engine.load(tmp_path, keep=keep)
        assert [group["lr"] for group in now(engine)] == [group["lr"] for group in now(rates_of)]
        assert [g["weight_decay"] for g in now(engine)] == [g["weight_decay"] for g in now(decays_of)]
        assert "load with keep=('lr_scheduler', 'optimizer_settings')" in caplog.text
        assert told(caplog) == left


def test_without_a_scheduler_the_rate_is_a_setting_and_counts_are_not(tmp_path):
    """What an optimizer counts in its groups comes from the checkpoint."""

    class Counting(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    def make(lr):
        return make_engine("one", "none", optimizer=lambda params: Counting([{"params": params, "k": 0}], lr=lr))

    engine, other = make(0.1), make(0.2)
    updates(engine)
    engine.save(tmp_path)
    other.load(tmp_path, keep=("optimizer_settings",))
    assert (rates(other), other.optimizer.param_groups[0]["k"]) == ([0.2], 4)


def test_a_schedule_of_another_class_may_go_on(tmp_path):
    saved_run("linear", tmp_path)
    with pytest.raises(InputError, match=r"it was saved with the lr_scheduler .*LinearWarmupLR"):
        run("floor", 12).load(tmp_path)
    engine, expected = run("floor", 12), run("floor", 12)
    engine.load(tmp_path, keep=("lr_scheduler",))
    updates(expected)
    assert now(engine) == now(expected)


MOMENTA = {
    "none": None,
    "linear": lambda o: halfmesh.LinearWarmupLR(o, 1, total_steps=9),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=15),
    "another": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20, base_momentum=0.5, max_momentum=0.8),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=5, base_momentum=0.6, max_momentum=0.7),
}


def begin(kind, make=lambda params: optim.SGD(params, 0.1, momentum=0.9)):
    return make_engine("one", "none", optimizer=make, lr_scheduler=MOMENTA[kind])


PAIRS = [("linear", "one cycle"), ("one cycle", "another"), ("one cycle", "linear"), ("cyclic", "linear")]
PAIRS += [("one cycle", "cyclic")]


@pytest.mark.parametrize(("before", "kept"), PAIRS)
def test_a_schedule_that_moves_the_momentum_is_kept_whole(before, kept, tmp_path, caplog):
    """SGD's momentum, and the first of Adam's betas."""
    for number, make in enumerate((lambda p: optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.AdamW(p, 0.1))):
        updates(saved := begin(before, make))
        saved.save(tmp_path / str(number))
        updates(expected := begin(kept, make))
        caplog.clear()
        (engine := begin(kept, make)).load(tmp_path / str(number), keep=("lr_scheduler",))
        assert now(engine) == now(expected)
        assert told(caplog) == []
        updates(engine)
        updates(expected)
        assert now(engine) == now(expected)


def test_a_kept_schedule_begins_where_none_was_saved_and_that_is_told(tmp_path, caplog):
    updates(saved := begin("none"))
    saved.save(tmp_path)
    (engine := begin("linear")).load(tmp_path, keep=("lr_scheduler",))
    assert engine.lr_scheduler.last_epoch == 0
    assert "has no schedule: the lr_scheduler of this run is not advanced" in caplog.text


@pytest.mark.parametrize(
    ("kind", "keep", "words"),
    [
        ("linear", ("lr_schedule",), r"keep=\('lr_schedule',\): expected a tuple .*did you mean 'lr_scheduler'"),
        ("linear", "lr_scheduler", r"keep='lr_scheduler': expected a tuple"),
        ("own", ("lr_scheduler",), r"counts no steps \(as ReduceLROnPlateau\), so it cannot be advanced"),
    ],
)
def test_what_cannot_be_kept_is_rejected_before_anything_changes(kind, keep, words, tmp_path):
    engine = run(kind, 6)
    engine.save(tmp_path)
    before = now(engine)
    for load, given in (engine.load, tmp_path), (engine.load_state_dict, engine.state_dict()):
        with pytest.raises(InputError, match=words):
            load(given, keep=keep)
    assert now(engine) == before
