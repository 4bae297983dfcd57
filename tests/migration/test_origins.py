"""What keys of other engines mean here: values whose meaning differs are converted by meaning, and said."""

from __future__ import annotations

import pytest

from halfmesh.config.foreign import _ORIGINS, find_foreign
from halfmesh.migration.convert import convert
from halfmesh.migration.origins import ORIGINS
from halfmesh.migration.outcome import Converted, NotUnderstood, Without

KINDS = {Converted: "converted", Without: "without", NotUnderstood: "not understood"}


def run(origin, source, world_size=None):
    """The config as a dict, without what is understood, and the kinds of the other entries by key."""
    found = convert(ORIGINS[origin], source, world_size)
    rest = {
        entry.key: KINDS[type(entry.outcome)] for entry in found.entries if not isinstance(entry.outcome, Converted)
    }
    return found.config.to_dict(), rest


def look_of(origin, source, key, world_size=None):
    (entry,) = [entry for entry in convert(ORIGINS[origin], source, world_size).entries if entry.key == key]
    return entry.outcome.look


# --- Colossal-AI ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        ({"fp16": {"mode": "torch", "init_scale": 128.0}}, {"fp16": {"mode": "torch", "init_scale": 128.0}}, {}),
        ({"fp16": {"mode": "naive", "hysterisis": 3}}, {"fp16": {"mode": "naive", "hysteresis": 3}}, {}),
        ({"fp16": {"mode": "parallel"}}, {"fp16": {"mode": "naive"}}, {}),
        ({"fp16": {"mode": None}}, {}, {}),
        ({"fp16": {"mode": "apex", "opt_level": "O2"}}, {"fp16": {"mode": "apex", "opt_level": "O2"}}, {}),
        (
            {"fp16": {"mode": "naive", "dynamic_grad_scale": False, "initial_scale": 64, "growth_factor": 4}},
            {"fp16": {"mode": "naive", "loss_scale": 64.0}},
            {"fp16.growth_factor": "without"},
        ),
        ({"fp16": {"mode": "naive", "min_scale": None}}, {"fp16": {"mode": "naive"}}, {"fp16.min_scale": "without"}),
        (
            {"fp16": {"mode": "torch", "hysteresis": 2}},
            {"fp16": {"mode": "torch"}},
            {"fp16.hysteresis": "not understood"},
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "NUM_MICRO_BATCHES": 8},
            {"parallel": {"tensor": {"size": 4}, "pipeline": {"size": 2, "microbatches": 8}}},
            {"parallel.tensor.mode": "without"},
        ),
        (
            {"parallel": {"tensor": {"size": 4, "mode": "sequence"}}},
            {},
            {"parallel.tensor.size": "without", "parallel.tensor.mode": "without"},
        ),
        ({"parallel": {"data": 2}}, {"parallel": {"data": {"size": 2}}}, {}),
        ({"NUM_MICRO_BATCHES": 8}, {}, {"NUM_MICRO_BATCHES": "without"}),
        (
            {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "model": {"num_chunks": 2, "type": "ViT"}},
            {"parallel": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}}},
            {"model.type": "without"},
        ),
        (
            {"gradient_accumulation": 4, "clip_grad_norm": 1.0},
            {"gradient_accumulation": 4, "clip_grad_norm": {"max_norm": 1.0}},
            {},
        ),
        (
            {"zero": {"model_config": {"tensor_placement_policy": "cpu"}, "optimizer_config": {"initial_scale": 32}}},
            {
                "fp16": {"mode": "naive", "initial_scale": 32.0},
                "parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}},
            },
            {},
        ),
        (
            {"NUM_EPOCHS": 3, "MODEL": {"depth": 2}, "lr": 1},
            {"NUM_EPOCHS": 3, "MODEL": {"depth": 2}},
            {"lr": "not understood"},
        ),
    ],
)
def test_colossal(source, expected, rest):
    assert run("colossal", source) == (expected, rest)


def test_colossal_names_of_ones_own():
    found = convert(ORIGINS["colossal"], {"recompute": True, "clip_grad": 1.0})
    reasons = {entry.key: entry.outcome.reason for entry in found.of(NotUnderstood)}
    assert "UPPERCASE" in reasons["recompute"]
    assert reasons["clip_grad"].endswith("did you mean 'clip_grad_norm'?")


def test_colossal_traps_are_said():
    assert "2**32" in look_of("colossal", {"fp16": {"mode": "naive"}}, "fp16.mode")
    assert look_of("colossal", {"fp16": {"mode": "naive", "initial_scale": 2}}, "fp16.mode") == ""
    assert "one data rank" in look_of("colossal", {"BATCH_SIZE": 8}, "BATCH_SIZE")
    assert "silent replicas" in look_of("colossal", {"parallel": {"tensor": {"size": 2}}}, "parallel.tensor.size")
    assert "ignored this key" in look_of("colossal", {"seed": 3}, "seed")


# --- apex -----------------------------------------------------------------------------------------------------------


def test_apex():
    source = {
        "opt_level": "O2",
        "keep_batchnorm_fp32": "True",
        "loss_scale": "128.0",
        "cast_model_type": "torch.float16",
    }
    expected = {
        "mode": "apex",
        "opt_level": "O2",
        "keep_batchnorm_fp32": True,
        "loss_scale": 128.0,
        "cast_model_type": "float16",
    }
    assert run("apex", source) == ({"fp16": expected}, {})
    assert run("apex", {"opt_levl": "O2"}) == ({"fp16": {"mode": "apex"}}, {"opt_levl": "not understood"})
    assert "loss_id" in look_of("apex", {"num_losses": 2}, "num_losses")


# --- SageMaker ------------------------------------------------------------------------------------------------------


def parameters(values, **more):
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": values}}, **more}


@pytest.mark.parametrize(
    ("values", "expected", "rest"),
    [
        (
            {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": True, "optimize": "speed"},
            {"parallel": {"pipeline": {"size": 2, "microbatches": 4}}},
            {"optimize": "without"},
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "microbatches": 4,
                "pipeline": "simple",
                "tensor_parallel_degree": 2,
                "fp16": True,
            },
            {
                "fp16": {"mode": "naive"},
                "parallel": {"tensor": {"size": 2}, "pipeline": {"size": 2, "microbatches": 4, "schedule": "gpipe"}},
            },
            {},
        ),
        ({"microbatches": 4}, {"gradient_accumulation": 4}, {}),
        ({"partitions": 2}, {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, {}),
        ({"ddp": False}, {"parallel": {"data": {"size": 1}}}, {}),
        ({"shard_optimizer_state": True}, {"parallel": {"data": {"strategy": "zero1"}}}, {}),
        (
            {"sharded_data_parallel_degree": 4, "shard_optimizer_state": True},
            {"parallel": {"data": {"strategy": "fsdp"}}, "clip_grad_norm": {"max_norm": 1.0}},
            {},
        ),
        (
            {"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0.5},
            {"parallel": {"data": {"strategy": "fsdp"}}, "clip_grad_norm": {"max_norm": 0.5}},
            {},
        ),
        ({"bf16": True, "offload_activations": True}, {"bf16": {"mode": "naive"}, "activation_offload": True}, {}),
        (
            {"placement_strategy": "cluster", "active_microbatches": 3, "prescaled_batch": False},
            {},
            {"placement_strategy": "without", "active_microbatches": "without"},
        ),
        ({"expert_parallel_degree": 2, "context_parallel_degree": 1}, {}, {"expert_parallel_degree": "without"}),
    ],
)
def test_sagemaker(values, expected, rest):
    assert run("sagemaker", values) == (expected, rest)
    prefix = "smdistributed.modelparallel.parameters."
    assert run("sagemaker", parameters(values)) == (expected, {prefix + key: kind for key, kind in rest.items()})


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"static_loss_scale": 128}, {"loss_scale": 128.0}),
        ({"dynamic_loss_scale": False}, {"loss_scale": 1.0}),
        ({"static_loss_scale": 128, "dynamic_loss_scale": False}, {"loss_scale": 128.0}),
        ({"dynamic_loss_scale": True}, {}),
        (
            {
                "dynamic_loss_scale": True,
                "dynamic_loss_args": {"scale_window": 500, "min_scale": 2, "delayed_shift": 4, "scale_factor": 4},
            },
            {"growth_interval": 500, "min_scale": 2.0, "hysteresis": 4, "growth_factor": 4.0, "backoff_factor": 0.25},
        ),
    ],
)
def test_the_loss_scale_of_sagemakers_optimizer(values, options):
    assert run("sagemaker", {"fp16": True, **values}) == ({"fp16": {"mode": "naive", **options}}, {})


def test_sagemakers_ranks_and_copies():
    """8 ranks in 2 stages are 4 data ranks, of which 2 share the weights; the library's identity pp x tp x rdp."""
    values = {"partitions": 2, "microbatches": 4, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1.0}
    source = parameters(values, mpi={"enabled": True, "processes_per_host": 4}, instance_count=2)
    found = convert(ORIGINS["sagemaker"], source)
    assert found.world_size == 8
    assert found.config.parallel.data.hybrid == 2
    assert not found.findings
    whole = convert(ORIGINS["sagemaker"], {"sharded_data_parallel_degree": 8}, world_size=8)
    assert whole.config.parallel.data.hybrid is None


def test_sagemakers_traps_are_said():
    assert "4 times the batch size" in look_of("sagemaker", {"tensor_parallel_degree": 4}, "tensor_parallel_degree")
    prescaled = {"tensor_parallel_degree": 4, "prescaled_batch": True}
    assert look_of("sagemaker", prescaled, "tensor_parallel_degree") == ""
    assert "static 1.0" in look_of("sagemaker", {"fp16": True}, "fp16")
    assert "1f1b" in look_of("sagemaker", {"pipeline": "interleaved"}, "pipeline")
    assert "1/4 of the batch size" in look_of("sagemaker", {"microbatches": 4}, "microbatches")


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 12,
                    "loss_scale_window": 500,
                    "min_loss_scale": 2,
                }
            },
            {"fp16": {"mode": "naive", "initial_scale": 4096.0, "growth_interval": 500, "min_scale": 2.0}},
            {},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 2}},
            {"fp16": {"mode": "naive", "loss_scale": 64.0}, "on_nonfinite": "skip"},
            {"fp16.hysteresis": "without"},
        ),
        ({"fp16": {"enabled": False, "hysteresis": 2}}, {}, {"fp16.hysteresis": "without"}),
        ({"fp16": {"enabled": "auto"}}, {}, {"fp16.enabled": "not understood"}),
        (
            {"bf16": {"enabled": True}, "gradient_clipping": 1.0},
            {"bf16": {"mode": "naive"}, "clip_grad_norm": {"max_norm": 1.0}},
            {},
        ),
        ({"zero_optimization": {"stage": 1}}, {"parallel": {"data": {"strategy": "zero1"}}}, {}),
        ({"zero_optimization": {"stage": 2}}, {"parallel": {"data": {"strategy": "zero1"}}}, {}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
            {"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}},
            {"zero_optimization.offload_param.pin_memory": "without"},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {"parallel": {"data": {"strategy": "zero1"}}},
            {"zero_optimization.offload_optimizer.device": "without"},
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2}},
            {"BATCH_SIZE": 32, "parallel": {"pipeline": {"size": 2, "microbatches": 8}}},
            {},
        ),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, {"fp16": {"mode": "apex"}}, {}),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"fp16": {"mode": "torch"}}, {}),
    ],
)
def test_deepspeed(source, expected, rest):
    assert run("deepspeed", source) == (expected, rest)


@pytest.mark.parametrize(
    ("source", "ranks", "expected", "rest"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            4,
            {"BATCH_SIZE": 4, "gradient_accumulation": 4},
            {},
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 2},
            4,
            {"BATCH_SIZE": 8, "gradient_accumulation": 2},
            {},
        ),
        ({"train_batch_size": 64}, 4, {"BATCH_SIZE": 16}, {}),
        ({"train_batch_size": 64}, None, {}, {"train_batch_size": "not understood"}),
        ({"train_batch_size": 63}, 4, {}, {"train_batch_size": "not understood"}),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            {"BATCH_SIZE": 4, "gradient_accumulation": 2},
            {},
        ),
        (
            {"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            {"BATCH_SIZE": 4, "gradient_accumulation": 2},
            {"train_batch_size": "not understood"},
        ),
    ],
)
def test_deepspeeds_batch_sizes(source, ranks, expected, rest):
    assert run("deepspeed", source, ranks) == (expected, rest)


def test_deepspeeds_batch_sizes_say_how_many_ranks_there_are():
    source = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    pipeline = {**source, "pipeline": {"stages": 2}}
    assert convert(ORIGINS["deepspeed"], source).world_size == 4
    assert convert(ORIGINS["deepspeed"], pipeline).world_size == 8
    assert run("deepspeed", {**source, "train_batch_size": 65})[1] == {"train_batch_size": "not understood"}
    del pipeline["train_micro_batch_size_per_gpu"]
    config, rest = run("deepspeed", pipeline, 4)
    assert (config["BATCH_SIZE"], config["parallel"]["pipeline"]["microbatches"], rest) == (32, 4, {})
    del pipeline["gradient_accumulation_steps"]
    assert run("deepspeed", pipeline, 4)[1] == {"train_batch_size": "not understood"}


def test_deepspeeds_adam_is_adamw():
    (entry,) = convert(ORIGINS["deepspeed"], {"optimizer": {"type": "Adam"}}).of(Without)
    assert "torch.optim.AdamW" in entry.outcome.reason


# --- accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        (
            {"mixed_precision": "fp16", "distributed_type": "MULTI_GPU", "num_processes": 4},
            {"fp16": {"mode": "torch"}},
            {},
        ),
        ({"mixed_precision": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}, {}),
        ({"mixed_precision": "fp8"}, {}, {"mixed_precision": "without"}),
        (
            {
                "mixed_precision": "bf16",
                "distributed_type": "FSDP",
                "num_machines": 2,
                "num_processes": 8,
                "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_activation_checkpointing": True},
            },
            {
                "bf16": {"mode": "torch"},
                "parallel": {"data": {"strategy": "fsdp", "hybrid": 4}},
                "activation_checkpoint": {"enabled": True},
            },
            {},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_offload_params": False}},
            {"parallel": {"data": {"strategy": "fsdp", "reshard_after_forward": False}}},
            {},
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "mixed_precision": "fp16",
                "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 1.0},
            },
            {
                "fp16": {"mode": "naive"},
                "parallel": {"data": {"strategy": "fsdp"}},
                "clip_grad_norm": {"max_norm": 1.0},
            },
            {},
        ),
        (
            {"parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}},
            {"parallel": {"tensor": {"size": 2}}},
            {"parallelism_config.parallelism_config_cp_size": "without"},
        ),
        (
            {"Accelerator": {"gradient_accumulation_steps": 4, "split_batches": True}},
            {"gradient_accumulation": 4},
            {"Accelerator.split_batches": "without"},
        ),
    ],
)
def test_accelerate(source, expected, rest):
    config, found = run("accelerate", source)
    assert (config.pop("activation_checkpoint", None) is not None) == ("activation_checkpoint" in expected)
    expected.pop("activation_checkpoint", None)
    assert (config, found) == (expected, rest)


def test_the_ranks_of_an_accelerate_config():
    assert convert(ORIGINS["accelerate"], {"num_processes": 6}).world_size == 6


def test_every_hint_names_an_origin_that_takes_the_key():
    for key, name in _ORIGINS.items():
        assert f"convert-config --from {name} " in find_foreign(key.upper())
        rules = ORIGINS[name].rules
        assert {key, key.upper()} & {one.partition(".")[0] for one in rules}, key
