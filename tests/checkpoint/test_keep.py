"""A load with other settings than the run is given tells so; engine.load(folder, keep=...) keeps the schedule, or the
settings of the optimizer, of the run that loads."""

import copy

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

import halfmesh
from halfmesh.checkpoint.storage import read_manifest
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import change_manifest, make_engine


class Rise:
    """A callable: its attributes are state of a LambdaLR."""

    def __init__(self, warmup):
        self.warmup = warmup

    def __call__(self, step):
        return min(1, (step + 1) / self.warmup)


def sequence(optimizer, iters):
    parts = schedulers.LinearLR(optimizer, total_iters=iters), schedulers.CosineAnnealingLR(optimizer, T_max=iters + 1)
    return schedulers.SequentialLR(optimizer, parts, milestones=[iters])


SCHEDULERS = {
    "linear": lambda o, n: halfmesh.LinearWarmupLR(o, 1, total_steps=n),
    "one cycle": lambda o, n: schedulers.OneCycleLR(o, 0.1, total_steps=n + 9),
    "sequence": sequence,
    "lambda": lambda o, n: schedulers.LambdaLR(o, Rise(n)),
    "plateau": lambda o, n: schedulers.ReduceLROnPlateau(o, patience=n),
    "floor": lambda o, n: schedulers.CosineAnnealingLR(o, T_max=n, eta_min=0.001),
    "several": lambda o, n: [schedulers.StepLR(o, n // 3, gamma=0.5), schedulers.LinearLR(o, 1 / n, total_iters=n)],
}
TOLD = {
    "linear": ["total_steps: 6, not 12"],
    "one cycle": ["total_steps: 15, not 21"],
    "lambda": [f"lr_lambdas[{i}].warmup: 6, not 12" for i in (0, 1)],
}
KINDS = ("lr_scheduler", "optimizer_settings")


def run(kind, number, lr=0.01, **settings):
    """An engine with the schedule `kind` of length `number`. `settings`: of the first of two groups."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), **settings}, {"params": model[1].parameters()}]
    optimizer = optim.AdamW(groups, lr=lr)
    config = {"lr_interval": "manual" if kind == "plateau" else "step"}
    scheduler = SCHEDULERS[kind](optimizer, number)
    return halfmesh.initialize(model, optimizer, config=config, device="cpu", lr_scheduler=scheduler)


def updates(engine, count=4):
    for _ in range(count):
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()


def saved_run(kind, folder):
    updates(engine := run(kind, 6))
    engine.save(folder)
    return engine


def told(caplog):
    """The lines of the warning of other settings; the log is then empty."""
    lines = [line[4:] for line in caplog.text.splitlines() if line.startswith("  - ")]
    assert bool(lines) == ("its settings replace this run's; to keep this run's" in caplog.text)
    caplog.clear()
    return lines


def now(engine):
    _ = engine.lr_scheduler  # settles
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("kind", TOLD)
def test_each_setting_that_a_load_overwrites_is_told_once(kind, tmp_path, caplog):
    engine = saved_run(kind, tmp_path)
    caplog.clear()
    run(kind, 6).load(tmp_path)
    assert told(caplog) == []
    expected = [f"lr_scheduler {line}" for line in TOLD[kind]] + ["optimizer weight_decay: 0.01, not 0.3"]
    expected += ["optimizer lr: 0.01, not 0.005"] * (kind != "one cycle")  # which sets it itself
    for load in (lambda other: other.load(tmp_path), lambda other: other.load_state_dict(engine.state_dict())):
        load(run(kind, 12, lr=0.005, weight_decay=0.3))
        assert f"load with keep={KINDS}:" in caplog.text
        assert sorted(told(caplog)) == sorted(expected)


def test_fewer_samples_in_an_update_on_fewer_data_ranks_are_told_with_the_key_that_keeps_them(tmp_path, caplog):
    place = make_engine("one", "none", batch=16, gradient_accumulation=3).save(tmp_path)
    change_manifest(place, layout=read_manifest(place)["layout"] | {"data": 2})
    words = "was saved with 48 samples per update; now it has 24; to keep these, set global_batch_size = 48"
    options = {"gradient_accumulation": 3}, {"global_batch_size": 48}, {"gradient_accumulation": 6}
    for batch, is_told in zip(options, (True, False, False), strict=True):
        caplog.clear()
        make_engine("one", "none", batch=8, **batch).load(tmp_path)
        assert (words in caplog.text) == is_told


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if kind != "plateau"])
def test_a_schedule_that_is_kept_goes_on_where_the_saved_one_was(kind, tmp_path, caplog):
    """As if this run had taken the updates, also after a load without `keep`, and updates of its own."""
    state = copy.deepcopy(saved_run(kind, tmp_path).state_dict())
    settings = {"lr": 0.005, "weight_decay": 0.3}
    updates(expected := run(kind, 12, **settings))
    engine = run(kind, 12, **settings)
    for load in (engine.load, lambda _, **how: engine.load_state_dict(copy.deepcopy(state), **how)):
        load(tmp_path)
        updates(engine, 3)
        caplog.clear()
        load(tmp_path, keep=KINDS)
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
    saved_run("linear", tmp_path)
    updates(new := run("linear", 12, lr=0.005, weight_decay=0.3))
    rates = [group["lr"] for group in now(new)]
    for keep, left in [
        (("lr_scheduler",), ["optimizer weight_decay: 0.01, not 0.3"]),
        (("optimizer_settings",), ["lr_scheduler total_steps: 6, not 12", "optimizer lr: 0.01, not 0.005"]),
    ]:
        caplog.clear()
        (engine := run("linear", 12, lr=0.005, weight_decay=0.3)).load(tmp_path, keep=keep)
        assert ([group["lr"] for group in now(engine)] == rates) == (keep == ("lr_scheduler",))
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

    updates(engine := make(0.1))
    engine.save(tmp_path)
    (other := make(0.2)).load(tmp_path, keep=("optimizer_settings",))
    assert [(group["lr"], group["k"]) for group in now(other)] == [(0.2, 4)]


def test_a_schedule_of_another_class_may_go_on(tmp_path):
    saved_run("linear", tmp_path)
    with pytest.raises(InputError, match=r"it was saved with the lr_scheduler .*LinearWarmupLR"):
        run("floor", 12).load(tmp_path)
    engine, expected = run("floor", 12), run("floor", 12)
    engine.load(tmp_path, keep=("lr_scheduler",))
    updates(expected)
    assert now(engine) == now(expected)


@pytest.mark.parametrize(
    ("kind", "keep", "words"),
    [
        ("linear", ("lr_schedule",), r"keep=\('lr_schedule',\): expected a tuple .*did you mean 'lr_scheduler'"),
        ("linear", "lr_scheduler", r"keep='lr_scheduler': expected a tuple"),
        ("plateau", ("lr_scheduler",), r"counts no steps \(ReduceLROnPlateau\); load without it, and change"),
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
