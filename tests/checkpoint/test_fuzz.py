"""Checkpoints and weights in which something else stands than was saved, with checksums that fit: CheckpointError or
InputError that names the folder, or what was saved is loaded. FUZZ=full tries thousands."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import resource
import shutil
import struct

import pytest
import torch

from halfmesh.engine.checkpointing import folder as folders
from halfmesh.errors import CheckpointError, InputError
from tests.support.checkpoint_runs import change_manifest, make_engine, train

MANY = 40 if os.environ.get("FUZZ") == "full" else 1
GONE = object()
ODD = [GONE, None, 0, -1, 1.5, "x", "", [], {}, [1], {"a": 1}, True, 10**30, float("nan"), "../x", "/etc/passwd", [[]]]
TENSORS = [torch.zeros(3), torch.zeros(0, dtype=torch.uint8), torch.zeros(5056, dtype=torch.uint8)]


def made():
    return make_engine("one", "torch", seed=3, samples=16, batch=4, lr_scheduler=schedule)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine = make_engine("one", "torch", samples=16, batch=4, lr_scheduler=schedule)
    train(engine, 1)
    folder = tmp_path_factory.mktemp("saved")
    engine.save_weights(folder / "model.safetensors")
    engine.save_weights(folder / "model.pt", format="torch")
    engine.save_weights(folder / "parts" / "model.safetensors", max_file_gb=4e-6)
    return engine.save(folder)


def flat(value):
    """The numbers and words in `value`, to be compared exactly."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().numpy().tobytes()]
    if isinstance(value, dict):
        return [part for key, item in value.items() for part in (repr(key), *flat(item))]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in flat(item)]
    return [repr(value)]


class Trial:
    """An engine that is given one damaged thing after another."""

    def __init__(self, saved, tmp_path):
        self.saved, self.place = saved, tmp_path / "checkpoint"
        torch.manual_seed(0)
        self.engine = made()
        self.before = flat(self.engine.state_dict())
        self.late = 0

    def load(self, damage, sign=True, late=False):
        """Whether it was loaded. `late`: damage within files of tensors, which may be found after the first change."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.saved, self.place)
        damage(self.place)
        if sign:
            names = [path.name for path in self.place.iterdir() if path.name != "manifest.json"]
            change_manifest(self.place, files=folders.describe(self.place, names))
        return self.attempt(lambda: self.engine.load(self.place), str(self.place), late)

    def attempt(self, work, named, late=False):
        try:
            work()
        except (CheckpointError, InputError) as raised:
            error = raised
        else:
            self.anew()
            return True
        text = str(error)
        is_late = "when weights were changed already" in text
        was = flat(self.engine.state_dict())
        if is_late:
            self.anew()
        checks = {named in text: "the folder is not named", len(text) < 20_000: "too long", late or not is_late: "late"}
        problems = [words for is_right, words in checks.items() if not is_right]
        assert not problems, (problems, text[:500])
        assert is_late or was == self.before, ("something has changed", text)
        return False

    def anew(self):
        torch.manual_seed(0)
        self.engine = made()
        random_before = self.engine.state_dict()
        self.before = flat(random_before)


@pytest.fixture
def trial(saved, tmp_path):
    return Trial(saved, tmp_path)


def paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def put(value, path, new):
    """A copy of `value` with `new` at `path`; without what is there, if it is GONE."""
    if not path:
        return new
    copied, key = (dict(value) if isinstance(value, dict) else list(value)), path[0]
    if new is GONE and len(path) == 1:
        del copied[key]
    else:
        copied[key] = put(copied[key], path[1:], new)
    return type(value)(copied) if isinstance(value, tuple) else copied


def changes(content, odd, chance, each=2):
    """`content` with each of its parts, one at a time, replaced by some of what is odd."""
    for path in paths(content):
        if len(path) > 3 and chance.random() > 0.02 * MANY:  # random numbers are a thousand integers
            continue
        for new in chance.sample(odd, min(len(odd), each * MANY if path else len(odd))):
            if path or new is not GONE:
                yield put(content, path, new), f"{path} = {new!r}"


@pytest.mark.parametrize("signed", [True, False])
def test_anything_in_the_manifest(trial, signed):
    content = json.loads((trial.saved / "manifest.json").read_text())
    content.pop("sha256")
    for changed, what in changes(content, ODD, random.Random(1), 1 if MANY == 1 else 2):

        def damage(place, changed=changed):
            if signed and isinstance(changed, dict):
                changed["sha256"] = folders.digest_of(changed)
            (place / "manifest.json").write_text(json.dumps(changed))

        assert not trial.load(damage, sign=False) or signed, what


def test_more_ranks_than_files(trial):
    """Nothing is counted up to such a number."""
    for ranks in (2, 10**30):
        layout = {"pipeline": ranks, "data": 1, "tensor": 1}
        assert not trial.load(lambda place, layout=layout: change_manifest(place, layout=layout), sign=False)


def test_numbers_that_no_tensor_holds(trial):
    content = torch.load(trial.saved / "common.pt", weights_only=True)
    for name in ("scale", "max_scale", "growth_tracker"):
        changed = {**content, "scalers": [content["scalers"][0] | {name: 10**30}]}
        assert not trial.load(lambda place, changed=changed: torch.save(changed, place / "common.pt")), name


def test_names_of_files(trial, tmp_path):
    outside = tmp_path / "outside"
    shutil.copy(trial.saved / "common.pt", outside)
    content = json.loads((trial.saved / "manifest.json").read_text())
    for name in ("..", ".", "../outside", str(outside), "a/b", "", "\0", "\ud800", "x" * 5000, "link", "CON"):

        def damage(place, name=name):
            (place / "link").symlink_to(outside)
            files = content["files"] | {name: [1, "0" * 64]}
            change_manifest(place, files=files)

        assert not trial.load(damage, sign=False), name
    assert not trial.load(lambda place: ((place / "common.pt").unlink(), (place / "common.pt").symlink_to(outside)))


@pytest.mark.parametrize("name", ["common.pt", "rank-00000.pt"])
def test_anything_in_what_is_not_tensors(trial, name):
    content = torch.load(trial.saved / name, weights_only=True)
    for changed, _ in changes(content, ODD + TENSORS, random.Random(2), 1):
        trial.load(lambda place, changed=changed: torch.save(changed, place / name))


class Canary:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["common.pt", "rank-00000.pt", ".metadata", "__0_0.distcp"])
def test_code(trial, name, tmp_path):
    canary = tmp_path / "canary"
    for protocol in (0, 2, 4):
        code = pickle.dumps(Canary(canary), protocol).ljust(2 * 10**5)  # as long as .metadata says that files are
        assert not trial.load(lambda place, code=code: (place / name).write_bytes(code), late=name == "__0_0.distcp")
        for module in (b"os\nsystem", b"posix\nsystem", b"builtins\neval", b"torch\nhub.load", b"torch\nos.system"):
            code = (b"c" + module + b"\n(S'touch " + os.fsencode(canary) + b"'\ntR.").ljust(2 * 10**5)
            assert not trial.load(lambda place, code=code: (place / name).write_bytes(code), late=name.startswith("__"))
    for module in (b"os\nsystem", b"pathlib\nPath", b"pathlib\nos.system"):
        code = b"\x80\x02c" + module + b"\nU\x05touchq\x00\x85R."
        assert not trial.load(lambda place, code=code: (place / ".metadata").write_bytes(code))
    assert not canary.exists()


@pytest.mark.parametrize("name", ["common.pt", "rank-00000.pt", ".metadata", "__0_0.distcp"])
def test_bytes(trial, name):
    """Cut off, and with bits that are flipped."""
    content, chance = (trial.saved / name).read_bytes(), random.Random(3)
    late = name in ("__0_0.distcp", ".metadata")  # which says where in a file a tensor begins
    for length in [0, 1, len(content) - 1, *(chance.randrange(len(content)) for _ in range(4 * MANY))]:
        trial.load(lambda place, n=length: (place / name).write_bytes(content[:n]), late=late)
    for _ in range(25 * MANY):
        changed = bytearray(content)
        for _ in range(chance.choice([1, 1, 20])):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        trial.load(lambda place, changed=changed: (place / name).write_bytes(changed), late=late)


def test_a_number_for_which_memory_would_be_made(trial):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for code in (b"Nr\x00\x00\x00\x10.", b"Np300000000\n."):
        assert not trial.load(lambda place, code=code: (place / ".metadata").write_bytes(code))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB; 4 GiB and 5 without the check


def test_opcodes(trial):
    """Random ones in `.metadata`."""
    chance, codes = (
        random.Random(4),
        [bytes([code]) for code in b"(.012FIJKLMNPQRSTUVXabcdeghijlopqrstu})]\x80\x85\x8c\x93\x94"],
    )
    for _ in range(60 * MANY):
        code = b"".join(chance.choice(codes) for _ in range(chance.randrange(12)))
        assert not trial.load(lambda place, code=code: (place / ".metadata").write_bytes(code + b"."))


def metadata_of(place):
    return pickle.loads((place / ".metadata").read_bytes())


@pytest.mark.parametrize(
    "what", ["size", "chunks", "offset", "length", "file", "gone", "dtype", "beyond", "kind", "store"]
)
def test_what_does_not_fit_in_the_metadata(trial, what):
    """Sizes for which no memory may be made, parts that are missing, places that are elsewhere."""
    names = [name for name in metadata_of(trial.saved).state_dict_metadata if "weight" in name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in (names[0], names[-1], next(name for name in names if name.startswith("counters"))):

        def damage(place, name=name):
            metadata = metadata_of(place)
            tensor = metadata.state_dict_metadata[name]
            index = next(index for index in metadata.storage_data if index.fqn == name)
            huge = torch.Size([2**40])
            if what == "size":
                tensor.size = huge
            elif what == "beyond":
                tensor.size, tensor.chunks[0].sizes = huge, huge
                tensor.chunks[0].offsets = torch.Size([0])
                metadata.storage_data[type(index)(name, torch.Size([0]))] = metadata.storage_data[index]
            elif what == "chunks":
                tensor.chunks = []
            elif what == "gone":
                del metadata.storage_data[index]
            elif what == "dtype":
                tensor.properties.dtype = "x"
            elif what == "kind":
                metadata.state_dict_metadata[name] = 1
            elif what == "store":
                metadata.storage_data[index] = None
            else:
                value = {"offset": 10**9, "length": 10**12, "file": "../x"}[what]
                object.__setattr__(metadata.storage_data[index], {"file": "relative_path"}.get(what, what), value)
            (place / ".metadata").write_bytes(pickle.dumps(metadata))

        assert not trial.load(damage)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def weights_trial(trial, path):
    return trial.attempt(lambda: trial.engine.load_weights(path), str(path.parent), late=True)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_bytes_of_weights(trial, name, tmp_path):
    content, chance = (trial.saved.parent / name).read_bytes(), random.Random(5)
    path = tmp_path / name
    for _ in range(25 * MANY):
        changed = bytearray(content)
        for _ in range(chance.choice([1, 1, 20])):
            changed[chance.randrange(min(len(changed), chance.choice([8, 200, 10**9])))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed[: chance.choice([None, None, chance.randrange(len(content))])])
        weights_trial(trial, path)


def test_headers_of_safetensors(trial, tmp_path):
    content = (trial.saved.parent / "model.safetensors").read_bytes()
    path, length = tmp_path / "model.safetensors", struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    for size in (0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", size) + content[8:])
        assert not weights_trial(trial, path)
    for changed, what in changes(header, ODD, random.Random(6), 1):
        text = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
        assert not weights_trial(trial, path) or "__metadata__" in what, what


def test_indices_of_weights(trial, tmp_path):
    source, folder = trial.saved.parent / "parts", tmp_path / "parts"
    shutil.copytree(source, folder)
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    outside = tmp_path / "outside.safetensors"
    shutil.copy(next(source.glob("*.safetensors")), outside)
    names = ["../outside.safetensors", str(outside), "..", ".", "\0", "a" * 5000, path.name]
    for changed, what in changes(content, ODD + names, random.Random(7), 2):
        path.write_text(json.dumps(changed))
        assert not weights_trial(trial, folder / "model.safetensors") or "metadata" in what, what
    for text in ("", "[" * 100_000, "\ufeff{}", "nan", '{"weight_map": {"a": "a"}}' * 2):
        path.write_text(text)
        assert not weights_trial(trial, folder / "model.safetensors"), text[:20]


def test_code_in_weights(trial, tmp_path):
    canary = tmp_path / "canary"
    for name in ("model.pt", "model.bin", "model.safetensors"):
        torch.save({"first.weight": Canary(canary)}, tmp_path / name)
        assert not weights_trial(trial, tmp_path / name)
        (tmp_path / name).write_bytes(pickle.dumps({"first.weight": Canary(canary)}))
        assert not weights_trial(trial, tmp_path / name)
    assert not canary.exists()
