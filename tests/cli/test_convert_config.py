"""halfmesh convert-config: what is printed, and the exit status."""

from __future__ import annotations

import json
import re

import pytest

from halfmesh import load_config
from tests.cli import run as halfmesh
from tests.cli import words

SOURCE = """
from halfmesh import AMP_TYPE
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
NUM_MICRO_BATCHES = 4
gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]
"""


KEYS = (
    "6 keys: 5 converted, 1 without equivalent; the comments above the config say what to do "
    "(--verbose lists all keys)\n"
)


def run(source, origin, *options):
    return halfmesh("convert-config", source, "--from", origin, *options)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colossal.py").write_text(SOURCE)
    return tmp_path


def test_what_is_printed(source):
    printed = run("colossal.py", "colossal")
    assert (printed.exit_code, printed.stderr) == (0, KEYS)
    assert printed.stdout.count("keep your loop as it is") == 1
    (source / "config.py").write_text(printed.stdout)
    assert load_config(source / "config.py").parallel.pipeline.microbatches == 4
    assert "# without equivalent: 1\n#   gradient_handler = " in run("colossal.py", "colossal", "--verbose").stdout


def test_json(source):
    answer = json.loads(run("colossal.py", "colossal", "--world-size", "8", "--json").stdout)
    assert (answer["ok"], answer["library"], answer["problems"]) == (True, "Colossal-AI", [])
    assert load_config(answer["config"]).parallel.pipeline.microbatches == 4
    rejected = run("mixed_precision=fp8 mixed=1 use_cpu=true", "accelerate", "--json")
    assert (rejected.exit_code, rejected.stderr) == (1, "")
    answer = json.loads(rejected.stdout)
    assert answer["ok"] is False
    assert [row["kind"] for row in answer["keys"]] == ["lost", "not understood", "by hand"]


@pytest.mark.parametrize(
    ("text", "origin", "lost"),
    [
        ({"mixed_precision": "fp8"}, "accelerate", "mixed_precision"),
        ({"distributed_type": "MEGATRON_LM"}, "accelerate", "distributed_type"),
        ({"fsdp_plugin": "plugin"}, "accelerate", "fsdp_plugin"),
        ({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "accelerate", "deepspeed_config_file"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "deepspeed", "mics_shard_size"),
        ({"parallel": {"sequence": {"size": 2}}}, "colossal", "sequence.size"),
        ({"hybrid_shard_degree": 0}, "sagemaker", "hybrid_shard_degree"),
        ({"distributed_type": "FSDP", "deepspeed_config": {"deepspeed_config_file": "x"}}, "accelerate", ""),
    ],
)
def test_a_lost_precision_or_sharding_is_no_success(text, origin, lost):
    printed = run(repr(text), origin)
    found = "".join(re.findall(r"^# lost: (\S+) = ", printed.stdout, re.MULTILINE))
    assert (found.endswith(lost) if lost else found == "", printed.exit_code) == (True, 1 if lost else 0)


@pytest.mark.parametrize(
    ("text", "origin", "options", "status", "said"),
    [
        ("colossal.py", "colossal", ["--world-size", "6"], 1, "# cannot run on 6 ranks: "),
        (
            "opt_level=O2 opt_levl=1",
            "apex",
            [],
            1,
            "# cannot run: fp16.opt_levl: unknown key; did you mean 'opt_level'?",
        ),
        ("mixed_precision=fp16 mixed=1", "accelerate", [], 1, "# not understood: mixed = 1: not a known key of"),
        ("gradient_accumulation_steps=4", "accelerate", [], 0, "delete the `if (i + 1) % N == 0` around the step"),
        ("fp16.enabled=true", "deepspeed", [], 0, "# check: clip_grad_norm = 1.0 is the default of DeepSpeed"),
        ("old.py", "colossal", [], 2, "from halfmesh import AMP_TYPE"),
        ("nothing.py", "colosal", [], 2, "did you mean 'colossal'?"),
        ("train.py", "apex", [], 2, "scripts are not executed; give the arguments"),
        ("{1", "apex", [], 2, "neither JSON nor a Python dict"),
    ],
)
def test_what_is_said(source, text, origin, options, status, said):
    (source / "old.py").write_text("from colossalai.amp import AMP_TYPE\n")
    result = run(text, origin, *options)
    assert (result.exit_code, said in words(result.output)) == (status, True), result.output
