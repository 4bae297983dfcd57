"""What ranks tell each other of their state: once, and again only where it has changed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.checkpoint import state
from halfmesh.checkpoint.full_state import Box, JoinedParts, Part, find_tensors, stable_bytes
from tests.support.checkpoint_runs import make_engine, train
from tests.support.ranks import run_ranks


def counted(sizes):
    """Sizes of what this rank gives to gather objects, from now on."""
    gather = dist.all_gather_object

    def counting(received, value, group=None):
        sizes.append(len(pickle.dumps(value)))
        gather(received, value, group=group)

    dist.all_gather_object = counting


def save_twice(rank, world_size, folder, layout):
    engine, found, sizes, counts = make_engine(layout, "none"), [], [], []
    train(engine, 1)
    state.find_tensors = lambda *args, **kwargs: found.append(0) or find_tensors(*args, **kwargs)
    counted(sizes)
    for _ in range(3):
        found.clear()
        sizes.clear()
        engine.save(folder)
        counts.append((len(found), sizes[:]))
        train(engine, 1)
    engine.save(folder)
    expected = [shard.param.detach().clone() for shard, _ in engine._state.names()]
    train(engine, 1)
    engine.load(folder)
    same = all(torch.equal(shard.param, old) for (shard, _), old in zip(engine._state.names(), expected, strict=True))
    return counts, same


@pytest.mark.promise("many ranks")
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["zero1", "tp2"])
def test_a_second_save_compares_digests_only(layout, tmp_path):
    for counts, same in run_ranks(save_twice, 2, str(tmp_path), layout, fresh=True):
        (first, sizes), *later = counts
        assert first == 1
        for searches, sizes_later in later:
            assert searches == 0
            assert len(sizes_later) == len(sizes) - 1
            assert sizes_later[0] < 300  # digests
        assert same


def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def describe_parts(rank, world_size):
    """What is joined of two parts, and how many are joined, in several calls; rank 1 is interrupted in the fifth."""
    parts, results, count = JoinedParts(), [], [0]
    context = SimpleNamespace(size=world_size, rank=rank, everyone=everyone, rank_names=None)

    def join(by_rank):
        count[0] += 1
        if len(results) == 4 and rank == 1:
            raise KeyboardInterrupt
        return by_rank

    for first, second in [("a", 0), ("a", 0), ("a", rank), ("a", rank), ("b", rank), ("b", rank), ("b", rank)]:
        count[0] = 0
        values = [Part(value, lambda value: repr(value).encode(), join) for value in (first, second)]
        try:
            found = parts.gather(context, "", lambda values=values: values)
            results.append((found, count[0]))
        except KeyboardInterrupt:
            results.append("interrupted")
    return results


@pytest.mark.distributed
def test_a_part_that_changed_on_any_rank_is_joined_again_on_all():
    results = run_ranks(describe_parts, 2)
    both, one_each = [0, 1], [([0], 0), ([1], 1)]
    expected = [
        ([[(both, "a")], [(both, 0)]], 2),
        ([[(both, "a")], [(both, 0)]], 0),
        ([[(both, "a")], one_each], 1),
        ([[(both, "a")], one_each], 0),
        ([[(both, "b")], one_each], 1),
        ([[(both, "b")], one_each], 1),  # rank 1 has none
        ([[(both, "b")], one_each], 0),
    ]
    assert results[0] == expected
    assert results[1] == [*expected[:4], "interrupted", *expected[5:]]


class _Statistics:
    def __init__(self, scale):
        self.scale = scale


def test_equal_extra_state_gives_equal_digests_and_other_state_others():
    def extras(scale=1.5, dtype=torch.float32, words=("a b", "a b")):
        statistics = _Statistics(torch.full((3,), scale, dtype=dtype))
        return {"x._extra_state": statistics, "y._extra_state": {"words": [" ".join(word.split()) for word in words]}}

    same = stable_bytes(extras())
    assert stable_bytes(extras()) == same
    others = [extras(scale=2.5), extras(dtype=torch.float64), extras(words=("a b", "a c"))]
    assert len({same, *map(stable_bytes, others)}) == 4


@pytest.mark.parametrize("made", [torch.Tensor.to_sparse, lambda x: torch.complex(x, x).conj(), lambda x: x.to("meta")])
def test_extra_state_with_tensors_of_other_kinds_can_be_told_apart(made):
    changed = {"x": made(torch.tensor([0.0, 1.0])), "y": 1}, {"x": made(torch.tensor([0.0, 2.0])), "y": 2}
    assert stable_bytes(changed[0]) != stable_bytes(changed[1])


def test_extra_state_may_refer_to_itself():
    own = [torch.ones(2)]
    own.append(own)
    assert stable_bytes(own)


def test_tensors_are_compared_by_digests():
    """Thousands of step counters: torch.save of them takes several times as long, and as much memory as they have."""
    assert len(stable_bytes([torch.zeros(2**20), nn.Parameter(torch.zeros(2**20))])) < 2**10


def test_replicated_boxes_are_spread_over_the_ranks_that_hold_them():
    shards = {name: ((4,), torch.float32, [((0,), (4,))]) for name in ("a", "b", "c")}
    cut = {"d": ((4,), torch.float32, [((2,), (2,))])}
    held = [([0, 3], shards | {"d": ((4,), torch.float32, [((0,), (2,))])}), ([1, 2], shards | cut)]
    found = find_tensors(held, spread=True)
    assert [found[name].boxes[0].rank for name in "abc"] == [0, 1, 2]
    assert found["d"].boxes == [Box(3, (0,), (2,)), Box(1, (2,), (2,))]
    assert {box.rank for tensor in find_tensors(held, spread=False).values() for box in tensor.boxes} == {0, 1}
