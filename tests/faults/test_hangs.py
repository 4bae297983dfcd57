"""Ranks that wait in vain: they end within the time limit, and all say which rank is where."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.test_launch_failures import failed_at, started
from tests.support.ranks import free_port

pytestmark = pytest.mark.distributed

LIMIT_S = 3.0  # the config's timeout
LATEST_S = LIMIT_S + 25.0  # some 8 s on an idle machine
# One import of torch for all ranks, each a fork. What hangs is killed when the others have ended.
FORKS = """
import json, os, signal, sys, time
import torch, torch.distributed, halfmesh.launching, halfmesh.config.load
from torch.distributed import pipelining, fsdp
folder, port, bad, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ranks = {}
for rank in range(count):
    process = os.fork()
    if process == 0:
        output = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        break
    ranks[process] = rank
else:
    codes, ended = {}, {}
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        if list(ranks.values()) == [bad]:
            os.kill(*ranks, signal.SIGKILL)
    json.dump([codes, ended], sys.stdout)
    os._exit(0)
"""
TRAIN = """
import halfmesh
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
run = halfmesh.launching.launch(CONFIG, rank, count, "127.0.0.1", port, device="cpu", verbose=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def fails():
    os.write(1, b"fails at %f\\n" % time.monotonic())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if STUCK and rank == bad and index >= 100:
            fails()
            time.sleep(1000)
        return torch.ones(4), 0

optimizer = torch.optim.SGD(model.parameters(), 0.1)
engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, DataLoader(Data(), 4), run)

def my_batches():
    for step in range(10**6):
        if step == 5 and rank == bad:
            fails()
            HOW
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)

def main(batches):
    for x, y in batches:
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        THEN

main(engine.dataloader if STUCK else my_batches())
"""
PIPE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("2",)}}


def run(folder, ranks, bad, how="pass", parallel=None, stuck=False, then="pass"):
    """What each rank has written, without the one that is `bad`, of which the end is checked."""
    config = {"timeout": LIMIT_S, "parallel": parallel or {}}
    text = f"CONFIG = {config!r}\nSTUCK = {stuck}\n{FORKS}{TRAIN.replace('HOW', how).replace('THEN', then)}"
    (folder / "out").mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(text)
    with started(sys.executable, str(script), str(folder / "out"), str(free_port()), str(bad), str(ranks)) as process:
        codes, ended = json.loads(process.communicate(timeout=100)[0])
    outputs = [(folder / "out" / str(rank)).read_text() for rank in range(ranks)]
    others = [rank for rank in range(ranks) if rank != bad]
    assert {codes[str(rank)] for rank in others} <= {1, -signal.SIGALRM}, outputs
    assert max(ended[str(rank)] for rank in others) < failed_at(outputs[bad]) + LATEST_S
    return [outputs[rank].partition(f"[rank {rank}")[2] for rank in others]


def has(output, *lines):
    """All of `lines` are there, in this order."""
    rest = output
    for line in lines:
        assert line in rest, output
        rest = rest.partition(line)[2]


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"
SLEEPS = "time.sleep(1000)"
SAVE = "if rank != bad and engine.global_step == 5: engine.save(folder)"
# The thread of one rank sleeps; its loop goes on.
SAVE_BESIDE = """if engine.global_step == 5:
            import halfmesh.engine.checkpointing.saving as saving
            if rank == bad:
                fails()
                saving.write = lambda *args: time.sleep(1000)
            engine.save(folder, in_background=True)"""
CASES = {  # arguments of `run`
    "sleeps": (3, 1, SLEEPS),
    "stopped": (2, 1, STOPS),
    "host stopped": (2, 0, STOPS),
    "ends": (3, 1, "return"),
    "elsewhere": (2, 1, "engine.save(folder)"),
    "ahead": (2, 1, "engine.global_step += 1; time.sleep(1000)"),
    "loader": (2, 1, "", PIPE, True),
    "fsdp": (2, 1, SLEEPS, {"data": "fsdp"}),
    "zero1": (2, 1, SLEEPS, {"data": "zero1"}),
    "pipeline": (2, 1, SLEEPS, PIPE),
    "save": (2, 1, SLEEPS, {}, False, SAVE),
    "save beside": (2, 1, "", {}, False, SAVE_BESIDE),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the other ranks said in each case; three cases at a time, which mostly wait."""
    folder = tmp_path_factory.mktemp("hangs")
    with ThreadPoolExecutor(3) as pool:
        running = {name: pool.submit(run, folder / name.replace(" ", "_"), *case) for name, case in CASES.items()}
        yield lambda name: running[name].result()


TITLE = "\nWhere the ranks are:\n"
BACKWARD = "waiting, in engine.backward(), after update 5 - "


def test_one_sleeps_in_code_of_the_users(told):
    for output in told("sleeps"):
        has(output, "waited 3 s (config key timeout) for another rank; not waiting, so likely hanging", "rank 1", TITLE)
        has(output, f"{TITLE}  ranks 0, 2: {BACKWARD}", " in main: engine.backward(loss)\n  rank 1: after update 5 - ")
        has(output, " in my_batches: time.sleep(1000)   <- not waiting\n")


def test_one_is_stopped(told):
    (output,) = told("stopped")
    has(output, "rank 1", TITLE, f"  rank 0: {BACKWARD}", "  rank 1: no answer (stopped, or its machine is lost)\n")


def test_the_one_that_hosts_the_store_is_stopped(told):
    (output,) = told("host stopped")
    has(output, "waited 3 s (config key timeout) for another rank; rank 0 is stopped (SIGSTOP, or a debugger)")


def test_one_has_a_batch_less_and_ends(told):
    for output in told("ends"):
        has(output, "rank 1 ended without an error while others waited for it (left its loop early?)", TITLE)
        has(output, f" {BACKWARD}", "\n  rank 1: ended, after update 5\n")


def test_one_has_a_batch_less_and_waits_elsewhere(told):
    (output,) = told("elsewhere")
    has(output, "all ranks do, so they wait in different collectives", TITLE, f"  rank 0: {BACKWARD}")
    has(output, "\n  rank 1: waiting, in engine.save(), after update 5 - ", " in my_batches: engine.save(folder)\n")
    has(output, "They wait in different places: each rank has to run the same collectives, in the same order.")


def test_the_updates_are_not_the_same(told):
    (output,) = told("ahead")
    has(output, "after update 5", "after update 6", "They are not at the same update.")


def test_a_stage_is_stuck_in_its_loader(told):
    (output,) = told("loader")
    has(output, "likely hanging (or slower than that): rank 1 (pp 1)", TITLE, "  rank 0 (pp 0): waiting, in engine.")
    has(output, "\n  rank 1 (pp 1): in engine.dataloader, after update ", " in __getitem__: time.sleep(1000)   <- not")


@pytest.mark.parametrize(
    ("name", "call"), [("fsdp", "engine(...)"), ("zero1", "engine.backward()"), ("pipeline", "engine")]
)
def test_every_layout_waits_no_longer(told, name, call):
    (output,) = told(name)
    has(output, TITLE, f"waiting, in {call}", "after update 5", "time.sleep(1000)   <- not waiting\n")


def test_a_save_waits_no_longer(told):
    (output,) = told("save")
    has(output, TITLE, "waiting, in engine.save()", "after update 5", "time.sleep(1000)   <- not waiting\n")


def test_a_save_in_the_background_waits_no_longer(told):
    (output,) = told("save beside")
    has(output, "waited 3 s", TITLE, "  rank 1: ", "; its save in the background is at ", "time.sleep(1000)\n")
