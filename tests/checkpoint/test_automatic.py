"""The keys checkpoint and resume, in one process: when it is saved, what a run goes on from, and that it is exact."""

from __future__ import annotations

import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.config.load import load_config
from halfmesh.engine.checkpointing import automatic, progress
from halfmesh.errors import CheckpointError, InputError, Preempted
from halfmesh.plan.rehearsal import Place, rehearse
from tests.support.checkpoint_runs import FP16, Net, make_engine
from tests.support.llama import SMALL
from tests.support.models import make_data
from tests.support.ranks import run_ranks

EPOCHS = 3
NOWHERE = lambda engine: None  # noqa: E731


@pytest.fixture(autouse=True)
def _signals_are_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(seed):
    """All random numbers, as at the start of a program."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def made(folder, *, seed=1, every=None, resume="auto", **options):
    """48 samples in batches of 4, shuffled: 12 batches an epoch."""
    saves = None if folder is None else {"directory": str(folder), "every": every, "signals": ["SIGTERM"]}
    chosen = {"dropout": 0.3, "shuffle": True, "batch": 4} | options
    resume = None if folder is None else resume
    start(seed)
    return make_engine("one", chosen.pop("mode", "none"), seed=seed, checkpoint=saves, resume=resume, **chosen)


def forget_the_end():
    """Handlers stay after Preempted, which usually ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def manual(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)


def loop(engine, when=NOWHERE, lr=None):
    """Three epochs, with what a loop does after a step and after an epoch. Losses by (epoch, step)."""
    seen = {}
    for epoch in range(engine.dataloader.next_epoch, EPOCHS):
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            stepped = engine.step() is not None
            when(engine)
            if stepped and lr == "steps":
                engine.lr_scheduler.step()
            seen[epoch, engine.global_step, stepped] = (loss.item(), engine.loss_scale)
        if lr == "epochs":
            engine.lr_scheduler.step()
    return seen


def weights(engine):
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def at(step, position=None):
    """Send SIGTERM after step `step`; in a cycle, after its microbatch `position`."""
    count = {"calls": 0}

    def send(engine):
        count["calls"] += engine.global_step == step
        if count["calls"] == (position or 1):
            count["calls"] += 1
            os.kill(os.getpid(), signal.SIGTERM)

    return send


CASES = {
    "first step": (1, {}),
    "in the middle": (5, {}),
    "the last batch of an epoch": (12, {}),
    "the first of the next": (13, {}),
    "the last batch of all": (36, {}),
    "a scheduler of the loop": (5, {"lr_scheduler": manual, "lr_interval": "manual", "lr": "steps"}),
    "after an epoch": (12, {"lr_scheduler": manual, "lr_interval": "manual", "lr": "epochs"}),
    "by epoch": (24, {"lr_scheduler": manual, "lr_interval": "epoch"}),
    "accumulation": (4, {"gradient_accumulation": 2}),
    "in a cycle": (4, {"gradient_accumulation": 3, "position": 2}),
    "naive": (7, {"mode": "naive"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_told_to_end_goes_on_exactly(name, tmp_path):
    step, options = CASES[name]
    options = {"mode": "torch"} | options
    lr, position = options.pop("lr", None), options.pop("position", None)
    whole = made(None, **options)
    expected = loop(whole, lr=lr)
    first = made(tmp_path, **options)
    with pytest.raises(Preempted) as ended:
        loop(first, at(step, position), lr)
    told_in = step + 1 if position else step  # a cycle is completed first
    assert ended.value.code == halfmesh.EXIT_PREEMPTED == 75
    assert ended.value.folder == tmp_path / f"step-{told_in:08d}"
    assert os.listdir(tmp_path) == [f"step-{told_in:08d}"]
    first.close()
    assert callable(signal.getsignal(signal.SIGTERM))  # another one changes nothing
    os.kill(os.getpid(), signal.SIGTERM)
    forget_the_end()
    second = made(tmp_path, seed=2, **options)
    assert second.global_step == told_in
    found = loop(second, lr=lr)
    assert found == {key: value for key, value in expected.items() if (key[1], not key[2]) > (told_in, False)}
    assert same(weights(second), weights(whole))
    assert second.global_step == whole.global_step
    if "lr_scheduler" in options:
        assert second.lr_scheduler.last_epoch == whole.lr_scheduler.last_epoch
    second.close()


def test_every_so_many_steps(tmp_path):
    engine = made(tmp_path, every=5)
    there = {}

    def look(engine):
        there[engine.global_step] = sorted(int(path.name[-2:]) for path in tmp_path.glob("step-*"))
        engine.wait_for_save()  # so that what is there does not depend on time

    loop(engine, look)
    assert [there[step] for step in (5, 7, 12, 22)] == [[], [5], [5, 10], [10, 15, 20]]
    assert engine.global_step == 36
    engine.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000025", "step-00000030", "step-00000035"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("in_background", [True, False])
def test_in_background_or_not(in_background, tmp_path, monkeypatch):
    threads, write = set(), progress.write

    def note(path, content):
        threads.add(threading.current_thread().name)
        write(path, content)

    monkeypatch.setattr(progress, "write", note)
    saves = {"directory": str(tmp_path), "every": 5, "in_background": in_background, "signals": [], "keep": None}
    engine = make_engine("one", "none", checkpoint=saves)
    loop(engine)
    engine.close()
    assert threads == ({"halfmesh save"} if in_background else {"MainThread"})
    assert len(os.listdir(tmp_path)) == 3


def test_the_one_at_the_end_waits_for_the_one_before(tmp_path):
    """Told to end while a save in the background has not written a file."""
    engine, gate = made(tmp_path, every=5), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        write = progress.write

        def wait(path, content):
            if threading.current_thread().name == "halfmesh save":
                assert gate.wait(20)
            write(path, content)

        patch.setattr(progress, "write", wait)

        def send(engine):
            if engine.global_step == 7:
                assert not list(tmp_path.glob("step-*"))
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.3, gate.set).start()

        with pytest.raises(Preempted):
            loop(engine, send)
    assert sorted(os.listdir(tmp_path)) == ["step-00000005", "step-00000007"]


def test_the_one_at_the_end_is_made_where_the_one_before_has_failed(tmp_path, monkeypatch):
    engine, write, gate = made(tmp_path), progress.write, threading.Event()

    def fail(path, content):
        if threading.current_thread().name == "halfmesh save":
            assert gate.wait(20)
            raise OSError("no room")
        write(path, content)

    monkeypatch.setattr(progress, "write", fail)
    engine.save(tmp_path / "other", in_background=True)

    def send(engine):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, gate.set).start()

    with pytest.raises(Preempted):
        loop(engine, send)
    assert os.listdir(tmp_path / "other") == []
    assert (tmp_path / "step-00000001").is_dir()


def test_where_the_save_fails_the_last_checkpoint_stays(tmp_path, monkeypatch):
    engine, write = made(tmp_path, every=5), progress.write

    def fail(path, content):
        if threading.current_thread().name == "MainThread":
            raise OSError("no room")
        write(path, content)

    monkeypatch.setattr(progress, "write", fail)
    with pytest.raises(CheckpointError, match=r"saving step 7 to .* failed, and .* as it was: OSError: no room"):
        loop(engine, at(7))
    engine.close()
    assert os.listdir(tmp_path) == ["step-00000005"]


def own_loop(engine, batches, when=NOWHERE):
    """With a loader of the user's own, an evaluation after each step, and two forwards a step."""
    for x, y in batches:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y) + engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        when(engine)
        with torch.no_grad():
            engine(x)
        engine.eval()
        engine(x)
        engine.train()
        engine.lr_scheduler.step()


def without_loader(folder=None):
    start(1)
    saves = {} if folder is None else {"checkpoint": {"directory": str(folder), "signals": ["SIGTERM"]}}
    return halfmesh.initialize(
        Net(0.3, 1),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        nn.functional.cross_entropy,
        config={**FP16["torch"], **saves, "lr_interval": "manual"} | ({} if folder is None else {"resume": "auto"}),
        lr_scheduler=manual,
        device="cpu",
    )


def test_a_loop_with_a_loader_of_its_own(tmp_path):
    x, y = make_data(80)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    whole = without_loader()
    own_loop(whole, batches)
    first = without_loader(tmp_path)
    with pytest.raises(Preempted):
        own_loop(first, batches, at(4))
    forget_the_end()
    second = without_loader(tmp_path)
    assert second.global_step == 4
    own_loop(second, batches[4:])
    assert same(weights(second), weights(whole))
    assert second.lr_scheduler.last_epoch == whole.lr_scheduler.last_epoch == 10
    second.close()


def test_several_steps_with_each_batch(tmp_path):
    """A forward is no boundary while the loop goes over engine.dataloader: the batch would be taken for done."""

    def twice(engine, when=NOWHERE):
        for x, y in engine.dataloader:
            for _ in range(2):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
                when(engine)

    whole = made(None)
    twice(whole)
    first = made(tmp_path)
    with pytest.raises(Preempted) as ended:
        twice(first, at(5))
    assert ended.value.folder.name == "step-00000006"
    second = made(tmp_path, seed=2)
    twice(second)
    assert same(weights(second), weights(whole))
    second.close()


def test_gradients_that_no_step_has_used_are_not_lost(tmp_path):
    engine = made(tmp_path, every=1)
    batches = iter(engine.dataloader)
    x, y = next(batches)
    for _ in range(2):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    engine.backward(engine.criterion(engine(x), y))
    next(batches)  # no boundary: a save would be refused
    assert engine.step() is not None
    next(batches)
    engine.close()
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_every_where_boundaries_do_not_meet_it(tmp_path):
    """Two steps with each batch: after step 6 for 5, after 10, after 16 for 15."""
    engine = made(tmp_path, every=5)
    for x, y in engine.dataloader:
        for _ in range(2):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    engine.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000016", "step-00000020"]


def ahead(engine, when=NOWHERE):
    """Each batch is asked for between backward and step of the one before."""
    seen = {}
    for _ in range(engine.dataloader.next_epoch, EPOCHS):
        batches = iter(engine.dataloader)
        batch = next(batches, None)
        while batch is not None:
            engine.zero_grad()
            loss = engine.criterion(engine(batch[0]), batch[1])
            engine.backward(loss)
            batch = next(batches, None)
            engine.step(last=batch is None)
            when(engine)
            seen[engine.global_step] = loss.item()
    return seen


@pytest.mark.parametrize("step", [1, 5, 11, 12, 13])
def test_a_loop_that_asks_for_its_next_batch_before_it_steps(step, tmp_path):
    whole = made(None)
    expected = ahead(whole)
    first = made(tmp_path)
    with pytest.raises(Preempted):
        ahead(first, at(step))
    assert os.listdir(tmp_path) == [f"step-{step:08d}"]
    second = made(tmp_path, seed=2)
    found = ahead(second)
    assert found == {key: value for key, value in expected.items() if key > step}
    assert same(weights(second), weights(whole))
    second.close()


def test_an_epoch_that_is_left_is_over(tmp_path):
    """The next one begins by the time it is saved, as it would have."""

    def parts(engine, when=NOWHERE):
        for epoch in range(engine.dataloader.next_epoch, EPOCHS):
            for number, (x, y) in enumerate(engine.dataloader):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
                when(engine)
                if epoch < 2 and number == 4:
                    break

    whole = made(None)
    parts(whole)
    first = made(tmp_path)
    with pytest.raises(Preempted) as ended:
        parts(first, at(5))
    assert ended.value.folder.name == "step-00000005"
    second = made(tmp_path, seed=2)
    assert second.dataloader.next_epoch == 1
    parts(second)
    assert same(weights(second), weights(whole))
    assert second.global_step == whole.global_step == 22
    second.close()


def test_a_pass_without_gradients_is_no_boundary(tmp_path):
    engine = made(tmp_path, every=1)
    for number, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        if number == 2:
            break
    engine.wait_for_save()
    before = sorted(os.listdir(tmp_path))
    with torch.no_grad():
        for x, _ in engine.dataloader:
            engine(x)
    engine.wait_for_save()
    assert sorted(os.listdir(tmp_path)) == before == ["step-00000001", "step-00000002"]
    engine.close()
    assert sorted(os.listdir(tmp_path)) == [*before, "step-00000003"]


def test_told_to_end_by_a_call(tmp_path):
    engine = made(tmp_path, lr_scheduler=None)
    with pytest.raises(Preempted):
        loop(engine, lambda engine: engine.preempt() if engine.global_step == 3 else None)
    assert os.listdir(tmp_path) == ["step-00000003"]
    with pytest.raises(InputError, match=r"engine.preempt\(\): the config does not say where to save; set checkpoint="):
        made(None).preempt()


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_is_over_ends_as_ever(saved, tmp_path, caplog):
    engine = made(tmp_path)
    x, y = make_data(4)
    if saved:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    os.kill(os.getpid(), signal.SIGTERM)
    with caplog.at_level("INFO", "halfmesh"):
        engine.close()
    assert os.listdir(tmp_path) == (["step-00000001"] if saved else [])
    assert (f"told to end (SIGTERM): saved to {tmp_path / 'step-00000001'}" in caplog.text) == saved
    assert "told to end, but training is over: the program goes on to its end" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def train(engine, steps=1):
    x, y = make_data(4)
    for _ in range(steps):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


def test_told_to_end_after_the_last_boundary(tmp_path, caplog):
    """In the evaluation after the last epoch, say: it is saved by close."""
    engine = made(tmp_path)
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    engine.preempt()
    with caplog.at_level("INFO", "halfmesh"):
        engine.close()
    assert os.listdir(tmp_path) == ["step-00000012"]
    assert f"told to end (engine.preempt()): saved to {tmp_path / 'step-00000012'}" in caplog.text


def test_what_is_saved_is_not_saved_again(tmp_path, monkeypatch):
    engine = made(tmp_path, every=12)
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    engine.wait_for_save()
    engine.preempt()
    monkeypatch.setattr(engine, "save", None)
    engine.close()
    assert os.listdir(tmp_path) == ["step-00000012"]


def test_gradients_that_are_left_are_said(tmp_path, caplog):
    engine = made(tmp_path)
    train(engine)
    x, y = make_data(4)
    engine.backward(engine.criterion(engine(x), y))
    engine.preempt()
    engine.close()
    assert os.listdir(tmp_path) == []
    assert "told to end (engine.preempt()), but not saved: gradients are left that no step has used" in caplog.text


def test_an_error_that_was_handled_before_is_none_of_the_runs(tmp_path):
    """The program is a handler's: of a missing file, or of a first try that had no room."""
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        engine = made(tmp_path / "made within", every=1)
        train(engine)
        engine.close()
    engine = made(tmp_path / "goes on within", every=1)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        train(engine)
        engine.close()
    for name in ("made within", "goes on within"):
        assert os.listdir(tmp_path / name) == ["step-00000001"]


def test_an_error_that_is_raised_again(tmp_path):
    """It was handled when the engine was made, and ends its block."""

    def again():
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            with made(tmp_path, every=1) as engine:
                train(engine)
                raise error

    with pytest.raises(ZeroDivisionError):
        again()
    assert os.listdir(tmp_path) == []


def test_closed_by_the_handler_of_the_loops_error(tmp_path):
    engine = made(tmp_path, every=1)
    try:
        train(engine)
        raise ZeroDivisionError
    except ZeroDivisionError:
        engine.close()
    assert os.listdir(tmp_path) == []


def fail(engine, way):
    if way == "with":
        with engine:
            raise ZeroDivisionError
    try:
        raise ZeroDivisionError
    finally:
        engine.close()


def test_nothing_is_saved_after_an_error(tmp_path):
    """Other ranks may be elsewhere."""
    x, y = make_data(4)
    for way in ("with", "finally"):
        engine = made(tmp_path, every=1)
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        with pytest.raises(ZeroDivisionError):
            fail(engine, way)
        assert os.listdir(tmp_path) == []
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_stays(tmp_path, caplog):
    seen = []
    engines = []

    def mine(number, frame):
        seen.append(number)
        engines[0].preempt()

    signal.signal(signal.SIGTERM, mine)
    engines.append(made(tmp_path))
    assert "checkpoint.signals: SIGTERM: handled already" in caplog.text
    with pytest.raises(Preempted):
        loop(engines[0], at(2))
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is mine


def test_one_of_faulthandlers_stays(tmp_path):
    """Python does not know of it."""
    assert run_ranks(beside_faulthandler, 1, str(tmp_path)) == [["SIGUSR1"]]


def beside_faulthandler(rank, world_size, folder):
    engine = make_engine("one", "none", checkpoint=folder)  # the harness has registered SIGUSR1 there
    others = engine._automatic._signals.others
    engine.close()
    return others


def test_in_another_thread_nothing_is_handled(tmp_path, caplog):
    def train():
        made(tmp_path).close()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert "(or this is not the main thread)" in caplog.text


def test_no_signals(tmp_path):
    engine = make_engine("one", "none", checkpoint={"directory": str(tmp_path), "signals": []})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    engine.close()


# --- resume --------------------------------------------------------------------------------------------------------


def test_resume_auto_begins_anew_where_there_is_nothing(tmp_path, caplog):
    with caplog.at_level("INFO", "halfmesh"):
        engine = made(tmp_path / "runs" / "first")
    assert "there is no checkpoint in " in caplog.text
    assert "and training begins anew" in caplog.text
    assert engine.global_step == 0
    assert (tmp_path / "runs" / "first").is_dir()
    engine.close()


def test_resume_from_a_folder(tmp_path):
    engine = made(None)
    loop(engine)
    place = engine.save(tmp_path)
    engine.close()
    for path in (tmp_path, place):
        other = make_engine("one", "torch", resume=str(path), seed=2)
        assert other.global_step == 36
        assert same(weights(other), weights(engine))
        other.close()
    with pytest.raises(CheckpointError, match=r"loading from .*nothing failed: there is no such folder") as caught:
        make_engine("one", "torch", resume=str(tmp_path / "nothing"))
    assert "initialize had begun to change the model" in caught.value.__notes__[0]


def test_resume_never_begins_anew_beside_damage(tmp_path):
    engine = made(None, mode="none")
    place = engine.save(tmp_path)
    engine.close()
    (place / "common.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"common.pt has 0 bytes instead of"):
        made(tmp_path, mode="none")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_resume_from_another_model(tmp_path):
    engine = made(None, mode="none")
    engine.save(tmp_path)
    engine.close()
    with pytest.raises(InputError, match="does not fit the model and optimizer of this engine"):
        made(tmp_path, mode="none", model=nn.Linear(8, 4))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = Net()
    before = model.first.weight.data_ptr()
    with pytest.raises(CheckpointError, match=r"checkpoint.directory='.*file/runs': NotADirectoryError"):
        made(tmp_path / "file" / "runs", model=model, mode="naive")
    assert model.first.weight.data_ptr() == before  # refused before anything was changed


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(automatic.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match=r"cannot be written to; give another folder, or change its permissions"):
        made(tmp_path)


def test_a_relative_folder_is_that_of_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = made("runs", every=3)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loop(engine)
    engine.close()
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.parametrize("way", ["load", "load_state_dict"])
def test_a_load_is_not_a_boundary(way, tmp_path):
    engine = made(tmp_path / "first", every=5)
    loop(engine)
    engine.close()
    other = made(tmp_path / "second", every=5)
    if way == "load":
        other.load(tmp_path / "first")
    else:
        other.load_state_dict(engine.state_dict())
    assert other.global_step >= 35
    other.close()
    assert os.listdir(tmp_path / "second") == []


def test_a_dry_run_leaves_the_disk_alone(tmp_path):
    saves = {"checkpoint": str(tmp_path / "runs"), "resume": str(tmp_path / "nothing")}
    rehearse(load_config(saves), SMALL, (), Place(0, 1))
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
