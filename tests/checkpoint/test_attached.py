"""engine.attach: state of the loop's own that goes with checkpoints."""

from __future__ import annotations

import pytest
from torch import nn, optim

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import run_ranks


class Count:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def small():
    model = nn.Linear(8, 4)
    return halfmesh.initialize(model, optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu")


def test_attached_state_goes_with_checkpoints_even_if_nobody_takes_it(tmp_path):
    engine, count, best = small(), Count(7), {"accuracy": 0.5}
    engine.attach("count", count)
    engine.attach("best", best)
    engine.save(tmp_path / "a")
    state = engine.state_dict()
    for load in (lambda: engine.load(tmp_path / "a"), lambda: engine.load_state_dict(state)):
        count.value, best["accuracy"] = 8, 0.6
        load()
        assert (count.value, best) == (7, {"accuracy": 0.5})  # a dict is updated in place
    between = small()
    between.load(tmp_path / "a")
    between.save(tmp_path / "b")
    last, late = small(), Count()
    last.load(tmp_path / "b")
    last.attach("count", late)
    assert late.value == 7
    last.detach("count")
    late.value = 8  # its own again
    last.attach("count", kept := Count())
    assert kept.value == 7
    last.detach("count", keep=False)
    last.attach("count", fresh := Count())
    assert fresh.value == 0


def test_attached_state_that_cannot_be_saved_or_found_is_rejected(tmp_path):
    engine = small()
    engine.attach("odd", Count(nn.Linear(1, 1)))
    with pytest.raises(InputError, match=r"attach\('odd', ...\): the name is taken"):
        engine.attach("odd", Count())
    with pytest.raises(InputError, match=r"torch.nn.modules.linear.Linear in the state of .*, attached: loading it"):
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
def test_each_rank_gets_its_own_attached_state_back_and_in_another_layout_that_of_rank_0(tmp_path):
    assert run_ranks(saved_and_loaded, 2, str(tmp_path)) == [(5, 5), (6, 5)]
