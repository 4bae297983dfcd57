"""accelerate's default_config.yaml, and the arguments of `Accelerator`."""

from .table import AS_HERE, CLIPPED, CONTEXT, FSDP, OFFLOAD, TENSOR, ZERO, Origin, Values, done, lost, no, on, to

_OFF = {"no": AS_HERE, False: AS_HERE}  # YAML reads a plain no as False
_KEPT = FSDP | {"parallel.data.reshard_after_forward": False}
_HYBRID = "on several machines set parallel.data.hybrid to the ranks of one"
_SHARDING = {
    **dict.fromkeys(("full_shard", 1, True), to(FSDP)),
    **dict.fromkeys(("shard_grad_op", 2, False), to(_KEPT)),
    **dict.fromkeys(("no_shard", 3), no("for whole copies write parallel.data = 'replicate'")),
    **dict.fromkeys(("hybrid_shard", 4), to(FSDP, _HYBRID)),
    **dict.fromkeys(("hybrid_shard_zero2", 5), to(_KEPT, _HYBRID)),
}


def _half(value: str, values: Values) -> object:
    kind, key = values.get("distributed_type"), value.lower()
    look = "'naive' gathers weights in half precision, as FSDP's MixedPrecision; 'torch' in fp32"
    return to({f"{key}.mode": "naive" if kind == "DEEPSPEED" else "torch"}, look if kind == "FSDP" else "")


def _clipping(values: Values) -> Values:
    """DeepSpeed's default, unless a separate DeepSpeed file may set another value."""
    decided = {"deepspeed_config.gradient_clipping", "deepspeed_config.deepspeed_config_file"} & values.keys()
    return CLIPPED if values.get("distributed_type") == "DEEPSPEED" and not decided else {}


ACCELERATE = Origin(
    title="accelerate",
    rows={
        "mixed_precision": {
            **_OFF,
            "fp16": _half,
            "bf16": _half,
            "fp8": lost("nearest is fp8 = dict(mode='torch'), by torchao"),
        },
        "distributed_type": {
            "fsdp": to(FSDP),
            "megatron_lm": lost("write parallel by hand"),
            "*": done("see parallel"),
        },
        "debug": on(to({"debug": "sync"})),
        "use_cpu cpu": on(no("pass initialize(device='cpu'); without a GPU it is the default")),
        "num_* machine_rank main_* rdzv_backend same_network gpu_ids enable_cpu_affinity commands command_file mpirun* "
        "ipex* max_restarts monitor_interval compute_environment *hostfile *launcher": done("torchrun or halfmesh run"),
        "fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_reshard_after_forward": _SHARDING,
        "fsdp_config.fsdp_offload_params": OFFLOAD,
        "fsdp_config.fsdp_activation_checkpointing": on(to({"activation_checkpoint.every": 1})),
        "fsdp_config.*": no("FSDP2 around the blocks that repeat, in shards; see parallel.data and docs/memory.md"),
        "gradient_accumulation_steps deepspeed_config.gradient_accumulation_steps": "gradient_accumulation",
        "deepspeed_config.gradient_clipping": "clip_grad_norm",
        "deepspeed_config.zero_stage": ZERO,
        "deepspeed_config.offload_*_device": OFFLOAD,
        "deepspeed_config.deepspeed_config_file": lost("convert it: halfmesh convert-config FILE --from deepspeed"),
        "dynamo_config.dynamo_backend dynamo_backend": {**_OFF, "*": to({"compile.enabled": True})},
        "parallelism_config.parallelism_config_tp_size": TENSOR,
        "parallelism_config.parallelism_config_dp_shard_size": {1: AS_HERE, "*": to(FSDP, _HYBRID)},
        "parallelism_config.parallelism_config_cp_size parallelism_config.parallelism_config_sp_size": CONTEXT,
        "fsdp_plugin deepspeed_plugin* megatron_lm_plugin torch_tp_plugin": lost("write its parallel keys by hand"),
        "*_config.* log_with device_placement project_* *_plugin kwargs* tpu_* downcast_bf16": no("no such key here"),
        "split_batches": on(no("the batch size is that of each data rank: divide it by their number")),
        "step_scheduler_with_optimizer": {True: AS_HERE, False: to({"lr_interval": "manual"})},
    },
    needs=(
        ("fsdp_config.*", "distributed_type", "FSDP", "FSDP"),
        ("deepspeed_config.*", "distributed_type", "DEEPSPEED", "DEEPSPEED"),
        ("deepspeed_config.offload_*_device", "deepspeed_config.zero_stage", 3, 2),
    ),
    always=_clipping,
    look="accelerator.accumulate and clip_grad_norm_ are in your script: gradient_accumulation, clip_grad_norm here",
)
