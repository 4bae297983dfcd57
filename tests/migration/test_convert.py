"""Converting configs of other engines: what is read, that nothing of it runs, and that no key is dropped."""

from __future__ import annotations

import random

import pytest

from halfmesh import InputError
from halfmesh.migration.origins import ORIGINS
from halfmesh.migration.reading import read
from tests.support.converting import Converted


def flatten(data, path=()):
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key)


def nested(values):
    """A dict in which each dotted name leads to its value."""
    data: dict = {}
    for name, value in values.items():
        inner = data
        *parents, last = name.split(".")
        for parent in parents:
            if not isinstance(inner.get(parent), dict):
                inner[parent] = {}
            inner = inner[parent]
        inner[last] = value
    return data


VALUES = [None, True, False, -3, 0, 2, 64, 2**16, 0.5, 1e-3, 10**400, "auto", "naive", "apex", "O1", "O2", "dynamic"]
VALUES += ["fp16", "bf16", "cpu", "FSDP", "1d", "x\ny", (), [], {}, [1, 2], [{"type": "X"}], b"b", {"a": {"b": 1}}]
OWN = ["A", "NUM", "x y", "class", "", "x" * 300 + "a", "x" * 300 + "b", "x\nimport os", "fp17"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_key_is_in_exactly_one_list(origin):
    """Whatever a source holds; and what is written loads."""
    chance = random.Random(origin)
    known = [name for name in ORIGINS[origin].rules if not name.endswith("*")]
    for _ in range(25):
        names = chance.sample(known, min(len(known), chance.randint(0, 7))) + chance.sample(OWN, 2)
        source = nested({name: chance.choice(VALUES) for name in names})
        found = Converted(origin, source, chance.choice([None, 1, 4, 6]))
        assert len(found.keys) == len(set(found.keys)) == len(list(flatten(source))), source
        assert all(found.reasons.values())
        for row in found.answer["converted"]:
            assert row["to"] or row["says"], row


@pytest.mark.parametrize("origin", ORIGINS)
def test_no_setting_is_made_up(origin):
    found = Converted(origin, {})
    assert (found.keys, found.config) == ([], {"fp16": {"mode": "apex"}} if origin == "apex" else {})


def test_values_that_clash_or_are_refused():
    found = Converted("sagemaker", {"partitions": 2, "pipeline_parallel_degree": 4, "microbatches": 8})
    assert found.config["parallel"]["pipeline"]["size"] == 2
    reason = "it contradicts partitions, which sets parallel.pipeline.size, too"
    assert found.reasons == {"pipeline_parallel_degree": reason}
    found = Converted("apex", {"opt_level": "O2", "loss_scale": -1.0})
    assert found.config["fp16"]["opt_level"] == "O2"
    assert found.reasons["loss_scale"].startswith("halfmesh refuses it: fp16.loss_scale:")


@pytest.mark.parametrize("world_size", [None, 4])
def test_a_combination_that_is_refused_is_found(world_size):
    source = {"fp16": {"mode": "apex"}, "parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    (finding,) = Converted("colossal", source, world_size).findings
    assert "apex's contract has no verdict shared by all ranks" in finding


# --- what is read --------------------------------------------------------------------------------------------------

COLOSSAL = """
'''A docstring.'''
import os
from base import clip_grad_norm
from colossalai.amp import AMP_TYPE

open("ran", "w").close()
STEPS: int = 4 * (2 + 1)
STEPS += 1
NAME = "a" + "b"
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**10)
parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
NUM_MICRO_BATCHES = parallel["pipeline"] * 2
PATH = f"./pp{parallel['pipeline']}/"
DEVICES = os.cpu_count()
HUGE = 2**2**100


if STEPS > 3:
    MORE = 1
"""


def test_assignments_are_read_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(COLOSSAL)
    found = Converted("colossal", "config.py")
    assert not (tmp_path / "ran").exists()
    assert found.config == {
        "fp16": {"mode": "naive", "initial_scale": 1024.0},
        "parallel": {"tensor": {"size": 2}, "pipeline": {"size": 2, "microbatches": 4}},
        "STEPS": 13,
        "NAME": "ab",
        "PATH": "./pp2/",
    }
    assert found.rest == dict.fromkeys(
        ("clip_grad_norm", "line 7", "DEVICES", "HUGE", "line 19", "MORE"), "not understood"
    )
    assert found.reasons["DEVICES"].startswith("its value is known only when the file runs: copy it by hand")


@pytest.mark.parametrize(
    ("origin", "script", "expected"),
    [
        (
            "apex",
            "LEVEL = 'O2'\nmodel, optimizer = amp.initialize(model, optimizer, opt_level=LEVEL, num_losses=2)\n",
            {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}},
        ),
        (
            "sagemaker",
            "smp = {'enabled': True, 'parameters': {'partitions': 2, 'microbatches': 4}}\n"
            "estimator = PyTorch(entry_point='t.py', distribution={'smdistributed': {'modelparallel': smp}})\n",
            {"parallel": {"pipeline": {"size": 2, "microbatches": 4}}},
        ),
        ("sagemaker", "def main():\n    smp.init({'microbatches': 4})\n", {"gradient_accumulation": 4}),
        (
            "deepspeed",
            "ds = {'fp16': {'enabled': True}}\nengine = deepspeed.initialize(model=model, config=ds)\n",
            {"fp16": {"mode": "naive"}},
        ),
        ("accelerate", "accelerator = Accelerator(mixed_precision='fp16')\n", {"fp16": {"mode": "torch"}}),
    ],
)
def test_the_call_in_a_script(origin, script, expected, tmp_path):
    (tmp_path / "train.py").write_text(script)
    found = Converted(origin, str(tmp_path / "train.py")).config
    assert {key: found[key] for key in expected} == expected


def test_a_plain_no_in_yaml(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text("mixed_precision: no\ndistributed_type: NO\ndynamo_backend: NO\n")
    found = Converted("accelerate", str(path))
    assert (found.config, found.rest) == ({}, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("confg.json", r"there is no such file; did you mean 'config.json'\?"),
        ("a=1 b", "'?b'?: expected key=value pairs, such as opt_level"),
        ("wrong.py", "it cannot be read"),
        ("twice.json", "is given twice"),
        ("deep.json", "nested too deep"),
        ("two_calls.py", "different arguments, in lines 1, 2"),
    ],
)
def test_what_cannot_be_read(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "config.json": "{}",
        "wrong.py": "a = (",
        "twice.json": '{"a": 1, "a": 2}',
        "deep.json": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "two_calls.py": "amp.initialize(a, b, True, 'O1')\namp.initialize(a, b, True, 'O2')\n",
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(given, "apex")
