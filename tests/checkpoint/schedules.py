"""Learning-rate schedules of each kind, whose settings a load compares or keeps."""

from __future__ import annotations

import numpy as np
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

import halfmesh
from tests.support.ranks import rank_device


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
    "linear": lambda o, n: halfmesh.LinearWarmupLR(o, 1, total_steps=n),
    "step": lambda o, n: schedulers.StepLR(o, n, gamma=1 / n),
    "milestones": lambda o, n: schedulers.MultiStepLR(o, [1, n]),
    "one cycle": lambda o, n: schedulers.OneCycleLR(o, 0.1, total_steps=n + 9),
    "sequence": sequence,
    "lambda": lambda o, n: schedulers.LambdaLR(o, Rise(n)),
    "numpy": lambda o, n: schedulers.LambdaLR(o, lambda step: np.cos(step / n)),
    "plateau": lambda o, n: schedulers.ReduceLROnPlateau(o, patience=n),
    "own": lambda o, n: Own(o, n / 100),
    "chained": lambda o, n: schedulers.ChainedScheduler([schedulers.StepLR(o, n), schedulers.ExponentialLR(o, 0.9)]),
    "floor": lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n, eta_min=0.001),
    "several": lambda o, n: [schedulers.StepLR(o, n // 3, gamma=0.5), schedulers.LinearLR(o, 1 / n, total_iters=n)],
}


def run(kind, number, lr=0.01, **settings):
    """An engine with the schedule `kind` of length `number`. `settings`: of the first of two groups."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), **settings}, {"params": model[1].parameters()}]
    optimizer = optim.AdamW(groups, lr=lr)
    scheduler, interval = SCHEDULERS[kind](optimizer, number), "manual" if kind == "plateau" else "step"
    config = {"lr_interval": interval}
    return halfmesh.initialize(model, optimizer, config=config, device=rank_device(), lr_scheduler=scheduler)


def updates(engine, count=4):
    for _ in range(count):
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, 8, device=engine.device)).sum())
        engine.step()
        if isinstance(engine.lr_scheduler, schedulers.ReduceLROnPlateau):
            engine.lr_scheduler.step(1.0)


def saved_run(kind, folder):
    """One that has taken four updates, and was saved."""
    updates(engine := run(kind, 6))
    engine.save(folder)
    return engine


def rates(engine):
    return [group["lr"] for group in engine.optimizer.param_groups]


def told(caplog):
    """The lines of the warning of other settings; the log is then empty."""
    lines = [line[4:] for line in caplog.text.splitlines() if line.startswith("  - ")]
    assert bool(lines) == ("with other settings" in caplog.text)
    caplog.clear()
    return lines
