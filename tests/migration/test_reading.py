"""What is read of a source, and that none of it runs."""

from __future__ import annotations

import ast

import pytest

from halfmesh.errors import InputError
from halfmesh.migration.reading import read
from halfmesh.migration.source import Code
from halfmesh.migration.static import read_assignments

COLOSSAL = """
'''A docstring.'''
import os
from colossalai.amp import AMP_TYPE
from colossalai.zero.shard_utils import TensorShardStrategy

open("ran", "w").close()
STEPS: int = 4 * (2 + 1)
STEPS += 1
NAME = "a" + "b"
RATES = [1e-3, -1.0, 2**32, 2**2**100, float("inf")]
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**16, verbose=not True)
zero = {"model_config": {"shard_strategy": TensorShardStrategy()}}
DEVICES = os.cpu_count()
ALIAS = STEPS


def helper():
    return 1


if STEPS > 3:
    STEPS = 2
    MORE = 1
a, b = 1, 2
"""


def test_assignments_are_read_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(COLOSSAL)
    found = read("config.py", "colossal")
    assert not (tmp_path / "ran").exists()
    assert found["STEPS"] == 13
    assert found["ALIAS"] == 13
    assert found["NAME"] == "ab"
    assert found["RATES"] == Code("[0.001, -1.0, 2 ** 32, 2 ** 2 ** 100, float('inf')]")
    assert found["fp16"] == {"mode": "naive", "initial_scale": 65536, "verbose": False}
    assert found["zero"] == {"model_config": {"shard_strategy": Code("TensorShardStrategy()")}}
    assert isinstance(found["zero"]["model_config"]["shard_strategy"], Code)
    assert found["DEVICES"] == Code("os.cpu_count()")
    assert found["helper"] == Code("def helper")
    assert isinstance(found["MORE"], Code)
    assert found["line 7"] == "open('ran', 'w').close()"
    assert found["line 22"].startswith("if STEPS > 3:")
    assert {"line 25", "a", "b"} <= set(found)
    assert "line 3" not in found, "imports are no keys"


def test_what_is_calculated_from_other_values():
    source = (
        "SIZE = 2\nparallel = dict(pipeline=SIZE, tensor=dict(size=SIZE))\nNUM_MICRO_BATCHES = parallel['pipeline']\n"
        "PATH = f'./pp{SIZE}_tp{parallel[\"tensor\"][\"size\"]}/'\nWRONG = parallel['data']\nWIDE = f'{SIZE:>3}'\n"
        "LAST = [1, 2][5]\nHUGE = 'a' * 10**9\nNONE = -'a'\nZERO = 1 // 0"
    )
    found = read_assignments(ast.parse(source))
    assert (found["NUM_MICRO_BATCHES"], found["PATH"]) == (2, "./pp2_tp2/")
    assert all(isinstance(found[name], Code) for name in ("WRONG", "WIDE", "LAST", "HUGE", "NONE", "ZERO"))


def test_an_import_of_everything_is_told():
    assert list(read_assignments(ast.parse("from base import *\nX = 1"))) == ["line 1", "X"]


def test_the_call_in_an_apex_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from apex import amp\nLEVEL = 'O2'\n"
        "model, optimizer = amp.initialize(model, optimizer, opt_level=LEVEL, loss_scale=args.scale, **more)\n"
    )
    found = read(str(script), "apex")
    assert set(found) == {"models", "optimizers", "opt_level", "loss_scale", "more more"}
    assert found["opt_level"] == "O2"
    assert isinstance(found["loss_scale"], Code)
    script.write_text("amp.initialize(a, b, True, 'O1')\namp.initialize(a, b, True, 'O2')\n")
    with pytest.raises(InputError, match=r"different arguments, in lines 1, 2"):
        read(str(script), "apex")
    script.write_text("print(3)")
    with pytest.raises(InputError, match=r"there is no call of amp.initialize in it"):
        read(str(script), "apex")


def test_an_estimator_and_its_script(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text(
        "smp = {'enabled': True, 'parameters': {'partitions': 2}}\n"
        "mpi = {'enabled': True, 'processes_per_host': 8}\n"
        "estimator = PyTorch(entry_point='t.py', instance_count=2, "
        "distribution={'smdistributed': {'modelparallel': smp}, 'mpi': mpi})\n"
    )
    found = read(str(script), "sagemaker")
    assert found["instance_count"] == 2
    assert found["distribution"]["smdistributed"]["modelparallel"]["parameters"] == {"partitions": 2}
    script.write_text("def main():\n    smp.init({'microbatches': 4, 'fp16': args.fp16})\n")
    assert read(str(script), "sagemaker") == {"parameters": {"microbatches": 4, "fp16": Code("args.fp16")}}
    script.write_text("optimizer = smp.DistributedOptimizer(optimizer, static_loss_scale=128.0)\n")
    assert read(str(script), "sagemaker") == {"optimizer": Code("optimizer"), "static_loss_scale": 128.0}


def test_scripts_of_deepspeed_and_accelerate(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("ds = {'fp16': {'enabled': True}}\nengine = deepspeed.initialize(model=model, config=ds)\n")
    assert read(str(script), "deepspeed") == {"fp16": {"enabled": True}}
    script.write_text("accelerator = Accelerator(mixed_precision='fp16')\n")
    assert read(str(script), "accelerate") == {"Accelerator": {"mixed_precision": "fp16"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "opt_level=O2 loss_scale=128.0, keep_batchnorm_fp32=True",
            {"opt_level": "O2", "loss_scale": 128.0, "keep_batchnorm_fp32": True},
        ),
        ("enabled=false", {"enabled": False}),
        ('{"opt_level": "O2", "enabled": true}', {"opt_level": "O2", "enabled": True}),
        ("{'a': dict(b=2**3)}", {"a": {"b": 8}}),
    ],
)
def test_pairs_and_dicts(given, expected):
    assert read(given, "apex") == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("confg.json", r"there is no such file; did you mean 'config.json'\?"),
        ("{'a': f()", "neither JSON nor a Python dict"),
        ("a=1 b", "'?b'?: expected key=value pairs, such as opt_level"),
        ("a=1 a=2", "'?a'? is given twice"),
        ("list.json", r"its top level is a list"),
        ("text.toml", r"its ending is not one of \.py"),
        ("wrong.py", "it cannot be read"),
        ("twice.json", "is given twice"),
    ],
)
def test_what_cannot_be_read(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "config.json": "{}",
        "list.json": "[]",
        "text.toml": "",
        "wrong.py": "a = (",
        "twice.json": '{"a": 1, "a": 2}',
    }.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(given, "colossal")
