"""What is allowed of a difference."""

import math

import pytest
import torch

from halfmesh import load_config
from halfmesh.verify.compare import Limits, Measure, Measures
from halfmesh.verify.judge import judge
from halfmesh.verify.layout import gentle
from halfmesh.verify.record import Key, Store

GRADIENT, BEFORE, AFTER = Key(0, 0, "gradient", "w"), Key(-1, 0, "update", "w"), Key(0, 0, "update", "w")


@pytest.fixture
def signs(tmp_path):
    """A step by the signs of gradients, of which the first is all noise."""
    grad = torch.tensor([1e-4] + [1.0, -1.0] * 50)
    store = Store()
    for key, tensor in ((BEFORE, torch.zeros(101)), (GRADIENT, grad), (AFTER, -grad.sign())):
        store.tensor(key, tensor)
    store.write(tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.mark.parametrize(("turned", "is_equal"), [(0, True), (1, True), (2, False)])
def test_of_a_step_by_signs_only_what_is_noise_may_turn(signs, turned, is_equal):
    limits = Limits(1e-3, 1e-3, {GRADIENT: 1e-3})
    measures = Measures(0, {})
    measures.tensors = {GRADIENT: {"": Measure(0.0, 100.0)}, AFTER: {"": Measure(4.0 * turned, 101.0)}}
    assert (judge(signs, [measures], limits, "mean").first is None) == is_equal


@pytest.mark.parametrize(("norms", "what"), [([math.inf, math.inf], None), ([math.inf, 1.0], "norm")])
def test_ranks_agree_about_the_norm_of_an_update_that_overflows(signs, norms, what):
    signs.figures[0, 0, "grad_norm"] = math.nan
    measures = [Measures(rank, {}) for rank in (0, 1)]
    for rank, norm in zip(measures, norms, strict=True):
        rank.figures |= {(0, 0, "lr"): 0.1, (0, 0, "grad_norm"): norm}
    first = judge(signs, measures, Limits(1e-3, 1e-3, {}), "mean", overflows=0, is_complete=False).first
    assert (first and first.what) == what


def test_in_float64_nothing_may_turn(signs):
    measures = Measures(0, {})
    measures.tensors = {GRADIENT: {"": Measure(0.0, 100.0)}, AFTER: {"": Measure(4.0, 101.0)}}
    first = judge(signs, [measures], Limits(1e-9, 1e-7, {}), "mean").first
    assert first is not None
    assert (first.what, first.module) == ("update", "w")


@pytest.mark.parametrize(("mode", "key"), [("torch", "init_scale"), ("naive", "initial_scale")])
def test_the_first_updates_in_fp16_are_no_overflow(mode, key):
    assert getattr(gentle(load_config({"fp16": {"mode": mode}})).precision.options, key) == 2.0**10
