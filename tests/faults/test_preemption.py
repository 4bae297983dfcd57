"""Ranks that are told to end: all save after the same step, whoever is told, end with status 75, and resume exactly."""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from halfmesh.errors import Interrupted, Preempted
from tests.faults import checkpoint_program
from tests.faults.launches import TORCHRUN, started
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import here, run_ranks


def made(folder, seed):
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    saves = {"directory": folder, "every": 4, "signals": ["SIGTERM"]}
    keys = {} if folder is None else {"checkpoint": saves, "resume": "auto"}
    return make_engine("dp2", "none", seed=seed, dropout=0.3, shuffle=True, batch=8, **keys)


def loop(engine, when=None):
    seen = []
    for _ in range(engine.dataloader.next_epoch, 6):
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            seen.append((engine.global_step, loss.item()))
            if when is not None:
                when(engine.global_step)
    return seen


def tell_and_resume(rank, world_size, folder):
    """A run is told to end after step 6 on rank 1, and begun again."""
    whole = made(None, 1)
    expected = loop(whole)
    whole.close()
    first = made(folder, 1)

    def send(step):
        if step == 6 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step >= 6:
            time.sleep(0.02 * (1 + rank))  # ranks are at different places

    with pytest.raises(Preempted) as ended:
        loop(first, send)
    first.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    second = made(folder, 2)
    at = int(ended.value.folder.name[5:])
    assert second.context.everyone(second.global_step) == [at] * world_size
    assert loop(second) == [one for one in expected if one[0] > at]
    second.close()
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.distributed
def test_all_ranks_save_after_the_same_step_and_resume_exactly(tmp_path):
    run_ranks(tell_and_resume, 2, str(tmp_path / "checkpoints"), timeout=100)


def interrupted(rank, folder):
    """Ctrl-C reaches the ranks at different places."""
    engine = made(folder, 1)

    def press(step):
        if step == 3 + rank:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02 * (1 + rank))

    with pytest.raises(Interrupted) as ended:
        loop(engine, press)
    engine.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ended.value.code == 130
    assert engine.context.everyone(ended.value.folder.name) == [ended.value.folder.name] * 2
    assert ended.value.folder.name in ("step-00000004", "step-00000005", "step-00000006")


def own_loader(rank, folder):
    """Without engine.dataloader: the boundary is the next forward."""
    engine = made(folder, 1)
    x = here(torch.randn(4, engine.model.first.in_features))

    def train():
        while True:
            engine.backward(engine(x).square().mean())
            engine.step()
            time.sleep(0.01 * (1 + rank))
            if engine.global_step == 3 and rank == 1:
                engine.preempt()

    with pytest.raises(Preempted) as ended:
        train()
    engine.close()
    assert ended.value.folder.name == f"step-{engine.global_step:08d}"


def after_the_last_boundary(rank, folder):
    """One rank is told in an evaluation that comes last: all save when they close."""
    engine = made(folder, 1)
    loop(engine)
    engine._progress.global_step += 1  # 36 is saved already, as `every` says
    if rank == 1:
        engine.preempt()
    engine.close()
    assert sorted(os.listdir(folder))[-1] == "step-00000037"


def places_of_the_end(rank, world_size, folder):
    for case in (interrupted, own_loader, after_the_last_boundary):
        case(rank, f"{folder}/{case.__name__}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.distributed
def test_where_a_run_ends(tmp_path):
    run_ranks(places_of_the_end, 2, str(tmp_path), timeout=100)


def begin(launcher, **options):
    return started(*launcher, checkpoint_program.__file__, json.dumps({"pause": 0.05, **options}))


def await_step(folder, rank, step, process):
    """Until a rank has written that it has made a step."""
    path, deadline = Path(folder) / f"rank-{rank}", time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(line.split()[0] == str(step) for line in lines):
            return
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} did not come to step {step}: {process.communicate(timeout=10)[0][-3000:]}")


def make_folders(path):
    for name in ("log", "checkpoints"):
        (path / name).mkdir()
    return {"log": str(path / "log"), "folder": str(path / "checkpoints"), "out": str(path / "weights.pt")}


@pytest.mark.slow
def test_one_process_ends_with_its_status_and_resumes(tmp_path):
    """With a worker, and the signal to all of its processes, as torchrun and SLURM send it: again and again, also while
    the interpreter shuts down."""
    options = make_folders(tmp_path) | {"workers": 1}
    with begin((sys.executable,), **options) as process:
        await_step(options["log"], 0, 7, process)
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "interrupted by SIGTERM: saved update " in output.splitlines()[-1]
    assert "Traceback" not in output
    whole = checkpoint_program.main(str(tmp_path / "whole.pt"))
    rest = checkpoint_program.main(**options)
    assert 7 <= len(whole) - len(rest) < len(whole)
    assert rest == whole[-len(rest) :]
    torch.testing.assert_close(torch.load(options["out"]), torch.load(tmp_path / "whole.pt"), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_starts_ranks_again_and_they_resume(tmp_path):
    options = make_folders(tmp_path) | {"workers": 1, "dropout": 0.0, "shuffle": False}
    with begin((*TORCHRUN, "--max-restarts", "1"), **options) as process:
        await_step(options["log"], 1, 7, process)
        os.kill(int((tmp_path / "log" / "pid-1").read_text()), signal.SIGTERM)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    logs = [(tmp_path / "log" / f"rank-{rank}").read_text().splitlines() for rank in range(2)]
    (first, second), other = ([int(line.split()[1]) for line in log if line.startswith("from")] for log in logs)
    assert [first, second] == other
    assert first < 7 <= second < 36
    assert "[rank 0] interrupted by SIGTERM: saved update" in output
    assert output.count("exitcode: 75") >= 1
    assert not re.search(r"terminate called|left its loop|lost|DataLoader worker", output)
    checkpoint_program.main(str(tmp_path / "whole.pt"), dropout=0.0, shuffle=False)
    torch.testing.assert_close(torch.load(options["out"]), torch.load(tmp_path / "whole.pt"), rtol=0, atol=1e-5)
