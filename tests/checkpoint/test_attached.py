"""engine.attach: state of the loop's own in checkpoints."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.checkpoint_runs import make_engine
from tests.support.models import FEATURES
from tests.support.ranks import run_ranks


class Count:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def make():
    model = nn.Linear(FEATURES, 4)
    return halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu")


def test_state_goes_with_checkpoints(tmp_path):
    engine, count = make(), Count(7)
    engine.attach("count", count)
    engine.save(tmp_path)
    count.value = 8
    engine.load(tmp_path)
    assert count.value == 7
    late, later = make(), Count()
    late.load(tmp_path)
    late.attach("count", later)
    assert later.value == 7


def test_keys_of_any_kind(tmp_path):
    class Seen(Counter):
        def state_dict(self):
            return self

        def load_state_dict(self, state):
            self.update(state)

    engine, seen = make(), Seen({3: 1, "a": 2, (1, 2): 4})
    engine.attach("seen", seen)
    engine.save(tmp_path)
    again, later = make(), Seen()
    again.load(tmp_path)
    again.attach("seen", later)
    assert later == seen


def test_state_that_nobody_takes_is_saved_on(tmp_path):
    engine = make()
    engine.attach("count", Count(7))
    engine.save(tmp_path / "a")
    between = make()
    between.load(tmp_path / "a")
    between.save(tmp_path / "b")
    last, count = make(), Count()
    last.load(tmp_path / "b")
    last.attach("count", count)
    assert count.value == 7


def test_what_was_detached():
    engine, first = make(), Count(7)
    engine.attach("count", first)
    engine.detach("count")
    first.value = 8  # its own again
    count = Count()
    engine.attach("count", count)
    assert count.value == 7
    engine.detach("count", keep=False)
    fresh = Count()
    engine.attach("count", fresh)
    assert fresh.value == 0


def test_state_as_values(caplog):
    engine, count = make(), Count(7)
    before = engine.state_dict()
    engine.attach("count", count)
    state = engine.state_dict()
    count.value = 8
    engine.load_state_dict(state)
    assert count.value == 7
    count.value = 9
    engine.load_state_dict(before)
    assert count.value == 9
    assert "it has no state of 'count' (engine.attach), which stays as it is" in caplog.text
    del before["attached"]  # as it was written by an earlier version
    engine.load_state_dict(before)


def test_mistakes(tmp_path):
    engine = make()
    engine.attach("count", Count())
    with pytest.raises(halfmesh.InputError, match=r"attach\('count', ...\): the name is taken by a Count; give"):
        engine.attach("count", Count())
    with pytest.raises(halfmesh.InputError, match=r"attach\('x', int\): an object with .* has no state_dict"):
        engine.attach("x", 3)
    with pytest.raises(halfmesh.InputError, match=r"detach\('x'\): nothing of that name is attached, only: count"):
        engine.detach("x")
    engine.attach("odd", Count(nn.Linear(1, 1)))
    with pytest.raises(halfmesh.InputError, match=r"the state of 'odd' \(engine.attach\) holds objects that are not"):
        engine.save(tmp_path)


def saved_and_loaded(rank, world_size, folder):
    engine, count = make_engine("dp2", "none"), Count(rank + 5)
    engine.attach("count", count)
    engine.save(folder)
    count.value = 0
    engine.load(folder)
    engine.close()
    other, there = make_engine("tp2", "none"), Count()
    other.load(folder)
    other.attach("count", there)
    other.close()
    return count.value, there.value


@pytest.mark.distributed
def test_each_rank_gets_its_own_back(tmp_path):
    """In another layout that of rank 0."""
    assert run_ranks(saved_and_loaded, 2, str(tmp_path)) == [(5, 5), (6, 5)]
