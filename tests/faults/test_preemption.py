"""Several ranks are told to end: all save after the same step, whoever is told, and go on exactly."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from halfmesh.engine.checkpointing import preemption, progress
from halfmesh.engine.checkpointing.preemption import Agreement
from halfmesh.errors import Preempted
from tests.support.checkpoint_runs import make_engine
from tests.support.ranks import run_ranks


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    monkeypatch.setattr(preemption, "SOON_S", 0.001)


class Ranks:
    """Ranks of one program, each in a thread of its own, which come to steps at their own pace."""

    def __init__(self, size, missing=()):
        self.store = dist.HashStore()
        self.came = [[] for _ in range(size)]
        self.of_rank = {
            rank: Agreement(self.store, rank, size, self.came[rank]) for rank in range(size) if rank not in missing
        }
        self.ended_after = {}
        self._threads = []

    def run(self, pauses, most=10**6, together=True):
        """Until they are told, or have come to step `most`; with `together` none is ahead by more than a step."""
        barrier = threading.Barrier(len(self.of_rank))

        def loop(rank):
            steps, agreement = 0, self.of_rank[rank]
            while steps < most:
                steps += 1
                if not agreement.steps.advance():
                    break
                if together:
                    barrier.wait(20)
                time.sleep(pauses[rank])
            self.ended_after[rank] = steps

        self._threads = [threading.Thread(target=loop, args=(rank,)) for rank in self.of_rank]
        for thread in self._threads:
            thread.start()

    def join(self):
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        for agreement in self.of_rank.values():
            agreement.stop()
        return self.ended_after


@pytest.mark.parametrize("seed", range(8))
def test_all_end_after_the_same_step(seed, quick):
    """Told are one or several ranks, at random moments; they wait for each other as those of training do, or not."""
    chance = random.Random(seed)
    ranks = Ranks(3)
    ranks.run([chance.choice([0.0, 0.001, 0.004]) for _ in range(3)], together=seed % 2 == 0)
    told = chance.sample(range(3), chance.randint(1, 3))
    for rank in told:
        time.sleep(chance.random() * 0.03)
        ranks.came[rank].append("SIGTERM")
    ended = ranks.join()
    assert len(set(ended.values())) == 1
    reasons = {agreement.reason for agreement in ranks.of_rank.values()}
    assert len(reasons) == 1
    assert reasons.pop().startswith("SIGTERM on rank ")


def test_what_came_where_is_said(quick):
    ranks = Ranks(3)
    ranks.came[2] += ["SIGTERM", "SIGUSR1", "SIGTERM"]
    ranks.came[0].append("SIGTERM")
    ranks.run([0.001] * 3)
    ranks.join()
    assert ranks.of_rank[1].reason == "SIGTERM on rank 0, 2; SIGUSR1 on rank 2"


def test_nobody_waits_for_a_rank_that_is_gone(quick):
    """It does not listen: no count is held, so that the ranks come to where they notice."""
    ranks = Ranks(3, missing=[1])
    ranks.came[0].append("SIGTERM")
    time.sleep(0.2)
    assert ranks.store.check(["0/listens/0", "0/listens/2"])
    assert not ranks.store.check(["0/count/0"])
    ranks.run([0.0] * 3, most=50, together=False)
    assert ranks.join() == {0: 50, 2: 50}


def test_a_rank_that_has_closed_its_engine(quick, monkeypatch, caplog):
    """It was listening; the others are told at once that there is no step for all."""
    ranks = Ranks(2)
    ranks.of_rank[1]._stopped.set()
    ranks.of_rank[1]._thread.join()
    ranks.store.set("0/listens/1", "")
    ranks.store.set("0/count/1", "null")
    ranks.came[0].append("SIGTERM")
    deadline = time.monotonic() + 10
    while not ranks.store.check(["0/answer"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks.of_rank.pop(1)
    ranks.run([0.0], most=50)
    assert ranks.join() == {0: 50}
    assert "training goes on, and the next signal is tried again" in caplog.text


def test_a_closing_rank_says_so(quick, monkeypatch):
    """While it waits for the others to listen."""
    ranks = Ranks(2, missing=[1])
    ranks.came[0].append("SIGTERM")
    deadline = time.monotonic() + 10
    while not ranks.store.check(["0/listens/0"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks.of_rank[0].stop()
    assert ranks.store.get("0/count/0") == b"null"


def test_after_it_has_failed_it_is_tried_again(quick, monkeypatch):
    """Rank 1 listens, and does not tell its count in time."""
    monkeypatch.setattr(preemption, "LIMIT_S", 0.2)
    ranks = Ranks(2, missing=[1])
    ranks.store.set("0/listens/1", "")
    ranks.came[0].append("SIGTERM")
    deadline = time.monotonic() + 10
    while not ranks.store.check(["0/answer"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks.store.get("0/answer") == b'[null, ""]'
    time.sleep(0.1)
    assert not ranks.store.check(["1/asked"])  # it was answered, if badly
    ranks.of_rank[1] = Agreement(ranks.store, 1, 2, ranks.came[1])  # takes part in the first, too, and then listens
    ranks.run([0.001, 0.001])
    ranks.came[0].append("SIGTERM")
    ended = ranks.join()
    assert ended[0] == ended[1]
    assert ranks.of_rank[1].reason == "SIGTERM on rank 0"


# --- engines -------------------------------------------------------------------------------------------------------


def made(layout, mode, folder, seed, **options):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    saves = {"directory": folder, "every": 4, "signals": ["SIGTERM"]}
    keys = {} if folder is None else {"checkpoint": saves, "resume": "auto"}
    return make_engine(layout, mode, seed=seed, **{"dropout": 0.3, "shuffle": True, "batch": 8, **keys, **options})


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


def held(engine):
    return {name: piece.held.clone() for name, piece in engine._run.holding.weights().items()}


def told(rank, world_size, layout, mode, folder, who, options):
    """What is wrong with a run that was told to end after step 6 on the ranks `who`, and gone on with."""
    wrong = []
    whole = made(layout, mode, None, 1, **options)
    expected = loop(whole)
    weights = held(whole)
    whole.close()
    first = made(layout, mode, folder, 1, **options)

    def send(step):
        if step == 6 and rank in who:
            os.kill(os.getpid(), signal.SIGTERM)
        if step >= 6:
            time.sleep(0.02 * (1 + rank))  # ranks are at different places

    ended = None
    try:
        loop(first, send)
        wrong.append("it was not told")
    except Preempted as error:
        ended = error.folder
    first.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    second = made(layout, mode, folder, 2, **options)
    at = second.global_step
    if ended is None or int(ended.name[5:]) != at:
        wrong.append(f"ended at {ended}, went on from {at}")
    if second.context.everyone(at) != [at] * world_size:
        wrong.append("ranks went on from different steps")
    found = loop(second)
    if [one for one in expected if one[0] > at] != found and "gradient_accumulation" not in options:
        wrong.append("losses")
    wrong += [name for name, value in held(second).items() if not torch.equal(value, weights[name])]
    second.close()
    return wrong


CELLS = [
    ("dp2", "none", [0], {}),
    ("dp2", "none", [1], {}),
    ("dp2", "none", [0, 1], {"gradient_accumulation": 2}),
    ("pp2", "none", [1], {"dropout": 0.0}),
    ("zero1", "naive", [0], {}),
    ("fsdp", "none", [1], {}),
    ("tp2", "none", [0, 1], {}),
]


def cells(rank, world_size, folder):
    found = {}
    for number, (layout, mode, who, options) in enumerate(CELLS):
        found[layout, *who] = told(rank, world_size, layout, mode, f"{folder}/{number}", who, options)
    return {cell: wrong for cell, wrong in found.items() if wrong}


@pytest.mark.distributed
def test_in_each_layout_and_on_any_rank(tmp_path):
    assert run_ranks(cells, 2, str(tmp_path), timeout=200) == [{}, {}]


def during_a_save(rank, world_size, folder):
    """Told while rank 1 is slow to write in the background."""
    write = progress.write

    def slowly(path, content):
        if rank == 1 and threading.current_thread().name == "halfmesh save":
            time.sleep(0.5)
        write(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "write", slowly)
        engine = made("dp2", "none", folder, 1)

        def send(step):
            if step == 4 and rank == 0:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(0.05)

        with pytest.raises(Preempted) as ended:
            loop(engine, send)
        engine.close()
    # How many steps pass until ranks have agreed is the machine's affair; what is there is whole, and ends with it.
    names = sorted(os.listdir(folder))
    *before, last = names
    due = [f"step-{step:08d}" for step in range(4, engine.global_step + 1, 4)]
    return last == ended.value.folder.name and [name for name in due if name != last] == before


def own_loader(rank, world_size, folder):
    """Without engine.dataloader: the boundary is the next forward."""
    engine = made("dp2", "none", folder, 1)
    x = torch.randn(4, engine.model.first.in_features)

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
    return ended.value.folder.name == f"step-{engine.global_step:08d}"


def after_the_last_boundary(rank, world_size, folder):
    """One rank is told in an evaluation that comes last: all save when they close."""
    engine = made("dp2", "none", folder, 1)
    loop(engine)
    engine.global_step += 1  # 36 is saved already, as `every` says
    if rank == 1:
        engine.preempt()
    engine.close()
    return sorted(os.listdir(folder))[-1] == "step-00000037"


def other_cases(rank, world_size, folder):
    found = {}
    for case in (during_a_save, own_loader, after_the_last_boundary):
        found[case.__name__] = case(rank, world_size, f"{folder}/{case.__name__}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Closed without an end, threads are gone, and two engines do not hear each other.
    first, second = (made("dp2", "none", f"{folder}/{name}", 1) for name in "ab")
    first.preempt()
    first.close()
    found["another engine"] = len(loop(second)) == 36 and not second._closed
    second.close()
    found["threads"] = [thread.name for thread in threading.enumerate() if "preemption" in thread.name] == []
    return found


@pytest.mark.distributed
def test_other_cases_on_two_ranks(tmp_path):
    cases = ("during_a_save", "own_loader", "after_the_last_boundary")
    expected = dict.fromkeys(cases, True) | {"another engine": True, "threads": True}
    assert run_ranks(other_cases, 2, str(tmp_path), timeout=100) == [expected] * 2


def sees_another_folder(rank, world_size, folder):
    engine = made("dp2", "none", None, 1)
    engine.save(f"{folder}/0")
    engine.close()
    os.makedirs(f"{folder}/1", exist_ok=True)
    here = f"{folder}/here-{rank}"
    os.symlink(f"{folder}/{rank}", here)
    link = f"{folder}/link"
    with pytest.MonkeyPatch.context() as patch:
        from halfmesh.engine.checkpointing import automatic

        patch.setattr(automatic, "folder_of", lambda options: type(automatic.Path())(here))
        try:
            made("dp2", "none", link, 1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.distributed
def test_a_folder_that_one_rank_does_not_see(tmp_path):
    for words in run_ranks(sees_another_folder, 2, str(tmp_path)):
        assert "has checkpoints, but not on rank(s) 1; give a folder that all machines share" in words
        assert words.startswith("CheckpointError")
