"""Runs that go on with other settings than they are given are told so; what training moves is none of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

import halfmesh
from tests.support.checkpoint_runs import make_engine


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
        assert title.endswith(
            "was saved by a run with other settings, which are in force now in place of those that this run gave; to "
            "change one, set it after the load (engine.optimizer.param_groups, engine.lr_scheduler):"
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
