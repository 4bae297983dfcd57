"""Every contender of a benchmark trains the same, in the precision that it is asked for; and what is counted of it."""

import importlib.util

import pytest
import torch

from benchmarks import soak
from benchmarks.contenders import Setup, make_again, make_fused, make_halfmesh, make_loop
from benchmarks.counts import OpCounter, StorageTracker, count_memory, count_ops
from benchmarks.harness import DTYPES, complaint, warm_up
from benchmarks.peers import make_accelerate, make_fabric
from benchmarks.single import close, fair
from benchmarks.works import WORKS

PEERS = {"accelerate": make_accelerate, "lightning_fabric": make_fabric}
PRECISIONS = [("fp32", 0.0), ("bf16", 0.0), ("fp16", 1.0)]


def mlp(precision="fp32", clip=0.0, **options):
    return Setup.of(WORKS["mlp"], precision, clip, **options)


@pytest.mark.parametrize(("precision", "clip"), PRECISIONS)
def test_all_do_the_same(precision, clip):
    first, _ = warm_up(make_loop(mlp(precision, clip)), 2)
    peers = [make for name, make in PEERS.items() if importlib.util.find_spec(name) is not None]
    for make in (make_again, make_fused, make_halfmesh, *peers):
        contender = make(mlp(precision, clip))
        loss, dtype = warm_up(contender, 2)
        close(contender)
        assert dtype == DTYPES[precision]
        assert complaint(first, loss, dtype, precision) == ""


def test_a_peer_that_fails_or_computes_something_else_is_a_line():
    def fail():
        raise ValueError("no such thing\nand more")

    def other():
        return make_loop(mlp(seed=2), "peer")

    contenders, rows = fair([("hand-written loop", lambda: make_loop(mlp())), ("one", fail), ("two", other)], "fp32", 1)
    assert [contender.name for contender in contenders] == ["hand-written loop"]
    assert rows[1].missing == "no such thing"
    assert rows[2].missing.startswith("it computes something else")
    with pytest.raises(ValueError, match="no such thing"):
        fair([("hand-written loop", fail)], "fp32", 1)


def test_host_reads_and_step_counters():
    loop, fused = make_loop(mlp("fp16", 1.0)), make_fused(mlp("fp16", 1.0))
    loop.run(1)
    fused.run(1)
    counted, none = count_ops(loop, 2), count_ops(fused, 2)
    # GradScaler looks at found_inf; the for-loop of AdamW at the step of each of 8 parameters
    assert (counted["host reads"], counted["step counter reads"]) == (1, 8)
    assert (none["host reads"], none["step counter reads"]) == (0, 0)
    assert none["aten ops"] < counted["aten ops"]


def test_counted_operators():
    with OpCounter() as counter:
        x = torch.ones(3)
        (x + x).sum().item()
    assert (counter.ops, counter.reads, counter.counter_reads) == (4, 1, 0)  # ones, add, sum and the read


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
    counted = count_memory(lambda: make_loop(setup), [setup.x, setup.y])
    # weight, gradient and two moments of 4 bytes; and the step of each of 8 tensors, of 4224 numbers in all
    assert counted["bytes kept"] == pytest.approx(16 + 8 * 4 / 4224)
    assert counted["bytes at peak"] > counted["bytes kept"]


# --- the long run ----------------- ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_a_short_soak_holds():
    courses = soak.run(200, 20)
    assert [problem for problem in soak.judge(courses) if "objects" not in problem] == []
    assert [course.skipped for course in courses] == [course.injected for course in courses]
    assert courses[0].skipped > 1
    assert courses[0].last_loss < courses[0].first_loss
    assert "Everything held." in soak.render(courses, 200, {"Python": "3"}, [])


def test_what_grows_is_found():
    def course(growth):
        looks = [soak.Look(step, 5000 + step * growth, 1000, 2, 12) for step in range(1000, 21000, 1000)]
        return soak.Course(looks, save_every=1)

    assert soak.judge([course(0.0)]) == []
    assert soak.judge([course(0.0), course(0.03)]) == ["rank 1: memory grows by 30.0 KiB in 1,000 steps"]
