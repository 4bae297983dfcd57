"""What keys of other engines mean here: values whose meaning differs are converted by meaning, and said."""

from __future__ import annotations

import pytest

from halfmesh import load_config
from halfmesh.cli.convert_config import flatten, read
from halfmesh.migration.table import convert
from halfmesh.migration.tables import ORIGINS

NAIVE, ZERO1, FSDP = {"fp16": {"mode": "naive"}}, {"parallel": {"data": "zero1"}}, {"parallel": {"data": "fsdp"}}
CLIPPED = {"clip_grad_norm": 1.0}
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_activation_checkpointing": True}
OFFLOADED = {"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}}


def stages(size, microbatches, **more):
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **more}}}


def look_up(origin, source):
    return convert(ORIGINS[origin], dict(flatten(source)))


def assert_becomes(origin, source, expected, rest):
    """`expected`: the config, in any form. `rest`: what had no place in it."""
    outcomes, config = look_up(origin, source)
    assert list(outcomes) == [key for key, _ in flatten(source)]
    assert load_config(config) == load_config(expected)
    assert {key: outcome.kind for key, outcome in outcomes.items() if outcome.kind != "converted"} == rest


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_key_has_an_outcome_with_a_reason_or_a_setting(origin):
    keys = [key.replace("*", "x").replace("?", "c") for keys in ORIGINS[origin].rows for key in keys.split()]
    for key in (*keys, "fp17"):
        for value in (None, True, 2, 0.5, "auto", "naive", [1], {"a": 1}):
            outcome = look_up(origin, {key: value})[0].popitem()[1]
            assert outcome.note or outcome.settings, (key, value)


def test_values_that_clash():
    found, config = look_up("sagemaker", {"partitions": 2, "pipeline_parallel_degree": 4, "microbatches": 8})
    assert config["parallel"]["pipeline"]["size"] == 2
    assert found["pipeline_parallel_degree"].note == "another key says parallel.pipeline.size = 2"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("opt_level=O2, loss_scale=128.0 keep_fp32=None", {"opt_level": "O2", "loss_scale": 128.0, "keep_fp32": None}),
        ('{"a": true, "b": {"c": null}}', {"a": True, "b": {"c": None}}),
        ("{'a': True, 'b': (1,)}", {"a": True, "b": (1,)}),
    ],
)
def test_what_is_given_as_text(given, expected):
    assert read(given, "apex") == expected


def test_a_plain_no_in_yaml(tmp_path):
    (tmp_path / "default_config.yaml").write_text("mixed_precision: no\ndistributed_type: NO\ndynamo_backend: NO\n")
    assert_becomes("accelerate", read(str(tmp_path / "default_config.yaml"), "accelerate"), {}, {})


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        ({"fp16": {"mode": "torch", "init_scale": 128.0}}, {"fp16": {"mode": "torch", "init_scale": 128.0}}, {}),
        ({"fp16": {"mode": "naive", "hysterisis": 3}}, {"fp16": {"mode": "naive", "hysteresis": 3}}, {}),
        ({"fp16": {"mode": "parallel"}}, NAIVE, {}),
        ({"fp16": {"mode": None}}, {}, {}),
        (
            {"fp16": {"mode": "naive", "dynamic_grad_scale": False, "initial_scale": 64, "growth_factor": 4}},
            {"fp16": {"mode": "naive", "loss_scale": 64.0}},
            {"fp16.growth_factor": "without"},
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "NUM_MICRO_BATCHES": 8},
            {"parallel": {"tensor": {"size": 4}, "pipeline": {"size": 2, "microbatches": 8}}},
            {"parallel.tensor.mode": "without"},
        ),
        ({"parallel": {"tensor": {"size": 4, "mode": "sequence"}}}, {"parallel": {"context": {"size": 4}}}, {}),
        ({"parallel": {"data": 2}}, {"parallel": {"data": {"size": 2}}}, {}),
        (
            {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 4, "model": {"num_chunks": 2}},
            stages(2, 4),
            {"model.num_chunks": "by hand"},
        ),
        (
            {"zero": {"model_config": {"tensor_placement_policy": "cpu"}, "optimizer_config": {"initial_scale": 32}}},
            OFFLOADED | {"fp16": {"mode": "naive", "initial_scale": 32.0}},
            {},
        ),
        ({"NUM_EPOCHS": 3, "MODEL": {"depth": 2}, "lr": 1}, {"NUM_EPOCHS": 3, "MODEL": {"depth": 2}}, None),
    ],
)
def test_colossal(source, expected, rest):
    assert_becomes("colossal", source, expected, {"lr": "not understood"} if rest is None else rest)


def test_apex():
    texts = {"keep_batchnorm_fp32": "True", "loss_scale": "128.0", "cast_model_type": "torch.float16"}
    numbers = {"keep_batchnorm_fp32": True, "loss_scale": 128.0, "cast_model_type": "float16"}
    source = {"opt_level": "O2", **texts}
    assert_becomes("apex", source, {"fp16": {"mode": "apex", "opt_level": "O2", **numbers}}, {})


@pytest.mark.parametrize(
    ("values", "expected", "rest"),
    [
        (
            {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": True, "optimize": "speed"},
            stages(2, 4),
            {"optimize": "without"},
        ),
        (
            {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "simple", "fp16": True},
            NAIVE | stages(2, 4, schedule="gpipe"),
            {},
        ),
        ({"microbatches": 4}, {"gradient_accumulation": 4}, {}),
        ({"partitions": 2}, stages(2, 2), {}),
        ({"shard_optimizer_state": True}, ZERO1, {}),
        (
            {"sharded_data_parallel_degree": 4, "shard_optimizer_state": True},
            FSDP | CLIPPED,
            {"shard_optimizer_state": "without"},
        ),
        ({"sharded_data_parallel_degree": 4, "sdp_gradient_clipping": 0.5}, FSDP | {"clip_grad_norm": 0.5}, {}),
        ({"bf16": True, "offload_activations": True}, {"bf16": {"mode": "naive"}, "activation_offload": True}, {}),
        ({"fp16": True, "static_loss_scale": 128}, {"fp16": {"mode": "naive", "loss_scale": 128.0}}, {}),
        ({"fp16": True, "dynamic_loss_scale": False}, {"fp16": {"mode": "naive", "loss_scale": 1.0}}, {}),
    ],
)
def test_sagemaker(values, expected, rest):
    assert_becomes("sagemaker", values, expected, rest)
    if "loss_scale" not in str(values):  # which its optimizer is given
        prefix = "smdistributed.modelparallel.parameters."
        source = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": values}}}
        assert_becomes("sagemaker", source, expected, {prefix + key: kind for key, kind in rest.items()})


def test_the_dynamic_loss_scale_of_sagemakers_optimizer():
    source = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 500, "scale_factor": 4}}
    options = {"growth_interval": 500, "growth_factor": 4.0, "backoff_factor": 0.25}
    assert_becomes("sagemaker", {"fp16": True, **source}, {"fp16": {"mode": "naive", **options}}, {})


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 2}},
            {"fp16": {"mode": "naive", "initial_scale": 4096.0, "min_scale": 2.0}},
            {},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 2}},
            {"fp16": {"mode": "naive", "loss_scale": 64.0}},
            {"fp16.hysteresis": "without"},
        ),
        ({"fp16": {"enabled": False, "hysteresis": 2}}, {}, {"fp16.hysteresis": "without"}),
        ({"bf16": {"enabled": True}, "gradient_clipping": 1.0}, {"bf16": {"mode": "naive"}}, {}),
        ({"zero_optimization": {"stage": 2}}, ZERO1, {}),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}},
            OFFLOADED,
            {"zero_optimization.offload_param.pin_memory": "without"},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            ZERO1,
            {"zero_optimization.offload_optimizer.device": "by hand"},
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2}},
            {"BATCH_SIZE": 32, **stages(2, 8)},
            {},
        ),
        ({"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}}, OFFLOADED, {}),
        ({"fp16": {"enabled": "auto"}}, {}, {"fp16.enabled": "not understood"}),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, {"fp16": {"mode": "apex"}}, {}),
        (  # all three are kept: global_batch_size is rejected where the others do not fit it
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            {"global_batch_size": 64, "BATCH_SIZE": 4, "gradient_accumulation": 4},
            {},
        ),
        ({"train_batch_size": "auto"}, {}, {"train_batch_size": "not understood"}),
    ],
)
def test_deepspeed(source, expected, rest):
    assert_becomes("deepspeed", source, CLIPPED | expected, rest)


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        ({}, CLIPPED, {}),
        ({"gradient_clipping": 0.5}, {"clip_grad_norm": 0.5}, {}),
        ({"gradient_clipping": 0.0}, {}, {}),
        ({"gradient_clipping": None}, {}, {}),
        ({"gradient_clipping": "auto"}, {}, {"gradient_clipping": "not understood"}),
    ],
)
def test_deepspeed_clips_where_nothing_is_said(source, expected, rest):
    assert_becomes("deepspeed", source, expected, rest)
    inner = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0, **source}}
    rest = {f"deepspeed_config.{key}": kind for key, kind in rest.items()}
    assert_becomes("accelerate", inner, expected, rest)


@pytest.mark.parametrize(
    ("kind", "source", "expected", "rest"),
    [
        ("MULTI_GPU", {"mixed_precision": "fp16", "num_processes": 4}, {"fp16": {"mode": "torch"}}, ()),
        ("NO", {"mixed_precision": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}, ()),
        ("MULTI_GPU", {"fsdp_config": {"fsdp_offload_params": True}}, {}, ["fsdp_config.fsdp_offload_params"]),
        ("MULTI_GPU", {"deepspeed_config": {"zero_stage": 3}}, {}, ["deepspeed_config.zero_stage"]),
        ("FSDP", {"num_machines": 2, "fsdp_config": HYBRID}, FSDP | {"activation_checkpoint": "full"}, ()),
        (
            "DEEPSPEED",
            {"mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 3}},
            NAIVE | FSDP | CLIPPED,
            (),
        ),
        (
            "NO",
            {"parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2}},
            {"parallel": {"tensor": {"size": 2}, "context": {"size": 2}}},
            (),
        ),
        (
            "NO",
            {"gradient_accumulation_steps": 4, "split_batches": True},
            {"gradient_accumulation": 4},
            {"split_batches": "by hand"},
        ),
    ],
)
def test_accelerate(kind, source, expected, rest):
    rest = rest if isinstance(rest, dict) else dict.fromkeys(rest, "without")
    assert_becomes("accelerate", {"distributed_type": kind, **source}, expected, rest)


@pytest.mark.parametrize(
    ("origin", "source", "key", "words"),
    [
        ("colossal", {"fp16": {"mode": "naive"}}, "fp16.mode", "2**32"),
        ("colossal", {"seed": 3}, "seed", "ignored this key"),
        ("apex", {"num_losses": 2}, "num_losses", "loss_id"),
        ("sagemaker", {"tensor_parallel_degree": 4}, "tensor_parallel_degree", "prescaled_batch"),
        ("sagemaker", {"fp16": True}, "fp16", "static loss scale of 1.0"),
        ("sagemaker", {"pipeline": "interleaved"}, "pipeline", "1f1b"),
        ("sagemaker", {"microbatches": 4}, "microbatches", "divide the DataLoader's batch size"),
        ("deepspeed", {"optimizer": {"type": "Adam"}}, "optimizer.type", "torch.optim.AdamW"),
        ("deepspeed", {"train_batch_sise": 3}, "train_batch_sise", "did you mean 'train_batch_size'"),
        ("deepspeed", {"amp": {"opt_level": "O1"}}, "amp.opt_level", "amp.enabled"),
    ],
)
def test_traps_and_reasons_are_said(origin, source, key, words):
    assert words in look_up(origin, source)[0][key].note
