"""Runs that go on with other settings than they are given are told so; what training moves is none of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from tests.checkpoint.schedules import rates, run, saved_run, told
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import run_ranks

TOLD = {
    "linear": ["total_steps: 6, not 12"],
    "step": ["step_size: 6, not 12", "gamma: 0.166667, not 0.0833333"],
    "milestones": ["milestones: {'1': 1, '6': 1}, not {'1': 1, '12': 1}"],
    "one cycle": ["total_steps: 15, not 21"],
    "sequence": [
        "_milestones: [6], not [12]",
        "_schedulers[0].total_iters: 6, not 12",
        "_schedulers[1].T_max: 7, not 13",
    ],
    "lambda": [f"lr_lambdas[{i}].warmup: 6, not 12" for i in (0, 1)],
    "numpy": [],  # nothing is overwritten
    "plateau": ["patience: 6, not 12"],
    "own": ["final: 0.06, not 0.12"],
}


@pytest.mark.parametrize("kind", TOLD)
def test_each_setting_that_a_load_overwrites_is_told_once(kind, tmp_path, caplog):
    engine = saved_run(kind, tmp_path)
    caplog.clear()
    run(kind, 6).load(tmp_path)
    run(kind, 6).load_state_dict(engine.state_dict())
    assert told(caplog) == []
    lr, decay = (" (now 0.000625)", " (now 0.24)") if kind == "own" else ("", "")
    expected = [f"lr_scheduler {line}" for line in TOLD[kind]]
    expected += [f"optimizer weight_decay: 0.01{decay}, not 0.3"]
    expected += [f"optimizer lr: 0.01{lr}, not 0.005"] * (kind != "one cycle")  # which sets it itself
    for load in (lambda other: other.load(tmp_path), lambda other: other.load_state_dict(engine.state_dict())):
        load(run(kind, 12, lr=0.005, weight_decay=0.3))
        (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        kinds = ("lr_scheduler", "optimizer_settings")
        assert warning.partition("\n")[0].endswith(
            "was saved with other settings, which replace those of this run; to "
            f"keep those of this run, load with keep={kinds}, or set them after the load "
            "(engine.optimizer.param_groups, engine.lr_scheduler):"
        )
        assert sorted(told(caplog)) == sorted(expected)


def test_a_run_that_goes_on_with_the_settings_of_another_is_told_again(tmp_path, caplog):
    """Not of those that it sets after the load. And groups are compared by name, whatever their order."""

    def make(first, second, order=1):
        def optimizer(params):
            groups = {"params": params[:2], "lr": first}, {"params": params[2:], "lr": second}
            return optim.SGD(groups[::order])

        return make_engine("one", "naive", optimizer=optimizer)

    def load(first, second, order=1, folder=tmp_path):
        caplog.clear()
        (engine := make(first, second, order)).load(folder)
        return engine, told(caplog)

    make(0.1, 0.2).save(tmp_path)
    assert load(0.1, 0.2, order=-1)[1] == []
    engine, lines = load(0.1, 0.5, order=-1)
    assert lines == ["optimizer lr: 0.2, not 0.5"]
    engine.save(tmp_path / "later")
    assert load(0.1, 0.5, folder=tmp_path / "later")[1] == lines
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.save(tmp_path / "set")
    assert load(0.1, 0.5, folder=tmp_path / "set")[1] == []
    assert rates(load(0.3, 0.4, folder=tmp_path / "set")[0]) == [0.1, 0.5]


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
    assert told(caplog) == []


def save_on_two(rank, world_size, folder):
    for name, batch in {"larger": {"gradient_accumulation": 3}, "same": {"global_batch_size": 48}}.items():
        make_engine("dp2", "none", batch=16, **batch).save(folder / name)


@pytest.mark.distributed
def test_fewer_samples_in_an_update_on_fewer_data_ranks_are_told_once_with_the_key_that_keeps_them(tmp_path, caplog):
    run_ranks(save_on_two, 2, tmp_path)
    words = (
        "{} was saved by a run on 2 data ranks with 48 samples per update; on 1 data rank an update has 24. "
        "To keep the number, set global_batch_size = 48"
    )
    for batch, is_told in (
        ({"gradient_accumulation": 3}, True),
        ({"global_batch_size": 48}, False),
        ({"gradient_accumulation": 6}, False),
    ):
        for folder in ("larger", "same"):
            caplog.clear()
            make_engine("one", "none", batch=8, **batch).load(tmp_path / folder)
            warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
            assert warnings == [words.format(tmp_path / folder / "step-00000000")] * is_told
