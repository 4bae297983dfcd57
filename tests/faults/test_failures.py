"""One rank raises, is killed, hangs or leaves: the others end within the time limit, and all say which rank it was."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from halfmesh.distributed.env import RankNames
from halfmesh.distributed.failures import FailureWatch
from halfmesh.distributed.local_ranks import free_port
from tests.faults.launches import LIMIT_S, TORCHRUN, UNDER_TORCHRUN, Case, failed_at, run_case, started, write_program

pytestmark = pytest.mark.distributed

LATEST_S = LIMIT_S + 25.0  # some 10 s on an idle machine; torch alone would wait for ever, or not name the rank
MESH = (("tensor", {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}),)
RAISE, KILL, SLEEP = "raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
BLOCKS = "import ctypes; rank == 0 and step == 4 and ctypes.CDLL(None).pause()"  # as in the wait for a stream
SAVES = "step == 4 and rank == 0 and engine.save(sys.argv[1] + '/checkpoint')"
KILLED = "(killed, out of memory, or stopped?)"
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
    "blocks": (  # where nothing is raised, a thread ends the rank
        Case("time.sleep(1); " + RAISE, then=BLOCKS),
        "ended, because another rank failed and this one was still running after 5 s; the first error was of rank 1 at",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Three cases at a time, which mostly wait."""
    folder = tmp_path_factory.mktemp("failures")
    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run_case, case, folder / name) for name, (case, _) in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_whatever_goes_wrong_the_others_end_and_name_the_rank(name, outcomes):
    case, words = CASES[name]
    texts, codes, seconds = outcomes[name].result()
    others = [rank for rank in range(case.ranks) if rank != case.bad]
    # SIGALRM: the shutdown of the interpreter took too long, as it may where many share a core.
    assert {codes[rank] for rank in others} <= {1, -signal.SIGALRM}, texts
    assert seconds < LATEST_S
    for rank in others:
        said = texts[rank].partition(f"[rank {rank}")[2]
        assert words in said, texts[rank]
        assert RAISE not in case.how or ", ValueError: boom\n" in said
        assert name != "blocks" or "This rank is at:" in said


def under_torchrun(case: Case, folder, *options: str) -> str:
    """What is written until all have ended, the agent too, which is soon."""
    script = write_program(case, folder, UNDER_TORCHRUN)
    with started(*TORCHRUN, *options, script) as process:
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


def test_a_config_that_all_ranks_reject_is_shown_in_full_once(tmp_path):
    script, call = tmp_path / "train.py", "halfmesh.initialize(None, None, config={'sed': 1})"
    script.write_text(f"import halfmesh\n{call}\n")
    with started(*TORCHRUN, "--monitor-interval", "3", str(script)) as process:  # torchrun ends none before it has told
        output, _ = process.communicate(timeout=100)
    ranks, _, summary = output.partition("Root Cause")
    assert ranks.count(f"    {call}\n") == 1
    reason = "sed: unknown key; did you mean 'seed'?"
    assert reason in summary
    lines = [line for line in output.splitlines() if line.startswith("[rank 1] ")]
    assert lines == [f"[rank 1] ended at {script}:2, ConfigError: 1 problem in the config: - {reason}"]


EPISODES = """
import torch, halfmesh
from halfmesh.distributed import failures
failures.POLL_S = 0.1
with halfmesh.launch_from_torch({"timeout": 10.0, "parallel": {"data": "fsdp"}}, device="cpu") as run:
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


@pytest.mark.slow
def test_ranks_that_call_the_engine_unequally_often_say_where_they_are_and_how_often(tmp_path):
    """The last evaluation of rank 0 has a call more: before the time limit, and in the errors that it ends with."""
    script = tmp_path / "train.py"
    script.write_text(EPISODES)
    with started(*TORCHRUN, str(script)) as process:
        output, _ = process.communicate(timeout=200)
    before, _, after = output.partition("Traceback (most recent call last)")
    late = "no update for 9 s, 0.9 x the config key timeout; calls of engine(...):"
    assert f"[rank 0] another rank has made {late} 5 since update 2\nThis rank is at:\n" in before
    assert f"[rank 1] {late} 4 since update 2\nThis rank is at:\n" in before
    assert "calls of engine(...): rank 0: 5 since update 2; rank 1: 4 since update 2 (under fsdp" in after


@pytest.mark.promise("a rank that fails or hangs")
@pytest.mark.slow
def test_torchrun_shows_who_hung_and_where(tmp_path):
    """Also with a checkpoint, whose handler of SIGTERM lets a rank that hangs go on."""
    case = Case(SLEEP.replace("time", "signal.signal(signal.SIGTERM, lambda *_: None); time"))
    output = under_torchrun(case, tmp_path)
    assert "still running: rank 1" in output
    assert 'train.py", line' in output.partition("This rank is at:")[2]
    assert "Root Cause" in output


# As NCCL, which connects in init_process_group and waits there without a limit, here in C.
JOINS = """
import ctypes, sys, time
import torch.distributed as dist
import halfmesh

def fail(*args, **kwargs):
    sys.stderr.write(f"fails at {time.monotonic()}\\n")
    raise RuntimeError("boom")

rank = int(sys.argv[1])
dist.init_process_group = fail if rank else lambda *args, **kwargs: ctypes.CDLL(None).pause()
halfmesh.launch({"timeout": 3}, rank, 2, "127.0.0.1", int(sys.argv[2]), device="cpu", verbose=False)
"""


@pytest.mark.slow
def test_a_rank_that_fails_while_the_group_is_made_leaves_no_other_in_its_making(tmp_path):
    (tmp_path / "join.py").write_text(JOINS)
    command = sys.executable, str(tmp_path / "join.py")
    port = str(free_port())
    with started(*command, "0", port) as first, started(*command, "1", port) as second:
        (said, _), ended = first.communicate(timeout=60), time.monotonic()
        error, _ = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (1, 1), said + error
    assert ended < failed_at(error) + LATEST_S
    assert "still running after 5 s; the first error was of rank 1 at " in said


def test_ranks_that_start_again_meet_though_one_ended_before_it_counted():
    """In the same store, as of a launcher that starts the ranks of several machines again."""
    store, names = dist.TCPStore("localhost", 0, is_master=True), RankNames(2)
    FailureWatch(store, 0, names, None, 5.0).remove()  # rank 1 ended before it came here
    watches = [FailureWatch(store, rank, names, None, 5.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(FailureWatch.meet, watches)) == [None, None]
    for watch in watches:
        watch.remove()


FORKED = """
import sys, time
import torch
import torch.multiprocessing as mp
import halfmesh

def train(rank, port):
    halfmesh.launch({"timeout": 30}, rank, 2, "127.0.0.1", port, device="cpu", verbose=False)
    torch.distributed.barrier()
    time.sleep(3 * rank)

if __name__ == "__main__":
    mp.start_processes(train, (int(sys.argv[1]),), 2, start_method="forkserver")
"""


@pytest.mark.slow
def test_a_rank_of_multiprocessing_that_ends_early_without_close_takes_no_other_with_it(tmp_path):
    """Forked ones call nothing that is registered with atexit."""
    (tmp_path / "train.py").write_text(FORKED)
    with started(sys.executable, str(tmp_path / "train.py"), str(free_port())) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
