"""Every contender of a benchmark trains the same, in the precision that it is asked for; and what is counted of it."""

import importlib.util
from functools import partial

import pytest
import torch

from benchmarks.contenders import Setup, make_halfmesh, make_loop
from benchmarks.counts import StorageTracker, count_bytes
from benchmarks.harness import DTYPES, find_difference, make_comparable, warm_up
from benchmarks.peers import make_accelerate, make_fabric
from benchmarks.works import WORKS

make_fused = partial(make_loop, fused=True)
PEERS = {"accelerate": make_accelerate, "lightning_fabric": make_fabric}
PRECISIONS = [("fp32", 0.0, False), ("bf16", 0.0, False), ("fp16", 1.0, False), ("bf16", 1.0, True)]


def mlp(precision="fp32", clip=0.0, **options):
    return Setup.of(WORKS["mlp"], precision, clip, **options)


@pytest.mark.parametrize(("precision", "clip", "masters"), PRECISIONS)
def test_all_do_the_same(precision, clip, masters):
    first, _ = warm_up(make_loop(mlp(precision, clip, masters=masters)), 2)
    peers = [make for name, make in PEERS.items() if importlib.util.find_spec(name) is not None and not masters]
    for make in (make_fused, make_halfmesh, *peers):
        contender = make(mlp(precision, clip, masters=masters))
        loss, dtype = warm_up(contender, 2)
        contender.close()
        assert dtype == DTYPES[precision]
        assert find_difference(first, loss, dtype, precision) == ""


def test_a_peer_that_fails_or_computes_something_else_is_left_out():
    def fail():
        raise ValueError("no such thing\nand more")

    def other():
        return make_loop(mlp(seed=2), "peer")

    makers = [("default loop", lambda: make_loop(mlp())), ("one", fail), ("two", other)]
    contenders, missing = make_comparable(makers, "fp32", 1)
    assert [contender.name for contender in contenders] == ["default loop"]
    assert [row.name for row in missing] == ["one", "two"]
    assert missing[0].missing == "no such thing"
    assert missing[1].missing.startswith("it computes something else")
    with pytest.raises(ValueError, match="no such thing"):
        make_comparable([("default loop", fail)], "fp32", 1)


def test_counted_bytes():
    outside = torch.ones(100)
    with StorageTracker([outside]) as tracker:
        _view = outside[:50]
        kept = torch.zeros(10)
        again = kept.view(2, 5)
        torch.zeros(1000)
        assert tracker.alive == 40
        assert tracker.peak >= 4040
        del kept
        assert tracker.alive == 40
        del again
        assert tracker.alive == 0
    setup = mlp()
    kept, peak = count_bytes(lambda: make_loop(setup), setup)
    # weight, gradient and two moments of 4 bytes; and the step of each of 8 tensors, of 4224 numbers in all
    assert kept == pytest.approx(16 + 8 * 4 / 4224)
    assert peak > kept
