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
HANGS = "still running: rank"
EARLY = "ended without an error: rank"
KILLED = "(killed, out of memory, or stopped?)"
PLACE = "sys.argv[1] + '/checkpoint'"
SAVES = f"step == 4 and rank == 0 and engine.save({PLACE})"
FIRST = "the first error was:\n[rank"


def check(case: Case, outcome, words: str) -> None:
    """All ranks but the bad one end soon, with an error that has `words`."""
    others = [rank for rank in range(case.ranks) if rank != case.bad]
    # SIGALRM: the shutdown of the interpreter took too long, as it may where many share a core.
    assert {outcome.codes[rank] for rank in others} <= {1, -signal.SIGALRM}, outcome.said
    assert outcome.seconds < LATEST_S
    for rank in others:
        assert words in outcome.said[rank].partition(f"[rank {rank}")[2], outcome.said[rank]


# --- one that raises, one that is killed, one that hangs --------------------------------------------------------------


def under_torchrun(case: Case, folder, *options: str) -> str:
    """What is written until all have ended, the agent too, which is soon."""
    script = write_program(case, folder, UNDER_TORCHRUN)
    with started(*TORCHRUN, *options, script) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + LATEST_S
    assert process.returncode == 1
    return output


def test_torchrun_ends_at_once_and_shows_the_first_error_last(tmp_path):
    """An error within `with initialize(...)`. The other rank's, that the connection was lost, comes before it.

    The agent looks less often than by itself: of errors that it finds together, within a second, it may show any.
    """
    output = under_torchrun(Case("time.sleep(0.3); " + RAISE), tmp_path, "--monitor-interval", "2")
    last = output[output.rindex("Traceback (most recent call last)") :]
    assert RAISE in last
    errors = [line.strip() for line in last.splitlines() if "Error" in line and "raise" not in line]
    assert errors == ["ValueError: boom"]
    # Of the rank that only lost the other one, each is a line: where it was, and the first error.
    ended, told = (line for line in output.splitlines() if line.startswith("[rank 0] ") and "Error" in line)
    assert "train.py:" in ended
    assert told == "[rank 0] the first error was rank 1's: ValueError: boom"
    assert "[rank0]: Traceback" not in output


def test_a_config_that_all_ranks_reject_is_shown_in_full_once(tmp_path):
    script = tmp_path / "train.py"
    call = "halfmesh.initialize(None, None, config={'sed': 1})"
    script.write_text(f"import halfmesh\n{call}\n")
    with started(*TORCHRUN, "--monitor-interval", "3", str(script)) as process:  # torchrun ends none before it has told
        output, _ = process.communicate(timeout=100)
    ranks, _, summary = output.partition("Root Cause")
    assert ranks.count(f"    {call}\n") == 1
    assert "sed: unknown key; did you mean 'seed'?" in summary
    assert "recorded_for_torchrun" not in output
    lines = [line for line in output.splitlines() if line.startswith("[rank 1] ")]
    reason = "ConfigError: 1 problem in the config: - sed: unknown key; did you mean 'seed'?"
    assert lines == [f"[rank 1] ended at {script}:2, {reason}"]


def test_torchrun_shows_who_was_killed(tmp_path):
    _, _, root = under_torchrun(Case(KILL), tmp_path).partition("Root Cause")
    assert "rank      : 1 (local_rank: 1)\n" in root
    assert "SIGKILL" in root


@pytest.mark.promise("a rank that fails or hangs")
@pytest.mark.slow
def test_torchrun_shows_who_hung_and_where(tmp_path):
    """Also with a checkpoint, whose handler of SIGTERM lets a rank that hangs go on."""
    case = Case(SLEEP.replace("time", "signal.signal(signal.SIGTERM, lambda *_: None); time"))
    output = under_torchrun(case, tmp_path)
    assert f"{HANGS} 1" in output
    stacks = output.partition("This rank is at:")[2]
    assert 'train.py", line' in stacks
    assert "Root Cause" in output


@pytest.mark.slow
def test_a_rank_that_waits_for_its_device_is_ended_by_a_thread(tmp_path):
    """Rank 0 blocks in C, where nothing is raised, when rank 1 fails: as in the synchronisation of a stream."""
    blocks = "rank == 0 and step == 4 and ctypes.CDLL(None).pause()"
    case = Case("time.sleep(1); " + RAISE, then=f"import ctypes; {blocks}")
    outcome = run_case(case, tmp_path)
    check(
        case,
        outcome,
        "ended, because another rank failed and this one was still running after 5 s; the first error was:\n",
    )
    assert "[rank 1] Traceback" in outcome.said[0]
    assert "ValueError: boom" in outcome.said[0]
    assert "This rank is at:" in outcome.said[0]


def test_a_rank_that_is_killed_is_named_by_all(tmp_path):
    case = Case(KILL, bad=2, ranks=4, parallel=MESH)
    outcome = run_case(case, tmp_path)
    check(case, outcome, f"no answer from rank 2 (dp 1, tp 0) {KILLED}")
    assert outcome.codes[2] == -signal.SIGKILL


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_all(tmp_path):
    """And ended, which no launcher does here."""
    case = Case(SLEEP, bad=3, ranks=4, parallel=MESH)
    outcome = run_case(case, tmp_path)
    check(case, outcome, f"{HANGS} 3 (dp 1, tp 1)")


# --- further ways, and layouts ----------------------------------------------------------------------------------------

CASES = {  # and what the others say
    "raises": (Case(RAISE, bad=3, ranks=4, parallel=MESH), f"{FIRST} 3 (dp 1, tp 1)] Traceback"),
    "leaves": (Case("return", ranks=3), f"{EARLY} 1"),
    "stopped": (Case(STOP), f"no answer from rank 1 {KILLED}"),
    "host_raises": (Case(RAISE, bad=0), f"{FIRST} 0] Traceback"),  # rank 0 hosts the store
    "host_killed": (Case(KILL, bad=0), "no answer from rank 0, which hosts the store"),
    "saves_alone": (Case(f"engine.save({PLACE})"), f"{FIRST} 1] Traceback"),
    "closes_alone": (Case("engine.close(); return"), f"{EARLY} 1"),
    "fails_meanwhile": (Case("time.sleep(1); " + RAISE, then=SAVES), f"{FIRST} 1] Traceback"),
    "fsdp": (Case(SLEEP, parallel=(("data", "fsdp"),)), f"{HANGS} 1"),
    "save": (
        Case(SLEEP, then=SAVES),
        "engine.save was called on rank 0 only; call it on every rank, without an `if` around it: halfmesh "
        "chooses which rank writes (rank 1 did not within 3 s (config key timeout))",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Two cases at a time, which mostly wait."""
    folder = tmp_path_factory.mktemp("failures")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run_case, case, folder / name) for name, (case, _) in CASES.items()}


# As NCCL, which connects in init_process_group and waits there without a limit, here in C.
JOINS = """
import ctypes, os, sys, time
import torch.distributed as dist
import halfmesh
from halfmesh.distributed import failures, process_group

def fail(*args, **kwargs):
    sys.stderr.write(f"fails at {time.monotonic()}\\n")
    raise RuntimeError("boom")

rank = int(sys.argv[1])
dist.init_process_group = fail if rank == 1 else lambda *args, **kwargs: ctypes.CDLL(None).pause()
if rank == 1 and sys.argv[3] == "before":
    process_group.FailureWatch = fail
hook = sys.excepthook
try:
    halfmesh.launch({"timeout": 3}, rank, 2, "127.0.0.1", int(sys.argv[2]), device="cpu", verbose=False)
finally:
    print("with its own hook" if sys.excepthook == hook else "with a hook")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("joining", f"still running after 5 s; {FIRST} 1] Traceback"),
        ("before", "rank 0 of 2 could not join the gloo process group"),
    ],
)
def test_a_rank_that_fails_before_there_is_a_group_leaves_no_other_in_its_making(when, words, tmp_path):
    (tmp_path / "join.py").write_text(JOINS)
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:

        def run(rank: int) -> tuple[int, str, float]:
            with started(sys.executable, str(tmp_path / "join.py"), str(rank), port, when) as process:
                output, _ = process.communicate(timeout=60)
            return process.returncode, output, time.monotonic()

        (code, said, ended), (bad_code, error, _) = pool.map(run, range(2))
    assert (code, bad_code) == (1, 1), said + error
    assert ended < failed_at(error) + LATEST_S
    assert words in said
    assert error.count("RuntimeError: boom") >= 1
    assert "with its own hook" in error
    if when == "joining":
        assert "RuntimeError: boom" in said
        assert "this was the first error" in error


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
from torch import nn

def train(rank, port):
    halfmesh.launch({"timeout": 30}, rank, 2, "127.0.0.1", port, device="cpu", verbose=False)
    model = nn.Linear(2, 2)
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"timeout": 30})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    if rank == 1:
        time.sleep(3)
        print("rank 1 has done its work", flush=True)

if __name__ == "__main__":
    mp.start_processes(train, (int(sys.argv[1]),), 2, start_method="forkserver")
"""


@pytest.mark.slow
def test_a_rank_of_multiprocessing_that_ends_early_without_close_takes_no_other_with_it(tmp_path):
    """Forked ones call nothing that is registered with atexit."""
    (tmp_path / "train.py").write_text(FORKED)
    with started(sys.executable, str(tmp_path / "train.py"), str(free_port())) as process:
        output, _ = process.communicate(timeout=200)
    assert (process.returncode, "rank 1 has done its work" in output) == (0, True), output


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_whatever_goes_wrong_the_others_name_the_rank(name, outcomes):
    case, words = CASES[name]
    outcome = outcomes[name].result()
    check(case, outcome, words)
    if case.how == RAISE:
        others = [said for rank, said in enumerate(outcome.said) if rank != case.bad]
        assert all(said.rstrip().endswith("ValueError: boom") for said in others)
    if "_alone_" in name:
        assert outcome.codes[1] in (1, -signal.SIGALRM), "not SIGABRT, by gloo"
        call = case.how.partition("(")[0]
        assert all(f"InputError: {call} was called on rank 1 only; call it on every rank" in s for s in outcome.said)
    if name == "raises":
        assert outcome.said[3].rstrip().endswith("raised on rank 3 (dp 1, tp 1)")


BAD_CONFIG = """
import torch, halfmesh
model = torch.nn.Linear(2, 2)
halfmesh.initialize(model, torch.optim.SGD, config=dict(fp16=dict(mode="navie")))
"""


@pytest.mark.slow
def test_a_rejection_before_there_is_a_group_is_in_the_summary_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BAD_CONFIG)
    with started(*TORCHRUN, str(script)) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "did you mean 'naive'" in output.rpartition("Root Cause")[2]


EPISODES = """
import sys, time, torch, halfmesh
from halfmesh.distributed import failures
failures.POLL_S = 0.1
with halfmesh.launch_from_torch({"timeout": 10.0, "parallel": {"data": "fsdp"}}, device="cpu") as run:
    model = torch.nn.Linear(2, 2)
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), 0.1), config=run)
    for episode in range(3):
        steps = 4 + (episode == 2 and run.rank == 0)
        loss = sum(engine(torch.ones(1, 2)).sum() for _ in range(steps))
        if episode == 2 and run.rank == 1:
            torch.distributed.barrier()
        engine.backward(loss)
        engine.step()
"""


@pytest.mark.slow
def test_ranks_that_call_the_engine_unequally_often_say_where_they_are_and_how_often(tmp_path):
    """An episode of rank 0 has a call more: before the time limit, and in the errors that it ends with."""
    script = tmp_path / "train.py"
    script.write_text(EPISODES)
    with started(*TORCHRUN, str(script)) as process:
        output, _ = process.communicate(timeout=200)
    before, _, after = output.partition("Traceback (most recent call last)")
    for rank in range(2):
        counts = f"[rank {rank}] calls of engine(...): rank 0: 5 since update 2; rank 1: 4 since update 2 (under fsdp"
        assert f"[rank {rank}] no update for 9 s, 0.9 x the config key timeout\nThis rank is at:\n" in before
        assert counts in before
        assert counts in after
