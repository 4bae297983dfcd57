"""Checkpoints that are damaged, changed, or of something else are rejected by name, and nothing of the run changes."""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest
import torch

from halfmesh.errors import CheckpointError, InputError
from tests.support.checkpoint_runs import change_manifest, differing, make_small, train, weights


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 1 and 2, and the weights of each."""
    engine, found = make_small(), []
    for _ in range(2):
        train(engine, 1)
        engine.save(tmp_path)
        found.append(weights(engine))
    return tmp_path, found


def test_a_newest_checkpoint_that_is_damaged_is_passed_over_with_a_warning(saved, caplog):
    folder, states = saved
    (folder / "step-00000002" / "__0_0.distcp").write_bytes(b"")
    engine = make_small(seed=5)
    assert engine.load(folder).name == "step-00000001"
    assert differing(weights(engine), states[0]) == []
    assert "step-00000001, because newer checkpoints are damaged:" in caplog.text


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp", "common.pt", "rank-00000.pt"])
def test_any_damage_of_any_file_is_rejected_and_changes_nothing(saved, name):
    """Cut off, and with bits that are flipped."""
    place, chance, engine = saved[0] / "step-00000002", random.Random(3), make_small(seed=3)
    content, before = (place / name).read_bytes(), weights(engine)
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    for damaged in (changed, content[: chance.randrange(len(content))]):
        (place / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"step-00000002.*take another checkpoint") as rejected:
            engine.load(place)
        assert name in str(rejected.value)
    assert differing(weights(engine), before) == []
    assert engine.global_step == 0


def test_what_is_no_checkpoint(tmp_path, saved):
    folder, _ = saved
    for path in folder.glob("step-*/common.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints there are damaged:\n.*step-00000002(?s:.*)00001"):
        make_small().load(folder)
    (folder / "empty").mkdir()
    for place, words in (("not here", "there is no such folder"), ("empty", "it holds no complete")):
        with pytest.raises(CheckpointError, match=f"loading from .* failed: {words}.*; give the folder that"):
            make_small().load(folder / place)


def test_a_newer_format_is_rejected(saved):
    """An older checkpoint beside it is not taken for it."""
    change_manifest(saved[0] / "step-00000002", format=2, files="of another kind")
    with pytest.raises(InputError, match=r"step-00000002 has the format 2, but this version of halfmesh reads 1; load"):
        make_small().load(saved[0])


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_is_run(saved, monkeypatch):
    """Of a file whose checksum fits."""
    monkeypatch.chdir(saved[0])
    place = saved[0] / "step-00000002"
    torch.save({"optimizer": Runs()}, place / "common.pt")
    known = [(place / "common.pt").stat().st_size, hashlib.sha256((place / "common.pt").read_bytes()).hexdigest()]
    change_manifest(place, files=json.loads((place / "manifest.json").read_text())["files"] | {"common.pt": known})
    with pytest.raises(CheckpointError, match=r"loading .* failed: UnpicklingError: Weights only load failed"):
        make_small().load(place)
    assert not Path("ran").exists()
