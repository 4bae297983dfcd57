"""What keys of other engines mean here: values whose meaning differs are converted by meaning, and said."""

from __future__ import annotations

import pytest

from halfmesh import load_config
from halfmesh.cli.convert_config import flatten
from halfmesh.migration.table import convert
from halfmesh.migration.tables import ORIGINS

NAIVE, ZERO1, FSDP = {"fp16": {"mode": "naive"}}, {"parallel": {"data": "zero1"}}, {"parallel": {"data": "fsdp"}}
CLIPPED = {"clip_grad_norm": 1.0}
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_activation_checkpointing": True}
OFFLOADED = {"parallel": {"data": {"strategy": "fsdp", "cpu_offload": True}}}


def stages(size, microbatches, **more):
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **more}}}


def fp16(**options):
    return {"fp16": {"mode": "naive", **options}}


def look_up(origin, source):
    return convert(ORIGINS[origin], dict(flatten(source)))


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_key_has_an_outcome_with_a_reason_or_a_setting(origin):
    keys = [key.replace("*", "x").replace("?", "c") for keys in ORIGINS[origin].rows for key in keys.split()]
    for key in (*keys, "fp17"):
        for value in (None, True, 2, 0.5, "auto", "naive", [1], {"a": 1}):
            outcome = look_up(origin, {key: value})[0].popitem()[1]
            assert outcome.note or outcome.settings, (key, value)


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        ({"fp16": {"mode": "torch", "init_scale": 128.0}}, {"fp16": {"mode": "torch", "init_scale": 128.0}}, {}),
        ({"fp16": {"mode": "naive", "hysterisis": 3}}, fp16(hysteresis=3), {}),
        (
            {"fp16": {"mode": "naive", "dynamic_grad_scale": False, "initial_scale": 64, "growth_factor": 4}},
            fp16(loss_scale=64.0),
            {"fp16.growth_factor": "without"},
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "NUM_MICRO_BATCHES": 8},
            {"parallel": {"tensor": {"size": 4}, "pipeline": {"size": 2, "microbatches": 8}}},
            {"parallel.tensor.mode": "without"},
        ),
        ({"parallel": {"tensor": {"size": 4, "mode": "sequence"}}}, {"parallel": {"context": {"size": 4}}}, {}),
        (
            {"zero": {"model_config": {"tensor_placement_policy": "cpu"}, "optimizer_config": {"initial_scale": 32}}},
            OFFLOADED | fp16(initial_scale=32.0),
            {},
        ),
        ({"MODEL": {"depth": 2}, "lr": 1}, {"MODEL": {"depth": 2}}, {"lr": "not und"}),
    ],
)
def test_colossal(source, expected, rest):
    assert_becomes("colossal", source, expected, rest)


def assert_becomes(origin, source, expected, rest):
    """`expected`: the config, in any form. `rest`: how the outcomes begin of what had no place in it."""
    outcomes, config = look_up(origin, source)
    assert list(outcomes) == [key for key, _ in flatten(source)]
    assert load_config(config) == load_config(expected)
    found = {key: outcome.kind for key, outcome in outcomes.items() if outcome.kind != "converted"}
    assert found.keys() == rest.keys()
    assert all(kind.startswith(rest[key]) for key, kind in found.items())


def test_apex():
    texts = {"opt_level": "O2", "keep_batchnorm_fp32": "True", "cast_model_type": "torch.float16"}
    assert_becomes("apex", texts, {"fp16": {"mode": "apex", **texts, "keep_batchnorm_fp32": True}}, {})


DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 500, "scale_factor": 4}}


@pytest.mark.parametrize(
    ("values", "expected", "rest"),
    [
        (
            {"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": True, "optimize": "speed"},
            stages(2, 4),
            {"optimize": "without"},
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline": "simple", "fp16": True},
            NAIVE | stages(2, 2, schedule="gpipe"),
            {},
        ),
        ({"sharded_data_parallel_degree": 4, "microbatches": 4}, FSDP | CLIPPED | {"gradient_accumulation": 4}, {}),
        ({"shard_optimizer_state": True, "sdp_gradient_clipping": 0.5}, ZERO1 | {"clip_grad_norm": 0.5}, {}),
        ({"fp16": True, "static_loss_scale": 128}, fp16(loss_scale=128.0), {}),
        ({"fp16": True, "dynamic_loss_scale": False}, fp16(loss_scale=1.0), {}),
        (DYNAMIC, fp16(growth_interval=500, growth_factor=4.0, backoff_factor=0.25), {}),
    ],
)
def test_sagemaker(values, expected, rest):
    assert_becomes("sagemaker", values, expected, rest)
    if "loss_scale" not in str(values):  # which its optimizer is given
        source = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": values}}}
        rest = {f"smdistributed.modelparallel.parameters.{key}": kind for key, kind in rest.items()}
        assert_becomes("sagemaker", source, expected, rest)


@pytest.mark.parametrize(
    ("source", "expected", "rest"),
    [
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}, "gradient_clipping": 0.0},
            fp16(initial_scale=4096.0) | {"clip_grad_norm": 0.0},
            {},
        ),
        ({"fp16": {"enabled": False, "hysteresis": 2}}, {}, {"fp16.hysteresis": "without"}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, OFFLOADED, {}),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2}},
            {"BATCH_SIZE": 32, **stages(2, 8)},
            {},
        ),
        (  # all three are kept: global_batch_size is rejected where the others do not fit it
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
            {"global_batch_size": 64, "BATCH_SIZE": 4, "gradient_accumulation": 4},
            {},
        ),
    ],
)
def test_deepspeed(source, expected, rest):
    assert_becomes("deepspeed", source, CLIPPED | expected, rest)


@pytest.mark.parametrize(
    ("kind", "source", "expected", "rest"),
    [
        (
            "MULTI_GPU",
            {"mixed_precision": "fp16", "fsdp_config": {"fsdp_offload_params": True}, "split_batches": True},
            {"fp16": {"mode": "torch"}},
            {"fsdp_config.fsdp_offload_params": "without", "split_batches": "by hand"},
        ),
        ("NO", {"mixed_precision": False, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}, {}),
        ("FSDP", {"num_machines": 2, "fsdp_config": HYBRID}, FSDP | {"activation_checkpoint": "full"}, {}),
        ("DEEPSPEED", {"mixed_precision": "fp16", "deepspeed_config": {"zero_stage": 3}}, NAIVE | FSDP | CLIPPED, {}),
        ("NO", {"parallelism_config": {"parallelism_config_tp_size": 2}}, {"parallel": {"tensor": {"size": 2}}}, {}),
    ],
)
def test_accelerate(kind, source, expected, rest):
    assert_becomes("accelerate", {"distributed_type": kind, **source}, expected, rest)


@pytest.mark.parametrize(
    ("origin", "source", "key", "words"),
    [
        ("colossal", {"fp16": {"mode": "naive"}}, "fp16.mode", "2**32"),
        ("colossal", {"seed": 3}, "seed", "ignored this key"),
        ("sagemaker", {"tensor_parallel_degree": 4}, "tensor_parallel_degree", "prescaled_batch"),
        ("sagemaker", {"microbatches": 4}, "microbatches", "divide the DataLoader's batch size"),
        ("deepspeed", {"optimizer": {"type": "Adam"}}, "optimizer.type", "torch.optim.AdamW"),
        ("deepspeed", {"train_batch_sise": 3}, "train_batch_sise", "did you mean 'train_batch_size'"),
        ("deepspeed", {"amp": {"opt_level": "O1"}}, "amp.opt_level", "amp.enabled"),
        ("sagemaker", {"partitions": 2, "pipeline_parallel_degree": 4}, "pipeline_parallel_degree", "another key says"),
    ],
)
def test_traps_and_reasons_are_said(origin, source, key, words):
    assert words in look_up(origin, source)[0][key].note
