"""halfmesh convert-config: what is printed, and the exit status."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from halfmesh import load_config
from halfmesh.cli import app

SOURCE = """
from halfmesh import AMP_TYPE
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
NUM_MICRO_BATCHES = 4
gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]
"""


def run(*arguments):
    return CliRunner().invoke(app, ["convert-config", *map(str, arguments)])


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colossal.py").write_text(SOURCE)
    return tmp_path


def test_what_is_printed(source):
    """What needs action; all keys with --verbose. Nothing is said twice."""
    printed = run("colossal.py", "--from", "colossal")
    assert printed.exit_code == 0
    assert printed.stderr == (
        "6 keys: 5 converted, 1 without equivalent; the comments above the config say what to do (--verbose lists all "
        "keys)\n"
    )
    assert "NUM_MICRO_BATCHES" not in printed.stdout
    assert "gradient_handler" not in printed.stdout
    assert printed.stdout.count("keep your loop as it is") == 1
    (source / "config.py").write_text(printed.stdout)
    assert load_config(source / "config.py").parallel.pipeline.microbatches == 4
    all_keys = run("colossal.py", "--from", "colossal", "--verbose")
    assert "#   NUM_MICRO_BATCHES = 4 -> parallel.pipeline.microbatches = 4" in all_keys.stdout
    assert "# without equivalent: 1\n#   gradient_handler = " in all_keys.stdout
    assert all_keys.stdout.count("keep your loop as it is") == 1


def test_json(source):
    answer = json.loads(run("colossal.py", "--from", "colossal", "--world-size", "8", "--json").stdout)
    assert (answer["ok"], answer["library"], answer["problems"]) == (True, "Colossal-AI", [])
    assert load_config(answer["config"]) == load_config(
        {"fp16": {"mode": "naive"}, "parallel": {"pipeline": {"size": 2, "microbatches": 4}, "tensor": 2}}
    )
    kinds = {row["key"]: row["kind"] for row in answer["keys"]}
    assert (kinds["fp16.mode"], kinds["gradient_handler"]) == ("converted", "without")
    rejected = run("mixed_precision=fp8 mixed=1 use_cpu=true", "--from", "accelerate", "--json")
    assert (rejected.exit_code, rejected.stderr) == (1, "")
    answer = json.loads(rejected.stdout)
    assert answer["ok"] is False
    assert [row["kind"] for row in answer["keys"]] == ["lost", "not understood", "by hand"]


def test_a_config_in_one_dict_is_what_it_contains(source):
    keys = SOURCE.replace("from halfmesh import AMP_TYPE\n", "").strip().replace("\n", ",\n")
    (source / "whole.py").write_text(f"from halfmesh import AMP_TYPE\nCONFIG = dict(\n{keys},\n)\n")
    whole, spread = run("whole.py", "--from", "colossal"), run("colossal.py", "--from", "colossal")
    assert whole.exit_code == 0
    assert whole.stdout == spread.stdout.replace("colossal.py", "whole.py")


def test_what_cannot_run_or_is_not_understood_is_said_in_the_config(source):
    result = run("colossal.py", "--from", "colossal", "--world-size", "6")
    assert result.exit_code == 1
    assert "; the config cannot run on 6 ranks; " in result.stderr
    assert "# cannot run on 6 ranks: " in result.stdout
    assert "fp16 = dict(" in result.stdout, "it is there to be changed"
    result = run("opt_level=O2 opt_levl=1", "--from", "apex")
    assert result.exit_code == 1
    assert "# cannot run: fp16.opt_levl: unknown key; did you mean 'opt_level'?" in result.stdout
    result = run("mixed_precision=fp16 mixed=1", "--from", "accelerate")
    assert result.exit_code == 1
    assert "# not understood: mixed = 1: not a known key of accelerate" in result.stdout


@pytest.mark.parametrize(
    ("text", "origin", "lost"),
    [
        ({"mixed_precision": "fp8"}, "accelerate", ["mixed_precision"]),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "accelerate", []),
        ({"distributed_type": "MEGATRON_LM"}, "accelerate", ["distributed_type"]),
        ({"fsdp_plugin": "plugin"}, "accelerate", ["fsdp_plugin"]),
        ({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "accelerate", "deepspeed_config_file"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "deepspeed", "mics_shard_size"),
        ({"parallel": {"sequence": {"size": 2}}}, "colossal", "sequence.size"),
        ({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, "colossal", []),
        ({"hybrid_shard_degree": 0}, "sagemaker", ["hybrid_shard_degree"]),
        ({"expert_parallel_degree": 2}, "sagemaker", []),
        ({"context_parallel_degree": 1, "tensor_parallel_degree": 2}, "sagemaker", []),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, "deepspeed", []),
        ({"fsdp_plugin": None, "log_with": "wandb"}, "accelerate", []),
        ({"distributed_type": "FSDP", "deepspeed_config": {"deepspeed_config_file": "x"}}, "accelerate", []),
    ],
)
def test_a_lost_precision_or_sharding_is_no_success(text, origin, lost):
    printed = run(repr(text), "--from", origin)
    found = re.findall(r"^# lost: (\S+) = ", printed.stdout, re.MULTILINE)
    assert bool(found) == bool(lost)
    assert any(lost in key for key in found) if isinstance(lost, str) else found == lost
    assert printed.exit_code == (1 if lost else 0)
    assert (f"{len(found)} lost" in printed.stderr) == bool(lost)


def test_an_accumulation_says_that_step_is_called_for_each_batch():
    result = run("gradient_accumulation_steps=4", "--from", "accelerate")
    assert result.exit_code == 0
    assert "delete the `if (i + 1) % N == 0` around the step" in result.stdout
    assert "delete the" not in run("opt_level=O2", "--from", "apex").stdout


def test_a_default_of_another_engine_is_said_and_written():
    result = run("{'zero_optimization': {'stage': 1}}", "--from", "deepspeed")
    assert result.exit_code == 0
    assert "# check: clip_grad_norm = 1.0 is the default of DeepSpeed" in result.stdout
    assert "\nclip_grad_norm = 1.0" in result.stdout
    assert "clip_grad_norm = 1" not in run("gradient_clipping=0", "--from", "deepspeed").stdout


def test_imports_of_colossalai_are_named(source):
    (source / "colossal.py").write_text("from colossalai.amp import AMP_TYPE\n")
    result = run("colossal.py", "--from", "colossal")
    assert result.exit_code == 2
    assert "from halfmesh import AMP_TYPE" in " ".join(result.stderr.replace("|", " ").replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py", "--from", "colosal"], "did you mean 'colossal'?"),
        (["nothing.py", "--from", "colossal"], "there is no such file"),
        (["train.py", "--from", "apex"], "scripts are not executed; give the arguments"),
    ],
)
def test_mistakes(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("|", " ").replace("│", " ").split())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gradient_accumulation_steps=4", ["clip_grad_norm"]),
        ("mixed_precision=no", ["gradient_accumulation", "clip_grad_norm"]),
    ],
)
def test_what_is_set_is_not_asked_for(source, said):
    result = run(source, "--from", "accelerate")
    found = [line.split()[3].rstrip(",") for line in result.stdout.splitlines() if line.startswith("# check: set ")]
    assert found == said
