"""Sources as people have them: sections that another key switches off, older spellings, keys of one version only."""

from __future__ import annotations

import json

import pytest

from halfmesh.errors import InputError
from halfmesh.migration.convert import convert
from halfmesh.migration.origins import ORIGINS
from halfmesh.migration.outcome import Converted, NotUnderstood, Without
from halfmesh.migration.reading import read


def outcomes(origin, source):
    """The config as a dict, and the outcomes by key."""
    found = convert(ORIGINS[origin], source)
    return found.config.to_dict(), {entry.key: entry.outcome for entry in found.entries}


def test_a_section_that_may_be_on_is_not_said_to_be_off():
    source = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
        "amp": {"enabled": "auto", "opt_level": "O1"},
    }
    _, found = outcomes("deepspeed", source)
    for key in ("fp16.loss_scale", "fp16.hysteresis", "amp.opt_level"):
        assert isinstance(found[key], NotUnderstood)
        assert "is not known" in found[key].reason
    for source in ({"fp16": {"enabled": False, "hysteresis": 2}}, {"fp16": {"hysteresis": 2}}):
        _, found = outcomes("deepspeed", source)
        assert isinstance(found["fp16.hysteresis"], Without)
        assert "is off" in found["fp16.hysteresis"].reason


@pytest.mark.parametrize(("name", "words"), [("Lamb", "torch has no 'Lamb'"), ("SGD", "torch.optim.SGD")])
def test_an_optimizer_that_torch_does_not_have(name, words):
    _, found = outcomes("deepspeed", {"optimizer": {"type": name}})
    assert words in found["optimizer.type"].reason


def test_a_misspelt_key_of_zero_is_not_a_detail():
    _, found = outcomes("deepspeed", {"zero_optimization": {"stagge": 3, "overlap_comm": True}})
    assert "did you mean 'zero_optimization.stage'" in found["zero_optimization.stagge"].reason
    assert isinstance(found["zero_optimization.stagge"], NotUnderstood)
    assert isinstance(found["zero_optimization.overlap_comm"], Without)


def test_the_older_flags_of_offloading():
    config, _ = outcomes(
        "deepspeed", {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}}
    )
    assert config["parallel"] == {"data": {"strategy": "fsdp", "cpu_offload": True}}
    config, found = outcomes("deepspeed", {"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert config["parallel"] == {"data": {"strategy": "zero1"}}
    assert isinstance(found["zero_optimization.cpu_offload"], Without)
    _, found = outcomes("deepspeed", {"zero_optimization": {"stage": 2, "cpu_offload": False}})
    assert isinstance(found["zero_optimization.cpu_offload"], Converted)


def test_cpu_checkpointing_moves_what_is_checkpointed_and_runs_under_fsdp():
    source = {"activation_checkpointing": {"cpu_checkpointing": True}, "zero_optimization": {"stage": 3}}
    found = convert(ORIGINS["deepspeed"], source, 8)
    assert found.settings["activation_checkpoint"] == "full"
    assert found.settings["activation_offload"] is True
    assert found.findings == ()
    config, _ = outcomes("deepspeed", source | {"pipeline": {"activation_checkpoint_interval": 2}})
    assert config["activation_checkpoint"]["every"] == 2


@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED"])
def test_accelerate_reads_fsdp_config_for_fsdp_only(kind):
    section = {
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_activation_checkpointing": True,
    }
    config, found = outcomes("accelerate", {"distributed_type": kind, "fsdp_config": section})
    assert config == {}
    assert all(isinstance(found[f"fsdp_config.{key}"], Without) for key in section)
    assert f"distributed_type is {kind}" in found["fsdp_config.fsdp_offload_params"].reason


def test_accelerate_reads_deepspeed_config_for_deepspeed_only():
    section = {"zero_stage": 3, "gradient_accumulation_steps": 4}
    config, _ = outcomes("accelerate", {"distributed_type": "MULTI_GPU", "deepspeed_config": section})
    assert config == {}
    config, _ = outcomes("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    assert config == {"parallel": {"data": {"strategy": "fsdp"}}, "gradient_accumulation": 4}


def test_a_plain_no_in_yaml(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(
        "mixed_precision: no\ndistributed_type: NO\ndynamo_backend: NO\ndynamo_config:\n  dynamo_mode: default\n"
    )
    config, found = outcomes("accelerate", read(str(path), "accelerate"))
    assert config == {}
    for key in ("mixed_precision", "distributed_type", "dynamo_backend"):
        assert isinstance(found[key], Converted), found[key]


def test_fp16_of_an_old_accelerate():
    assert outcomes("accelerate", {"fp16": True})[0] == {"fp16": {"mode": "torch"}}
    assert outcomes("accelerate", {"fp16": False})[0] == {}


def test_bf16_of_sagemaker_beside_a_loss_scale():
    source = {
        "bf16": True,
        "dynamic_loss_scale": True,
        "static_loss_scale": 2.0,
        "dynamic_loss_args": {"scale_window": 1000, "scale_factor": 2.0},
    }
    config, found = outcomes("sagemaker", source)
    assert config == {"bf16": {"mode": "naive"}}
    for key in ("dynamic_loss_scale", "static_loss_scale", "dynamic_loss_args.scale_window"):
        assert "not scaled" in found[key].reason
    assert "not scaled" in found["dynamic_loss_args.scale_factor"].reason


def test_hybrid_shard_degree_clips_nothing():
    assert outcomes("sagemaker", {"hybrid_shard_degree": 4})[0] == {"parallel": {"data": {"strategy": "fsdp"}}}
    found = convert(ORIGINS["sagemaker"], {"hybrid_shard_degree": 4}, 8)
    assert found.config.parallel.data.hybrid == 4
    config, entries = outcomes("sagemaker", {"hybrid_shard_degree": 0})
    assert config == {}
    assert "the FSDP in your script" in entries["hybrid_shard_degree"].reason
    config, _ = outcomes("sagemaker", {"hybrid_shard_degree": 0, "tensor_parallel_degree": 2})
    assert config["parallel"]["data"] == {"strategy": "fsdp"}
    _, entries = outcomes("sagemaker", {"sharded_data_parallel_degree": 0})
    assert isinstance(entries["sharded_data_parallel_degree"], NotUnderstood)


def test_one_chunk_is_no_interleaving():
    config, _ = outcomes("colossal", {"model": {"num_chunks": 1}, "parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4})
    assert config["parallel"]["pipeline"] == {"size": 2, "microbatches": 4}


def test_a_key_that_is_imported_is_not_dropped(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "from base import parallel, Model, x as clip_grad_norm\nfrom colossalai.amp import AMP_TYPE\nseed = 1\n"
    )
    source = read(str(path), "colossal")
    assert list(source) == ["parallel", "clip_grad_norm", "seed"]
    _, found = outcomes("colossal", source)
    assert isinstance(found["parallel"], NotUnderstood)
    assert isinstance(found["clip_grad_norm"], NotUnderstood)


@pytest.mark.parametrize("text", ["X = " + "+".join(["1"] * 20000), "X = " + "-" * 50000 + "1"])
def test_python_that_is_nested_too_deep(text, tmp_path):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(InputError, match="nested too deep"):
        read(str(tmp_path / "config.py"), "colossal")


def test_json_that_is_nested_too_deep(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(InputError, match="nested too deep"):
        read(str(tmp_path / "config.json"), "deepspeed")


def test_a_deep_dict_is_converted_or_refused():
    text = '{"a":' * 700 + "1" + "}" * 700
    _, found = outcomes("deepspeed", json.loads(text))
    assert len(found) == 1


def test_names_near_are_looked_up_for_few_keys_only(monkeypatch):
    from halfmesh.migration import convert as module

    asked = []
    monkeypatch.setattr(module, "did_you_mean", lambda name, known: asked.append(len(list(known))) or "")
    outcomes("deepspeed", {f"key{number}": 1 for number in range(1001)})
    assert set(asked) == {0}
    outcomes("deepspeed", {"key": 1})
    assert asked[-1] > 0
