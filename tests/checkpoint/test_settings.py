"""Runs that go on with other settings than they are given are told so; what training moves is none of them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import rank_device, run_ranks


class Rise:
    """A callable: its attributes are state of a LambdaLR."""

    def __init__(self, warmup):
        self.warmup = warmup

    def __call__(self, step):
        return min(1, (step + 1) / self.warmup)


class Own:
    """A scheduler of the user's, which also moves the weight decay."""

    def __init__(self, optimizer, final):
        self.optimizer, self.final, self.count = optimizer, final, 0

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group.update(lr=group["lr"] / 2, weight_decay=self.final * self.count)

    def state_dict(self):
        return {"final": self.final, "count": self.count}

    def load_state_dict(self, state):
        self.final, self.count = state["final"], state["count"]


def sequence(optimizer, iters):
    parts = schedulers.LinearLR(optimizer, total_iters=iters), schedulers.CosineAnnealingLR(optimizer, T_max=iters + 1)
    return schedulers.SequentialLR(optimizer, parts, milestones=[iters])


SCHEDULERS = {
    "linear": (lambda o, n: halfmesh.LinearWarmupLR(o, 1, total_steps=n), ["total_steps: 6, not 12"]),
    "cosine": (lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n), ["T_max: 6, not 12"]),
    "step": (
        lambda o, n: schedulers.StepLR(o, n, gamma=1 / n),
        ["step_size: 6, not 12", "gamma: 0.166667, not 0.0833333"],
    ),
    "milestones": (
        lambda o, n: schedulers.MultiStepLR(o, [1, n]),
        ["milestones: {'1': 1, '6': 1}, not {'1': 1, '12': 1}"],
    ),
    "one cycle": (lambda o, n: schedulers.OneCycleLR(o, 0.1, total_steps=n + 9), ["total_steps: 15, not 21"]),
    "sequence": (
        sequence,
        ["_milestones: [6], not [12]", "_schedulers[0].total_iters: 6, not 12", "_schedulers[1].T_max: 7, not 13"],
    ),
    "lambda": (lambda o, n: schedulers.LambdaLR(o, Rise(n)), [f"lr_lambdas[{i}].warmup: 6, not 12" for i in (0, 1)]),
    "numpy": (lambda o, n: schedulers.LambdaLR(o, lambda step: np.cos(step / n)), []),  # nothing is overwritten
    "plateau": (lambda o, n: schedulers.ReduceLROnPlateau(o, patience=n), ["patience: 6, not 12"]),
    "own": (lambda o, n: Own(o, n / 100), ["final: 0.06, not 0.12"]),
}


def run(kind, number, lr=0.01, **settings):
    scheduler = lambda optimizer: SCHEDULERS[kind][0](optimizer, number)  # noqa: E731
    return make_engine(
        "one",
        "none",
        optimizer=lambda params: optim.AdamW([{"params": params[:2], **settings}, {"params": params[2:]}], lr=lr),
        lr_scheduler=scheduler,
        lr_interval="manual",
    )


def updates(engine, count=4):
    for _ in range(count):
        engine.zero_grad()
        engine.backward(engine.model(torch.zeros(2, 8)).sum())
        engine.step()
        if isinstance(engine.lr_scheduler, schedulers.ReduceLROnPlateau):
            engine.lr_scheduler.step(1.0)
        else:
            engine.lr_scheduler.step()


@pytest.mark.promise(
    "resuming with other settings",
    "the checkpoint's are in force; a warning names each with both values",
    of="PyTorch",
    page="checkpoints.md",
)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_setting_that_a_load_overwrites_is_told_once(kind, tmp_path, caplog):
    updates(engine := run(kind, 6))
    engine.save(tmp_path)
    caplog.clear()
    run(kind, 6).load(tmp_path)
    run(kind, 6).load_state_dict(engine.state_dict())
    assert "other settings" not in caplog.text
    lr, decay = (" (now 0.000625)", " (now 0.24)") if kind == "own" else ("", "")
    told = [f"lr_scheduler {line}" for line in SCHEDULERS[kind][1]]
    told += [f"optimizer weight_decay: 0.01{decay}, not 0.3"]
    told += [f"optimizer lr: 0.01{lr}, not 0.005"] * (kind != "one cycle")  # which sets it itself
    for load in (lambda other: other.load(tmp_path), lambda other: other.load_state_dict(engine.state_dict())):
        caplog.clear()
        load(run(kind, 12, lr=0.005, weight_decay=0.3))
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        title, *lines = warning.split("\n  - ")
        kinds = ("lr_scheduler", "optimizer_settings")
        assert title.endswith(
            "was saved by a run with other settings, which are in force now in place of those that this run gave; to "
            f"keep those of this run, load with keep={kinds}, or set one after the load "
            "(engine.optimizer.param_groups, engine.lr_scheduler):"
        )
        assert sorted(lines) == sorted(told)


def test_a_run_that_goes_on_with_the_settings_of_another_is_told_again(tmp_path, caplog):
    """Not of those that it sets after the load. And groups are compared by name, whatever their order."""

    def make(first, second, order=1):
        def optimizer(params):
            groups = {"params": params[:2], "lr": first}, {"params": params[2:], "lr": second}
            return optim.SGD(groups[::order])

        return make_engine("one", "naive", optimizer=optimizer)

    def told(first, second, order=1, folder=tmp_path):
        caplog.clear()
        (engine := make(first, second, order)).load(folder)
        return engine, [line for line in caplog.text.splitlines() if line.startswith("  - ")]

    make(0.1, 0.2).save(tmp_path)
    assert told(0.1, 0.2, order=-1)[1] == []
    engine, lines = told(0.1, 0.5, order=-1)
    assert lines == ["  - optimizer lr: 0.2, not 0.5"]
    engine.save(tmp_path / "later")
    assert told(0.1, 0.5, folder=tmp_path / "later")[1] == lines
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.save(tmp_path / "set")
    assert told(0.1, 0.5, folder=tmp_path / "set")[1] == []
    assert rates(told(0.3, 0.4, folder=tmp_path / "set")[0]) == [0.1, 0.5]


def test_the_same_number_in_another_type_is_no_other_setting(tmp_path, caplog):
    def make(number, count):
        return make_engine(
            "one",
            "none",
            optimizer=lambda params: optim.SGD(params, lr=number(0.01), weight_decay=float(number(0.1))),
            lr_scheduler=lambda optimizer: schedulers.StepLR(optimizer, count(6), number(0.5)),
        )

    kinds = [(float, int), (np.float32, np.int64), (torch.tensor, int), (np.float64, int)]
    for number, (saved, found) in enumerate(zip(kinds, kinds[1:] + kinds[:1], strict=True)):
        make(*saved).save(tmp_path / str(number))
        make(*found).load(tmp_path / str(number))
    assert "other settings" not in caplog.text


def test_a_group_without_given_settings_is_not_compared_with_those_of_another(tmp_path, caplog):
    """It was added in the run that saved, and stands elsewhere in this one."""

    def make(*groups):
        return make_engine(
            "one", "none", optimizer=lambda p: optim.SGD([{"params": p[a:b], "lr": r} for a, b, r in groups])
        )

    engine = make((0, 4, 0.1))
    engine.optimizer.add_param_group({"params": list(engine.model.head.parameters()), "lr": 0.2})
    engine.save(tmp_path)
    other = make((12, 14, 0.3), (0, 4, 0.1))
    other.load(tmp_path)
    assert rates(other) == [0.2, 0.1]
    assert "other settings" not in caplog.text


def rates(engine):
    return [group["lr"] for group in engine.optimizer.param_groups]


# -- keep ------------------------------------------------------------------------------------------------------------

TOGETHER = {
    "chained": lambda o, n: schedulers.ChainedScheduler([schedulers.StepLR(o, n), schedulers.ExponentialLR(o, 0.9)]),
    "floor": lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n, eta_min=0.001),
    "several": lambda o, n: [schedulers.StepLR(o, n // 3, gamma=0.5), schedulers.LinearLR(o, 1 / n, total_iters=n)],
}


def kept_run(kind, number, lr=0.01, **settings):
    makes = {**{name: make for name, (make, _) in SCHEDULERS.items()}, **TOGETHER}[kind]
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), **settings}, {"params": model[1].parameters()}]
    optimizer = optim.AdamW(groups, lr=lr)
    return halfmesh.initialize(
        model, optimizer, config={"lr_interval": "step"}, device=rank_device(), lr_scheduler=makes(optimizer, number)
    )


def now(engine):
    _ = engine.lr_scheduler  # settles
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]


@pytest.mark.promise(
    "going on with another rate or schedule",
    "`engine.load(folder, keep=...)`",
    of="PyTorch",
    page="checkpoints.md",
)
@pytest.mark.parametrize("kind", [kind for kind in [*SCHEDULERS, *TOGETHER] if kind not in ("plateau", "own", "numpy")])
@pytest.mark.parametrize("loads", ["load", "state"])
def test_a_schedule_that_is_kept_goes_on_where_the_saved_one_was(kind, loads, tmp_path, caplog):
    """As if this run had taken the updates, also after a load without `keep`, and updates of its own."""
    saved = kept_run(kind, 6)
    updates_by_step(saved)
    expected = kept_run(kind, 12, lr=0.005, weight_decay=0.3)
    updates_by_step(expected)
    saved.save(tmp_path)
    state = saved.state_dict()
    engine = kept_run(kind, 12, lr=0.005, weight_decay=0.3)

    def load(**keep):
        if loads == "load":
            engine.load(tmp_path, **keep)
        else:
            engine.load_state_dict(copy.deepcopy(state), **keep)

    for spoil in (False, True):
        if spoil:
            load()
            updates_by_step(engine, 3)
        caplog.clear()
        load(keep=("lr_scheduler", "optimizer_settings"))
        assert now(engine) == now(expected)
        assert "other settings" not in caplog.text
        assert engine.optimizer.state_dict()["state"][0]["step"] == 4
    updates_by_step(engine, 3)
    updates_by_step(expected, 3)
    assert now(engine) == now(expected)
    engine.save(tmp_path / "later")  # these settings are in force from now on
    caplog.clear()
    kept_run(kind, 12, lr=0.005, weight_decay=0.3).load(tmp_path / "later")
    assert "other settings" not in caplog.text


def updates_by_step(engine, count=4):
    for _ in range(count):
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, 8, device=engine.device)).sum())
        engine.step()


@pytest.mark.promise("going on with another rate or schedule")
def test_each_of_the_two_may_be_kept_alone(tmp_path, caplog):
    saved = kept_run("linear", 6)
    updates_by_step(saved)
    saved.save(tmp_path)
    new = kept_run("linear", 12, lr=0.005, weight_decay=0.3)
    updates_by_step(new)
    for keep, rates_of, decays_of, left in [
        (("lr_scheduler",), new, saved, ["optimizer weight_decay: 0.01, not 0.3"]),
        (("optimizer_settings",), saved, new, ["lr_scheduler total_steps: 6, not 12", "optimizer lr: 0.01, not 0.005"]),
    ]:
        caplog.clear()
        engine = kept_run("linear", 12, lr=0.005, weight_decay=0.3)
        engine.load(tmp_path, keep=keep)
        assert [group["lr"] for group in now(engine)] == [group["lr"] for group in now(rates_of)]
        assert [g["weight_decay"] for g in now(engine)] == [g["weight_decay"] for g in now(decays_of)]
        assert [line[4:] for line in caplog.text.splitlines() if line.startswith("  - ")] == left
        assert "load with keep=('lr_scheduler', 'optimizer_settings')" in caplog.text


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
    updates_by_step(engine)
    engine.save(tmp_path)
    other.load(tmp_path, keep=("optimizer_settings",))
    assert (rates(other), other.optimizer.param_groups[0]["k"]) == ([0.2], 4)


def test_a_schedule_of_another_class_may_go_on(tmp_path):
    saved = kept_run("linear", 6)
    updates_by_step(saved)
    saved.save(tmp_path)
    with pytest.raises(InputError, match=r"it was saved with the lr_scheduler .*LinearWarmupLR"):
        kept_run("cosine", 12).load(tmp_path)
    engine, expected = kept_run("cosine", 12), kept_run("cosine", 12)
    engine.load(tmp_path, keep=("lr_scheduler",))
    updates_by_step(expected)
    assert now(engine) == now(expected)


MOMENTA = {
    "linear": lambda o: halfmesh.LinearWarmupLR(o, 1, total_steps=9),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=15),
    "another": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20, base_momentum=0.5, max_momentum=0.8),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.2, step_size_up=5, base_momentum=0.6, max_momentum=0.7),
}


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, 0.1, momentum=0.9), lambda p: optim.AdamW(p, 0.1)])
@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("linear", "one cycle"),
        ("one cycle", "another"),
        ("one cycle", "linear"),
        ("cyclic", "linear"),
        ("one cycle", "cyclic"),
    ],
)
def test_a_schedule_that_moves_the_momentum_is_kept_whole(before, kept, make, tmp_path, caplog):
    def begin(kind):
        return make_engine("one", "none", optimizer=make, lr_scheduler=MOMENTA[kind])

    updates_by_step(saved := begin(before))
    saved.save(tmp_path)
    updates_by_step(expected := begin(kept))
    caplog.clear()
    (engine := begin(kept)).load(tmp_path, keep=("lr_scheduler",))
    assert now(engine) == now(expected)
    assert "other settings" not in caplog.text
    updates_by_step(engine)
    updates_by_step(expected)
    assert now(engine) == now(expected)


def test_a_kept_schedule_begins_where_none_was_saved_and_that_is_told(tmp_path, caplog):
    saved = make_engine("one", "none", optimizer=lambda p: optim.SGD(p, 0.1))
    updates_by_step(saved)
    saved.save(tmp_path)
    engine = make_engine("one", "none", optimizer=lambda p: optim.SGD(p, 0.1), lr_scheduler=MOMENTA["linear"])
    engine.load(tmp_path, keep=("lr_scheduler",))
    assert engine.lr_scheduler.last_epoch == 0
    assert "has no schedule: the lr_scheduler of this run is not advanced, and begins" in caplog.text


@pytest.mark.parametrize(
    ("kind", "keep", "words"),
    [
        ("linear", ("lr_schedule",), r"keep=\('lr_schedule',\): expected a tuple .*did you mean 'lr_scheduler'"),
        ("linear", "lr_scheduler", r"keep='lr_scheduler': expected a tuple"),
        ("own", ("lr_scheduler",), r"counts no steps, so this run's cannot be advanced"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_changes(kind, keep, words, tmp_path):
    engine = kept_run(kind, 6)
    engine.save(tmp_path)
    before = now(engine)
    for load, given in (engine.load, tmp_path), (engine.load_state_dict, engine.state_dict()):
        with pytest.raises(InputError, match=words):
            load(given, keep=keep)
    assert now(engine) == before


def save_on_two(rank, world_size, folder):
    for name, batch in {"larger": {"gradient_accumulation": 3}, "same": {"global_batch_size": 48}}.items():
        make_engine("dp2", "none", batch=16, **batch).save(folder / name)


@pytest.mark.distributed
def test_fewer_samples_in_an_update_on_fewer_data_ranks_are_told_once_with_the_key_that_keeps_them(tmp_path, caplog):
    run_ranks(save_on_two, 2, tmp_path)
    own = {
        "one": {"gradient_accumulation": 3},
        "kept": {"global_batch_size": 48},
        "by hand": {"gradient_accumulation": 6},
    }
    told = {}
    for name, batch in own.items():
        for folder in ("larger", "same"):
            caplog.clear()
            make_engine("one", "none", batch=8, **batch).load(tmp_path / folder)
            told[name, folder] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    words = (
        "{} was saved by a run on 2 data ranks, whose updates took 48 samples; on 1 data rank they take 24. To keep "
        "the number, set global_batch_size = 48"
    )
    for (name, folder), warnings in told.items():
        where = tmp_path / folder / "step-00000000"
        assert warnings == ([words.format(where)] if name == "one" else [])
