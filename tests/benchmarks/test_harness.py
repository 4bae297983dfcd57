"""The arithmetic of a measurement, without measuring."""

import math

import pytest
import torch
from torch import nn

from benchmarks.harness import (
    LOOP,
    Contender,
    Quartiles,
    Result,
    Row,
    complaint,
    load,
    rotated,
    take_turns,
    time_block,
    warm_up,
)


def contender(name, step=lambda: None, **options):
    return Contender(name, step, options.pop("model", nn.Linear(2, 2)), **options)


def result(**options):
    rows = [Row("first", [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]), Row("other", [0.5, 3.0, 1.0], [2.0, 3.0, 4.0])]
    return Result("work", "a work", "fp32", [*rows, Row("absent", missing="not installed")], **options)


def test_quartiles():
    assert Quartiles.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Quartiles(3.0, 2.0, 4.0)
    assert Quartiles.of([2.0]) == Quartiles(2.0, 2.0, 2.0)
    assert str(Quartiles(1.0, 0.98765, 1.5)) == "1.000 [0.988, 1.500]"


def test_ratios_are_of_the_same_round():
    # 0.5, 1.5 and 0.25: not the ratio of the medians, which is 0.5
    assert result().ratios("other") == Quartiles(0.5, 0.375, 1.0)
    assert result().ratios("first", of="other") == Quartiles(2.0, 4 / 3, 3.0)
    assert result().ratios("other", clock="cpu") == Quartiles(3.0, 2.5, 3.5)
    assert result().ratios("absent") is None
    assert result().ratios("nobody") is None


def test_a_clock_that_has_not_ticked_gives_no_number():
    rows = [Row("first", [0.0], [0.0]), Row("other", [1.0], [0.0])]
    assert math.isnan(Result("work", "", "fp32", rows).ratios("other").median)


def test_everyone_is_first_second_and_last_equally_often():
    orders = [rotated(3, number) for number in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert rotated(3, 3) == orders[0]


def test_turns():
    log = []
    contenders = [contender(name, lambda name=name: log.append(name)) for name in "abc"]
    rows = take_turns(contenders, rounds=2, steps=2)
    assert "".join(log) == "aabbcc" + "bbccaa"
    assert [(row.name, len(row.wall), len(row.cpu)) for row in rows] == [(name, 2, 2) for name in "abc"]


def test_what_comes_before_a_step_is_not_timed(monkeypatch):
    now = [0.0]

    def take(seconds):
        now[0] += seconds

    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.harness.time.process_time", lambda: now[0])
    assert time_block(contender("a", lambda: take(3.0), before=lambda: take(50.0)), steps=2) == (3.0, 3.0)
    assert time_block(contender("a", lambda: take(3.0)), steps=2) == (3.0, 3.0)


def test_warm_up_tells_loss_and_dtype_and_leaves_no_hook():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)

    def step():
        return model(torch.ones(1, 2, dtype=torch.bfloat16)).sum() * 0 + 7

    assert warm_up(contender("a", step, model=model), 2) == (7.0, "bfloat16")
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("loss", "dtype", "said"),
    [
        (1.0, "float16", ""),
        (1.1, "float16", "it computes something else: a loss of 1.1 after warm-up, and 1 by the first row"),
        (math.nan, "float16", "it computes something else: a loss of nan after warm-up, and 1 by the first row"),
        (1.0, "bfloat16", "it computes in bfloat16, not in float16"),
        (1.0, "", "it computes in no Linear at all, not in float16"),
    ],
)
def test_who_computes_something_else_is_told(loss, dtype, said):
    assert complaint(1.0, loss, dtype, "fp16") == said


def test_saved_and_loaded(tmp_path):
    before = result(clip=1.0, notes=["a note"])
    assert before.save(tmp_path).name == "work_fp32_clip.json"
    assert load(tmp_path) == [before]


def test_a_row_that_was_not_measured_is_no_row():
    assert result().row("absent") is None
    assert result().row("other").wall == [0.5, 3.0, 1.0]
    assert LOOP == "hand-written loop"  # reports that were saved name it
