"""engine.attach: state of the loop's own that goes with checkpoints."""

from __future__ import annotations

import pytest
from torch import nn, optim

import halfmesh
from halfmesh.errors import InputError
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


def small():
    model = nn.Linear(FEATURES, 4)
    return halfmesh.initialize(model, optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu")


def test_attached_state_goes_with_checkpoints_even_if_nobody_takes_it(tmp_path):
    engine, count, best = small(), Count(7), {"accuracy": 0.5}
    engine.attach("count", count)
    engine.attach("best", best)
    engine.save(tmp_path / "a")
    count.value, best["accuracy"] = 8, 0.6
    engine.load(tmp_path / "a")
    assert (count.value, best) == (7, {"accuracy": 0.5})  # a dict is updated in place
    between = small()
    between.load(tmp_path / "a")
    between.save(tmp_path / "b")
    last, late, late_best = small(), Count(), {"accuracy": 0.0}
    last.load(tmp_path / "b")
    last.attach("count", late)
    last.attach("best", late_best)
    assert (late.value, late_best) == (7, best)
    last.detach("count")
    late.value = 8  # its own again
    last.attach("count", kept := Count())
    assert kept.value == 7
    last.detach("count", keep=False)
    last.attach("count", fresh := Count())
    assert fresh.value == 0


def test_attached_state_goes_with_the_state_dict():
    engine, other, there = small(), small(), Count()
    engine.attach("count", Count(7))
    other.attach("count", there)
    other.load_state_dict(engine.state_dict())
    assert there.value == 7


def test_attached_state_that_cannot_be_saved_or_found_is_rejected(tmp_path):
    engine = small()
    engine.attach("odd", Count(nn.Linear(1, 1)))
    with pytest.raises(InputError, match=r"attach\('odd', ...\): the name is taken"):
        engine.attach("odd", Count())
    with pytest.raises(
        InputError, match=r"torch.nn.modules.linear.Linear in the state of .*, attached cannot be saved"
    ):
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
def test_each_rank_gets_its_own_attached_state_back(tmp_path):
    """In another layout that of rank 0."""
    assert run_ranks(saved_and_loaded, 2, str(tmp_path)) == [(5, 5), (6, 5)]
