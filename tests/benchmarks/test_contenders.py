"""Every contender of one process trains the same, in the precision that it is asked for; and what is counted of it."""

import importlib.util

import pytest
import torch
from torch import nn

from benchmarks.contenders import Setup, make_again, make_fused, make_halfmesh, make_loop
from benchmarks.counts import OpCounter, StorageTracker, count_calls, count_memory, count_ops
from benchmarks.harness import DTYPES, Contender, Unavailable, complaint, warm_up
from benchmarks.naive_tail import MAKERS
from benchmarks.naive_tail import WORK as TAIL
from benchmarks.peers import imported, make_accelerate, make_fabric
from benchmarks.single import close, fair
from benchmarks.works import WORKS, make_transformer

PEERS = {"accelerate": make_accelerate, "lightning_fabric": make_fabric}
PRECISIONS = [("fp32", 0.0), ("bf16", 0.0), ("fp16", 1.0)]


@pytest.fixture(scope="module")
def first_losses():
    """Of the hand-written loop, after 2 steps."""
    setups = {precision: Setup.of(WORKS["mlp"], precision, clip) for precision, clip in PRECISIONS}
    return {precision: warm_up(make_loop(setup), 2)[0] for precision, setup in setups.items()}


@pytest.mark.parametrize(("precision", "clip"), PRECISIONS)
@pytest.mark.parametrize("make", [make_again, make_fused, make_halfmesh, *PEERS.values()])
def test_all_do_the_same(make, precision, clip, first_losses):
    setup = Setup.of(WORKS["mlp"], precision, clip)
    try:
        contender = make(setup)
    except Unavailable as reason:
        pytest.skip(str(reason))
    loss, dtype = warm_up(contender, 2)
    close(contender)
    assert dtype == DTYPES[precision]
    assert complaint(first_losses[precision], loss, dtype, precision) == ""


def test_updates_of_the_tail_agree():
    contenders, rows = fair([(name, lambda make=make: make(small_tail())) for name, make in MAKERS], "fp16", 2)
    assert [row.missing for row in rows] == [""] * len(MAKERS)
    for contender in contenders:
        close(contender)


def small_tail():
    from dataclasses import replace

    return Setup.of(replace(TAIL, build=lambda: make_transformer(depth=1)), "fp16", 1.0)


def test_the_works_are_as_large_as_they_say():
    sizes = {name: sum(p.numel() for p in work.model().parameters()) for name, work in WORKS.items() if name != "vit"}
    assert sizes == {"mlp": 4 * (32 * 32 + 32), "transformer": 867_328}
    tail = list(TAIL.model().parameters())
    assert (len(tail), sum(p.numel() for p in tail)) == (198, 3_246_592)


def test_a_peer_that_fails_is_a_line_and_one_of_ours_is_an_error():
    def fail():
        raise ValueError("no such thing\nand more")

    contenders, rows = fair([("hand-written loop", lambda: make_loop(mlp())), ("peer", fail)], "fp32", 1)
    assert [contender.name for contender in contenders] == ["hand-written loop"]
    assert rows[1].missing == "no such thing"
    with pytest.raises(ValueError, match="no such thing"):
        fair([("hand-written loop", fail)], "fp32", 1)


def test_a_peer_that_computes_something_else_is_not_measured():
    def other():
        return make_loop(Setup.of(WORKS["mlp"], "fp32", seed=2), "peer")

    contenders, rows = fair([("hand-written loop", lambda: make_loop(mlp())), ("peer", other)], "fp32", 1)
    assert len(contenders) == 1
    assert rows[1].missing.startswith("it computes something else")


def test_environment_of_a_peers_import_is_taken_back(tmp_path, monkeypatch):
    (tmp_path / "peer_of_a_test.py").write_text("import os\nos.environ['LEFT_BEHIND'] = '1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("peer_of_a_test").os.environ.get("LEFT_BEHIND") is None
    with pytest.raises(Unavailable, match="not importable: ModuleNotFoundError"):
        imported("no_such_peer")


def mlp(precision="fp32", clip=0.0):
    return Setup.of(WORKS["mlp"], precision, clip)


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
    assert (counter.ops, counter.reads) == (4, 1)  # ones, add, sum and the read
    assert counter.counter_reads == 0


def test_counted_calls():
    def three():
        len(())
        abs(1)

    assert count_calls(Contender("a", three, nn.Identity()), steps=3) == 3


def test_storages_count_until_nobody_holds_them():
    outside = torch.ones(100)
    with StorageTracker([outside]) as tracker:
        view = outside[:50]
        kept = torch.zeros(10)
        again = kept.view(2, 5)
        torch.zeros(1000)
        assert tracker.alive == 40
        assert tracker.peak >= 4040
        del kept
        assert tracker.alive == 40
        del again
        assert tracker.alive == 0
    assert view.shape == (50,)


def test_bytes_of_a_loop():
    setup = mlp()
    counted = count_memory(lambda: make_loop(setup), [setup.x, setup.y])
    # weight, gradient and two moments of 4 bytes; and the step of each of 8 tensors, of 4224 numbers in all
    assert counted["bytes kept"] == pytest.approx(16 + 8 * 4 / 4224)
    assert counted["bytes at peak"] > counted["bytes kept"]


def test_peers_are_looked_for_by_their_names():
    """So that the tests above do not skip them for a misspelt name."""
    for name, make in PEERS.items():
        if importlib.util.find_spec(name) is None:
            with pytest.raises(Unavailable, match=name):
                make(mlp())


def test_what_is_read_once_in_a_while():
    seen = []

    def step():
        seen.append(1)
        if len(seen) == 3:
            torch.ones(()).item()

    counted = count_ops(Contender("a", step, nn.Identity()), 5)
    assert (counted["host reads"], counted["most host reads"]) == (0, 1)
