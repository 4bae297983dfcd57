"""Saves that fail, and checkpoints that are damaged, changed, or of something else: refused, and nothing is lost."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import CheckpointError, InputError
from tests.support.checkpoint_runs import Net, change_manifest, make_engine, train
from tests.support.models import CLASSES, FEATURES
from tests.support.ranks import RankFailure, run_ranks

FILE_EVENTS = {"open", "os.mkdir", "os.rename"}


def made(**options):
    return make_engine("one", "none", samples=16, batch=4, **options)


def weights(engine):
    return {name: piece.held.clone() for name, piece in engine._run.holding.weights().items()}


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 1 and 2, and the weights of each."""
    engine, found = made(), []
    for _ in range(2):
        train(engine, 1)
        engine.save(tmp_path)
        found.append(weights(engine))
    return tmp_path, found


def loads(folder, expected, step):
    engine = made(seed=5)
    place = engine.load(folder)
    assert place.name == f"step-{step:08d}"
    assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())


def killed_while_saving(rank, world_size, folder, moment):
    """Saves again, and is killed at its `moment`-th use of a file there."""
    engine = made()
    engine.load(folder)
    train(engine, 1)
    left = [moment]

    def watch(event, args):
        # What is removed is named within its folder.
        if event == "os.remove" or (event in FILE_EVENTS and str(folder) in os.fsdecode(str(args[0]))):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    engine.save(folder, keep=1)
    return moment - left[0]


def test_a_save_that_is_killed_leaves_what_was_there(tmp_path):
    engine = made()
    train(engine, 1)
    engine.save(tmp_path)
    uses = run_ranks(killed_while_saving, 1, str(tmp_path), 10**6)[0]
    for moment in sorted({0, *range(2, uses - 5, 6), *range(uses - 5, uses)}):
        step = int(max(path.name for path in tmp_path.iterdir() if path.name.startswith("step"))[5:])
        for path in tmp_path.glob(".step-*"):  # or else this save, too, would begin with removing it
            shutil.rmtree(path)
        with pytest.raises(RankFailure, match="exit code -9"):
            run_ranks(killed_while_saving, 1, str(tmp_path), moment)
        other = made()
        assert other.load(tmp_path).name in (f"step-{step:08d}", f"step-{step + 1:08d}")
        for place in tmp_path.glob("step-*"):
            made().load(place)
    assert list(tmp_path.glob(".step-*"))
    train(other, 1)
    place = other.save(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [place]  # what the others left is gone


def disk_is_full(rank, world_size, folder):
    """On rank 1 only. What every rank was told, and what is there."""
    engine = make_engine("tp2", "none")
    train(engine, 1)
    engine.save(folder)
    train(engine, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        engine.save(folder)
    except CheckpointError as error:
        words = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    return words, sorted(os.listdir(folder)), engine.load(folder).name


@pytest.mark.distributed
def test_a_full_disk_on_one_rank(tmp_path):
    for words, there, loaded in run_ranks(disk_is_full, 2, str(tmp_path)):
        assert (
            f"saving step 2 to {tmp_path} failed, and what was saved before is as it was:\n  - rank 1 (tp 1): " in words
        )
        assert os.strerror(errno.EFBIG) in words
        assert (there, loaded) == (["step-00000001"], "step-00000001")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    engine = made()
    with pytest.raises(CheckpointError, match=r"saving step 0 to .*file failed, and what was saved before is .*: Fil"):
        engine.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        engine.save(tmp_path / "file" / "within")
    if os.geteuid() != 0:  # chroot is for root
        return
    with pytest.raises(RankFailure, match=r"rank 1: .*which rank 0 has made, is not there on this machine; give a"):
        run_ranks(sees_another_folder, 2, str(tmp_path / "shared"))


def sees_another_folder(rank, world_size, folder):
    """As a machine does that does not share it."""
    engine = make_engine("dp2", "none")
    engine.save(folder)  # imports what it needs
    if rank == 1:
        os.chroot(folder)
    engine.save(folder)


@pytest.mark.parametrize("newest", [True, False])
def test_damage_is_found_by_checksums(saved, newest, caplog):
    folder, states = saved
    place = folder / ("step-00000002" if newest else "step-00000001")
    path = next(place.glob("__0_0*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is not as it was written; .*\n  - __0_0.distcp has another sha256"):
        made().load(place)
    with caplog.at_level(logging.WARNING):
        loads(folder, states[0 if newest else 1], 1 if newest else 2)
    said = "step-00000001 is loaded, because what is newer is damaged:" in caplog.text
    assert said == newest
    path.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=rf"__0_0.distcp has 100 bytes instead of {len(content)}"):
        made().load(place)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        made().load(place)


def test_what_is_no_checkpoint(tmp_path, saved):
    folder, _ = saved
    for path in folder.glob("step-*/common.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"all of its checkpoints are damaged:\n.*step-00000002(?s:.*)00001"):
        made().load(folder)
    for place, words in (
        (tmp_path / "not here", "there is no such folder"),
        (folder / "empty", "it holds no complete"),
    ):
        if "empty" in place.name:
            place.mkdir()
        with pytest.raises(CheckpointError, match=f"loading from .* failed: {words}.*; give the folder that"):
            made().load(place)
    (folder / "step-00000002" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(.*\); take another checkpoint"):
        made().load(folder / "step-00000002")


LAYOUT = {"pipeline": 1, "data": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("without", "changes", "words"),
    [
        (["layout"], {}, "it has no 'layout'"),
        (["device"], {}, "it has no 'device'"),
        (["files"], {}, "it has no 'files'"),
        ([], {"files": {}}, "its files are without .metadata, common.pt, rank-00000.pt"),
        ([], {"files": {"common.pt": [float("inf"), ""]}}, "cannot convert float infinity to integer"),
        ([], {"files": {"common.pt": 3}}, "cannot unpack"),
        ([], {"layout": LAYOUT | {"data": "2"}}, "its layout is {.*'data': '2'.*}, and its device 'cpu'"),
        ([], {"layout": LAYOUT | {"data": 2}}, "its files are without rank-00001.pt"),
        ([], {"layout": 1}, "not subscriptable"),
        ([], {"device": None}, "and its device None"),
    ],
)
def test_a_manifest_that_is_not_whole(saved, without, changes, words, caplog):
    """Found before anything changes: the older checkpoint is loaded, and the reason is said."""
    folder, states = saved
    place = folder / "step-00000002"
    change_manifest(place, *without, **changes)
    with pytest.raises(CheckpointError, match=rf"manifest.json is damaged \(.*{words}.*\); take another checkpoint"):
        made().load(place)
    with caplog.at_level(logging.WARNING):
        loads(folder, states[0], 1)
    assert "step-00000001 is loaded, because what is newer is damaged:" in caplog.text


def test_a_manifest_that_was_changed(saved):
    path = saved[0] / "step-00000002" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(
        CheckpointError, match=r"is damaged \(its content has another sha256 than when it was written\)"
    ):
        made().load(path.parent)


def test_a_newer_format(saved):
    """An older checkpoint beside it is not taken for it."""
    folder, _ = saved
    change_manifest(folder / "step-00000002", format=2, files="of another kind")
    with pytest.raises(CheckpointError, match=r"step-00000002 has the format 2, and this version of halfmesh reads fo"):
        made().load(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "a/b", "link"])
def test_files_outside_of_the_folder(saved, name):
    place = saved[0] / "step-00000002"
    (saved[0] / "outside").write_text("secret")
    (place / "link").symlink_to(saved[0] / "outside")
    files = change_manifest(place)["files"]
    change_manifest(place, files=files | {name: [6, "0" * 64]})
    with pytest.raises(CheckpointError, match=r"names '.*', which is not a file of the folder itself"):
        made().load(place)


def redescribe(place, *names):
    """Make the manifest fit files that were changed: checksums are no signature."""
    from halfmesh.engine.checkpointing.folder import describe

    files = change_manifest(place)["files"]
    change_manifest(place, files=files | describe(place, names))


def test_metadata_that_points_outside(saved):
    place = saved[0] / "step-00000002"
    metadata = pickle.loads((place / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../step-00000001/__0_0.distcp"
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    redescribe(place, ".metadata")
    with pytest.raises(CheckpointError, match=r"says that tensors are in .*, which are not files of this checkpoint"):
        made().load(place)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


PLAIN = "holds more than plain data, which is not read because it could run code"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".metadata", rf"{PLAIN} \(posix.mkdir does not belong there\); take another checkpoint"),
        ("common.pt", PLAIN),
        ("rank-00000.pt", PLAIN),
        ("__0_0.distcp", "failed when weights were changed already; make the engine anew: .*Weights only load failed"),
    ],
)
def test_no_code_is_run(saved, name, words, monkeypatch):
    folder, _ = saved
    monkeypatch.chdir(folder)
    place = folder / "step-00000002"
    if name == ".metadata":
        (place / name).write_bytes(pickle.dumps(Runs()))
    elif name == "__0_0.distcp":
        (place / name).write_bytes(pickle.dumps(Runs()).ljust(2 * 10**5))
    else:
        torch.save({"optimizer": Runs()}, place / name)
    redescribe(place, name)
    with pytest.raises(CheckpointError, match=words):
        made().load(place)
    assert not Path("ran").exists()


def test_of_another_model_or_optimizer(saved):
    folder, _ = saved
    model = Net()
    model.head = nn.Linear(16, 9)
    model.ups = model.up
    del model.up
    model.forward = lambda x: x
    other = made(model=model, optimizer=lambda params: optim.SGD(params, lr=0.1))
    before = weights(other)
    with pytest.raises(InputError) as refused:
        other.load(folder)
    for words in (
        "step-00000002 does not fit the model and optimizer of this engine:",
        "the checkpoint has no ups.bias (but up.bias), ups.weight (but up.weight)",
        "the model has no up.bias, up.weight",
        "other shapes: head.bias ((4,) in the checkpoint, (9,) here), head.weight",
        "it was saved with the optimizer torch.optim.adamw.AdamW, and this is torch.optim.sgd.SGD; use the same class",
    ):
        assert words in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(other).items())


def test_of_other_groups_or_another_scheduler(saved, tmp_path):
    folder, _ = saved
    engine = made(optimizer=lambda params: optim.AdamW([{"params": params[:2]}, {"params": params[2:4]}], lr=0.1))
    with pytest.raises(InputError, match=r"has groups of \[14\] parameters, and this one of \[2, 2\] \(only in the"):
        engine.load(folder)
    engine = made(lr_scheduler=lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 0.5))
    train(engine, 1)
    engine.save(tmp_path / "scheduled")
    with pytest.raises(InputError, match=r"with the lr_scheduler torch.*LambdaLR, and this is .*StepLR; use the same"):
        made(lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1)).load(tmp_path / "scheduled")


def in_groups(*order):
    """AdamW, with the first and the other parameters in groups of this order."""

    def build(params):
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.001}]
        return optim.AdamW([groups[number] for number in order])

    return build


def halved(optimizer):
    return optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_groups_in_another_order(tmp_path):
    """Settings come back by names; a scheduler knows groups by their number."""
    engine = made(optimizer=in_groups(0, 1), lr_scheduler=halved)
    train(engine, 2)
    engine.save(tmp_path)
    other = made(optimizer=in_groups(1, 0), lr_scheduler=halved)
    before = weights(other)
    with pytest.raises(InputError, match=r"has the same groups in another order: here are its 1, 0, and the lr_sched"):
        other.load(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in weights(other).items())
    same = made(optimizer=in_groups(0, 1), lr_scheduler=halved)
    same.load(tmp_path)
    alone = made(optimizer=in_groups(1, 0))
    alone.load(tmp_path)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert [group["lr"] for group in same.optimizer.param_groups] == rates
    assert [group["lr"] for group in alone.optimizer.param_groups] == rates[::-1]


@pytest.mark.parametrize("mode", ["none", "naive"])
def test_a_group_that_was_added(tmp_path, mode):
    """Saved and loaded before the step that would take it in."""

    def grown():
        engine = make_engine("one", mode, samples=16, batch=4, optimizer=lambda params: optim.AdamW(params[:4], lr=0.1))
        train(engine, 1)
        head = engine.model.head
        engine.optimizer.add_param_group({"params": [head.weight, head.bias], "lr": 0.5})
        return engine

    engine = grown()
    engine.save(tmp_path / "early")
    train(engine, 1)
    engine.save(tmp_path / "later")
    for folder in ("early", "later"):
        other = grown()
        other.load(tmp_path / folder)
        assert [len(group["params"]) for group in other.optimizer.param_groups] == [4, 2]
        assert other.optimizer.param_groups[1]["lr"] == 0.5
    expected = weights(engine)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())
    head = other.optimizer.param_groups[1]["params"][0]
    assert other.optimizer.state[head]["step"] == 1


class Odd:
    """A scheduler with state that only code can make again."""

    def step(self):
        pass

    def state_dict(self):
        return {"where": Path("here"), "what": self}


def test_saves_that_are_refused(tmp_path):
    engine = made(gradient_accumulation=2)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(InputError, match=r"engine.save\(\) was called after microbatch 1 of 2 and before the update"):
        engine.save(tmp_path)
    with pytest.raises(InputError, match=r"engine.save: keep=0 is not a number of checkpoints; give 1 or more"):
        made().save(tmp_path, keep=0)
    odd = made(lr_scheduler=Odd(), lr_interval="manual")
    with pytest.raises(InputError, match=r"the state of lr_scheduler holds objects that are not plain values or"):
        odd.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def different_arguments(rank, world_size, folder):
    engine = make_engine("dp2", "none")
    said = []
    for call in (lambda: engine.save(f"{folder}/{rank}"), lambda: engine.load(f"{folder}/{rank}")):
        try:
            call()
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.distributed
def test_ranks_that_say_different_things(tmp_path):
    expected = ["engine.save was called with different arguments", "engine.load was called with different folders"]
    for said in run_ranks(different_arguments, 2, str(tmp_path)):
        assert [words[: len(start)] for words, start in zip(said, expected, strict=True)] == expected


def test_keep(tmp_path):
    engine = made()
    for _ in range(4):
        train(engine, 1)
        engine.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert engine.save(tmp_path).name == "step-00000004.1"  # of the same step: never in the place of a complete one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004.1"]
    assert made().load(tmp_path).name == "step-00000004.1"


def test_only_checkpoints_of_this_model_are_removed(tmp_path):
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}").mkdir()
        (tmp_path / f"step-0000000{step}" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000003").write_text("a file")
    other = made(model=nn.Sequential(nn.Linear(FEATURES, CLASSES)))
    engine = made()
    for number in range(3):
        train(other, 1)
        train(engine, 1)
        places = other.save(tmp_path, keep=1), engine.save(tmp_path, keep=1)
        assert [place.name for place in places] == [f"step-0000000{number + 1}.{again}" for again in (1, 2)]
    kept = ["step-00000001", "step-00000002", "step-00000003", "step-00000003.1", "step-00000003.2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert len(list(tmp_path.glob("*/notes.txt"))) == 2


def test_what_cannot_be_removed_stays(tmp_path, monkeypatch, caplog):
    """The save is good, and so is the next one."""
    engine, remove = made(), shutil.rmtree

    def busy(path, *args, **options):
        if Path(path).name.startswith(".step-00000001"):
            raise OSError(errno.EBUSY, "Device or resource busy")
        return remove(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    train(engine, 1)
    engine.save(tmp_path / "run", keep=1)
    with caplog.at_level(logging.WARNING):
        assert engine.save(tmp_path / "run", keep=1).name == "step-00000001.1"
        assert engine.save(tmp_path / "run", keep=1).name == "step-00000001.2"
    assert ".step-00000001.tmp is no longer needed and cannot be removed (OSError: [Errno 16] Device or" in caplog.text
    train(engine, 1)
    moved = (tmp_path / "run" / "step-00000001.2").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-00000001.2").symlink_to(moved)
    place = engine.save(tmp_path / "run", keep=1)
    train(engine, 1)
    assert made().load(place).name == "step-00000002"
    assert (moved.is_dir(), (tmp_path / "run" / "step-00000001.2").is_symlink()) == (True, True)
