"""One rank raises, is killed, hangs or leaves: the others end within the time limit, and all say which rank it was."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from halfmesh.launch.failures import is_echo, is_timeout
from tests.faults.launches import LIMIT_S, TORCHRUN, UNDER_TORCHRUN, Case, failed_at, run_case, started, write_program

pytestmark = pytest.mark.distributed

LATEST_S = LIMIT_S + 25.0  # some 8 s on an idle machine; torch alone would wait for ever, or not name the rank
MESH = (("tensor", {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}),)
FSDP = (("data", "fsdp"),)
PIPE = (("pipeline", {"size": 2, "microbatches": 2, "partition": ("2",)}),)
RAISE, KILL, SLEEP = "raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(1000)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
WAITED = "waited 3 s (config key timeout) for another rank; "
HANGS = f"{WAITED}not waiting, so likely hanging (or slower than that): rank"
EARLY = "ended without an error while others waited for it (left its loop early, or called engine.close alone?)"
KILLED = "ended without an error of its own (killed, out of memory?)"
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


# --- the default tier: one that raises, one that is killed, one that hangs --------------------------------------------


def test_torchrun_ends_at_once_and_shows_the_first_error_last(tmp_path):
    """An error within `with initialize(...)`. The other rank's, that the connection was lost, comes before it."""
    script = write_program(Case("time.sleep(0.3); " + RAISE), tmp_path, UNDER_TORCHRUN)
    with started(*TORCHRUN, script) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + LATEST_S
    assert process.returncode != 0
    last = output[output.rindex("Traceback (most recent call last)") :]
    assert RAISE in last
    errors = [line.strip() for line in last.splitlines() if "Error" in line and "raise" not in line]
    assert errors == ["ValueError: boom"]


def test_a_rank_that_is_killed_is_named_by_all(tmp_path):
    case = Case(KILL, bad=2, ranks=4, parallel=MESH)
    outcome = run_case(case, tmp_path)
    check(case, outcome, f"rank 2 (dp 1, tp 0) {KILLED}")
    assert outcome.codes[2] == -signal.SIGKILL


def test_a_rank_that_hangs_is_named_by_all(tmp_path):
    case = Case(SLEEP, bad=3, ranks=4, parallel=MESH)
    check(case, run_case(case, tmp_path), f"{HANGS} 3 (dp 1, tp 1)")


# --- further ways, and layouts ----------------------------------------------------------------------------------------

CASES = {  # and what the others say
    "raises": (Case(RAISE, bad=3, ranks=4, parallel=MESH), f"{FIRST} 3 (dp 1, tp 1)] Traceback"),
    "leaves": (Case("return", ranks=3), f"rank 1 {EARLY}"),
    "stopped": (Case(STOP), f"{HANGS} 1"),
    "host_raises": (Case(RAISE, bad=0), f"{FIRST} 0] Traceback"),  # rank 0 hosts the store
    "host_killed": (Case(KILL, bad=0), f"rank 0 {KILLED}"),
    "host_stopped": (Case(STOP, bad=0), f"{WAITED}rank 0 is stopped (SIGSTOP, or a debugger)"),
    "elsewhere": (
        Case("torch.distributed.barrier()", parallel=PIPE),
        # The later one waits 3 s, too, or sees that the connection is gone: which, the machine decides.
        "all ranks do, so they wait in different",
    ),
    "saves_alone": (Case(f"engine.save({PLACE})"), f"{WAITED}{FIRST} 1] Traceback"),
    "saves_alone_tensor": (Case(f"engine.save({PLACE})", parallel=MESH), f"{WAITED}{FIRST} 1 (tp 1)] Traceback"),
    "saves_alone_fsdp": (Case(f"engine.save({PLACE})", parallel=FSDP), f"{WAITED}{FIRST} 1] Traceback"),
    "closes_alone_tensor": (Case("engine.close()", parallel=MESH), f"{WAITED}{FIRST} 1 (tp 1)] Traceback"),
    "closes_alone": (Case("engine.close(); return"), f"rank 1 {EARLY}"),
    "fails_meanwhile": (Case("time.sleep(1); " + RAISE, then=SAVES), f"{FIRST} 1] Traceback"),
    "zero1": (Case(SLEEP, parallel=(("data", "zero1"),)), f"{HANGS} 1"),
    "fsdp": (Case(SLEEP, parallel=(("data", "fsdp"),)), f"{HANGS} 1"),
    "pipeline": (Case(SLEEP, parallel=PIPE), f"{HANGS} 1 (pp 1)"),
    "save": (
        Case(SLEEP, then=SAVES),
        "engine.save was called on rank 0 only; call it on every rank, without an `if` around it: which rank writes is "
        "chosen inside (rank 1 has not within 3 s (config key timeout))",
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


@pytest.mark.slow
@pytest.mark.parametrize("how", [KILL, SLEEP])
def test_the_summary_of_torchrun_names_the_rank(how, tmp_path):
    # It looks less often than by itself, so that on busy machines, too, a rank has found out by then who was killed.
    script = write_program(Case(how), tmp_path, UNDER_TORCHRUN)
    with started(*TORCHRUN, "--monitor-interval", "2", script) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + LATEST_S
    assert process.returncode == 1
    shown, _, root = output.partition("Root Cause")
    if how == KILL:
        assert f"rank 1 {KILLED}" in shown
        assert "rank      : 1 (local_rank: 1)\n" in root
    else:
        assert f"{HANGS} 1\n" in shown
        assert "Where the ranks are:\n" in root
        assert "time.sleep(1000)   <- not waiting\n" in root


BAD_CONFIG = """
import torch, halfmesh
model = torch.nn.Linear(2, 2)
halfmesh.initialize(model, torch.optim.SGD, config=dict(fp16=dict(mode="navie")))
"""


@pytest.mark.slow
def test_a_refusal_before_there_is_a_group_is_in_the_summary_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BAD_CONFIG)
    with started(*TORCHRUN, str(script)) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "did you mean 'naive'" in output.rpartition("Root Cause")[2]


# Each waits for the other within gloo, where Python does not run.
DEADLOCK = """
import os, torch, torch.distributed as dist, halfmesh
run = halfmesh.launch_from_torch({"timeout": 60.0}, device="cpu")
os.write(1, b"ready\\n")
dist.recv(torch.ones(1), 1 - run.rank)
"""


@pytest.mark.slow
def test_ctrl_c_ends_ranks_that_wait_in_a_collective(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DEADLOCK)
    with started(*TORCHRUN, str(script)) as process:
        ready = 0
        while ready < 2:
            line = process.stdout.readline()
            assert line, "ended before both ranks were ready"
            ready += line.count("ready")
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
        assert time.monotonic() - start < 15  # torchrun alone: 31 s
    assert process.returncode != 0
    assert "interrupted while it waited for another rank" in output


@pytest.mark.parametrize(
    ("message", "echo", "timeout"),
    [
        ("[pair.cc:561] Connection closed by peer [127.0.0.1]:86. GLHF!", True, False),
        ("Read error [127.0.0.1]:38284: Connection reset by peer", True, False),
        ("[unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete", False, True),
        ("Application timeout caused pair closure", False, True),
        ("wait timeout after 2000ms, keys: /default_pg/0//9//cpu//0/1", False, True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", False, True),
        ("DataLoader timed out after 5 seconds", False, False),
    ],
)
def test_words_of_torch_that_only_say_that_another_rank_is_gone_or_late(message, echo, timeout):
    """Those of NCCL are never seen here else."""
    assert (is_echo(RuntimeError(message)), is_timeout(RuntimeError(message))) == (echo, timeout)
