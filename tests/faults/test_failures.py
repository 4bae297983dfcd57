"""One rank raises, is killed, hangs or leaves: the others end within the time limit, and all say which rank it was."""

from __future__ import annotations

import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch.distributed as dist
from torch import nn

from halfmesh.distributed.env import RankNames
from halfmesh.distributed.failures import FailureWatch
from tests.faults.launches import LIMIT_S, TORCHRUN, UNDER_TORCHRUN, Case, failed_at, run_cases, started

pytestmark = pytest.mark.distributed

LATEST_S = LIMIT_S + 25.0  # some 10 s on an idle machine; torch alone would wait for ever, or not name the rank
MESH = (("tensor", {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}),)
RAISE, KILL, SLEEP = "raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
BLOCKS = "import ctypes; rank == 0 and step == 4 and ctypes.CDLL(None).pause()"  # as in the wait for a stream
SAVES = "step == 4 and rank == 0 and engine.save(sys.argv[1] + '/checkpoint')"
KILLED = "(killed, out of memory, or stopped?)"
# As NCCL, which connects in init_process_group and waits there without a limit, here in C.
JOINS = f"""
import ctypes, os, time
import torch.distributed as dist

def fail(*args, **kwargs):
    os.write(1, b"fails at %f\\n" % time.monotonic())
    {RAISE}

dist.init_process_group = fail if rank else lambda *args, **kwargs: ctypes.CDLL(None).pause()
"""
# The last evaluation of rank 0 has a call more.
EPISODES = """
import torch
with launched as run:
    engine = halfmesh.initialize(torch.nn.Linear(2, 2), torch.optim.SGD, config=run)
    for episode in range(3):
        engine.eval()
        for _ in range(4 + (episode == 2 and run.rank == 0)):
            engine(torch.ones(1, 2))
        if episode == 2 and run.rank == 0:
            torch.distributed.all_reduce(torch.ones(1))
        engine.train()
        if episode == 2:
            torch.distributed.barrier()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
"""
# Ranks of multiprocessing call nothing that is registered with atexit.
ENDS = """
import multiprocessing.util, os, time, torch
torch.distributed.barrier()
time.sleep(1.5 * rank)
multiprocessing.util._exit_function()
os._exit(0)
"""
POLLS = "from halfmesh.distributed import failures\nfailures.POLL_S = 0.1\n"
STILL = "ended, because another rank failed and this one was still running after 5 s; the first error was of rank 1 at"
CASES = {  # and what the others say
    "killed": (Case(KILL, bad=2, ranks=4, parallel=MESH), f"no answer from rank 2 (dp 1, tp 0) {KILLED}"),
    "hangs": (Case(SLEEP, bad=3, ranks=4, parallel=MESH), "still running: rank 3 (dp 1, tp 1)"),
    "raises": (Case(RAISE, bad=3, ranks=4, parallel=MESH), "the first error was of rank 3 (dp 1, tp 1) at "),
    "leaves": (Case("return", ranks=3), "ended without an error: rank 1"),
    "stopped": (Case(STOP), f"no answer from rank 1 {KILLED}"),
    "host_raises": (Case(RAISE, bad=0), "the first error was of rank 0 at "),  # rank 0 hosts the store
    "host_killed": (Case(KILL, bad=0), "no answer from rank 0, which hosts the store"),
    "saves": (
        Case(SLEEP, then=SAVES),
        "engine.save was called on rank 0 only; call it on every rank, without an `if` around it: halfmesh "
        "chooses which rank writes (rank 1 did not within 3 s (config key timeout))",
    ),
    # Where nothing is raised, a thread ends the rank.
    "blocks": (Case("time.sleep(1); " + RAISE, then=BLOCKS), STILL),
    "joins": (Case(first=JOINS), STILL),
    "calls": (
        Case(bad=-1, first=POLLS, train=EPISODES, parallel=(("data", "fsdp"),), timeout=10.0),
        "calls of engine(...): rank 0: 5 since update 2; rank 1: 4 since update 2 (under fsdp",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    cases = {name: case for name, (case, _) in CASES.items()} | {"ends": Case(bad=-1, train=ENDS, timeout=30.0)}
    return run_cases(cases, tmp_path_factory.mktemp("failures"))


@pytest.mark.promise("a rank that fails or hangs")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_whatever_goes_wrong_the_others_end_and_name_the_rank(name, outcomes):
    case, words = CASES[name]
    texts, codes, seconds = outcomes[name]
    others = [rank for rank in range(case.ranks) if rank != case.bad]
    # SIGALRM: the shutdown of the interpreter took too long, as it may where many share a core.
    assert {codes[rank] for rank in others} <= {1, -signal.SIGALRM}, texts
    assert seconds < LATEST_S
    for rank in others:
        said = texts[rank].partition(f"[rank {rank}")[2]
        assert words in said, texts[rank]
        assert RAISE not in case.how + case.first or ", ValueError: boom\n" in said
        assert name != "blocks" or "This rank is at:" in said
    if name == "calls":  # before the time limit, too
        first, second = (text.partition("Traceback (most recent call last)")[0] for text in texts)
        late = "no update for 9 s, 0.9 x the config key timeout; calls of engine(...):"
        assert f"[rank 0] another rank has made {late} 5 since update 2\nThis rank is at:\n" in first
        assert f"[rank 1] {late} 4 since update 2\nThis rank is at:\n" in second


def under_torchrun(case: Case, folder, *options: str) -> str:
    """What is written until all have ended, the agent too, which is soon."""
    with started(*TORCHRUN, *options, case.write(folder, UNDER_TORCHRUN)) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + LATEST_S
    assert process.returncode == 1
    return output


def test_torchrun_ends_at_once_and_shows_the_first_error_last(tmp_path):
    """The other rank's, that the connection was lost, comes before it, as a line. The agent looks less often than by
    itself: of errors that it finds together it may show any."""
    output = under_torchrun(Case("time.sleep(0.3); " + RAISE), tmp_path, "--monitor-interval", "2")
    last = output[output.rindex("Traceback (most recent call last)") :]
    errors = [line.strip() for line in last.splitlines() if "Error" in line and "raise" not in line]
    assert errors == ["ValueError: boom"]
    ended, told = (line for line in output.splitlines() if line.startswith("[rank 0] ") and "Error" in line)
    assert "train.py:" in ended
    assert told.startswith("[rank 0] the first error was of rank 1 at ")
    assert told.endswith(", ValueError: boom")
    assert "[rank0]: Traceback" not in output


@pytest.mark.slow
def test_torchrun_shows_who_hung_and_where(tmp_path):
    """Also with a checkpoint, whose handler of SIGTERM lets a rank that hangs go on."""
    case = Case(SLEEP.replace("time", "signal.signal(signal.SIGTERM, lambda *_: None); time"))
    output = under_torchrun(case, tmp_path)
    assert "still running: rank 1" in output
    assert 'train.py", line' in output.partition("This rank is at:")[2]
    assert "Root Cause" in output


def test_ranks_that_start_again_meet_though_one_ended_before_it_counted():
    """In the same store, as of a launcher that starts the ranks of several machines again."""
    store, names = dist.TCPStore("localhost", 0, is_master=True), RankNames(2)
    FailureWatch(store, 0, names, None, 5.0).remove()  # rank 1 ended before it came here
    watches = [FailureWatch(store, rank, names, None, 5.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(FailureWatch.meet, watches)) == [None, None]
    seen, freed, engine = Event(), Event(), nn.Module()
    engine.model = nn.Module()
    watches[0].watch(engine, type("Progress", (), {"calls": 0, "global_step": property(lambda _: seen.set())})())
    assert seen.wait(LIMIT_S)
    weakref.finalize(engine, freed.set)
    del engine
    assert freed.wait(LIMIT_S), "a watch does not keep an engine"
    for watch in watches:
        watch.remove()


@pytest.mark.slow
def test_a_rank_of_multiprocessing_that_ends_early_without_close_takes_no_other_with_it(outcomes):
    assert outcomes["ends"][1] == [0, 0], outcomes["ends"][0]
