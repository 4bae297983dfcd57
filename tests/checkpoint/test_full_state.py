"""What ranks tell each other of their state: once, and again only where it has changed."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.checkpoint import state
from halfmesh.checkpoint.full_state import find_tensors
from tests.support.checkpoint_runs import Net, make_engine, train
from tests.support.ranks import run_ranks


class Told(nn.BatchNorm1d):
    """With extra state in its state dict, in which a tensor is changed in place."""

    def __init__(self, size):
        super().__init__(size)
        self.told = torch.zeros(3)

    def get_extra_state(self):
        return {"told": self.told}

    def set_extra_state(self, state):
        self.told.copy_(state["told"])


def save_four_times(rank, world_size, folder):
    """By layout, for each save: how often all tensors were described, and the sizes of what this rank gave to gather
    objects; and what comes back. Before the third save there is something new on the last rank, where its layer is; and
    in it one rank was interrupted, of which the other knows nothing."""
    counts, loaded, gather, described, sizes = {}, {}, dist.all_gather_object, [], []

    def counting(received, value, group=None):
        sizes.append(len(pickle.dumps(value)))
        gather(received, value, group=group)

    for layout in ("zero1", "tp2", "pp2"):
        engine, counts[layout], places = make_engine(layout, "none", model=Net(norm=Told)), [], []
        layers = [module for module in engine.model.modules() if isinstance(module, Told)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "find_tensors", lambda *a, **k: described.append(0) or find_tensors(*a, **k))
            patch.setattr(dist, "all_gather_object", counting)
            for number in range(4):
                train(engine, 1)
                for layer in layers:
                    layer.told.add_(7 * (number == 2))
                if number == 3 and rank == 1:
                    engine._state.saved._known.clear()
                described.clear()
                sizes.clear()
                places.append(engine.save(f"{folder}/{layout}"))
                counts[layout].append((len(described), sizes[:]))
        loaded[layout] = []
        for place in places:
            engine.load(place)
            loaded[layout] += [layer.told[0].item() for layer in layers]
        engine.close()
    return counts, loaded


@pytest.mark.distributed
@pytest.mark.sends
def test_a_second_save_compares_digests_only_and_tells_what_is_new(tmp_path):
    for counts, loaded in run_ranks(save_four_times, 2, str(tmp_path)):
        for (first, sizes), *later in counts.values():
            assert first == 1
            for number, (described, sizes_later) in enumerate(later):
                assert described == (number == 2)
                assert len(sizes) - 1 <= len(sizes_later) <= len(sizes) - (number == 0)
                assert sizes_later[0] < 300  # digests
        assert {*map(tuple, loaded.values())} <= {(0, 0, 7, 7), ()}
