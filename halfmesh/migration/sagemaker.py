"""The parameters of SageMaker's model parallel library, and of its optimizer's loss scale."""

from .table import AS_HERE, CONTEXT, FSDP, MICROBATCHES, STAGES, TENSOR, ZERO1, Origin, Values, done, lost, no, on, to

_SHARDED = to(FSDP, "with more data ranks than this, write parallel.data.hybrid: that many ranks share the weights")
_SCHEDULE = "parallel.pipeline.schedule"
_DIVIDE = "without a pipeline a batch is not split: divide the dataloader's batch size by it"


def _stages(values: Values) -> int:
    stages = values.get("pipeline_parallel_degree", values.get("partitions"))
    return stages if isinstance(stages, int) else 1


def _defaults(values: Values) -> dict[str, object]:
    """SageMaker's defaults. (1f1b needs at least a microbatch for each stage.)"""
    settings: dict[str, object] = {}
    if {"static_loss_scale", "dynamic_loss_scale"} & values.keys() and values.get("bf16") is not True:
        settings["fp16.mode"] = "naive"
    if _stages(values) > 1 and "microbatches" not in values:
        settings[MICROBATCHES] = _stages(values)
    if values.get("sharded_data_parallel_degree") not in (None, 1) and "sdp_gradient_clipping" not in values:
        settings["clip_grad_norm"] = 1.0
    return settings


SAGEMAKER = Origin(
    title="SageMaker's model parallel library",
    prefix="smdistributed.modelparallel.parameters.",
    rows={
        "pipeline_parallel_degree partitions": STAGES,
        "microbatches": lambda value, values: (
            MICROBATCHES if _stages(values) > 1 else ("gradient_accumulation", _DIVIDE if value > 1 else "")
        ),
        "pipeline": {"simple": to({_SCHEDULE: "gpipe"}), "interleaved": to({_SCHEDULE: "1f1b"}, "it is 1f1b here")},
        "tensor_parallel_degree": (TENSOR, "unless prescaled_batch: multiply the loader's batch size by it"),
        "auto_partition": {True: AS_HERE, False: no("name the stages in parallel.pipeline.partition")},
        "ddp": {True: AS_HERE, False: to({"parallel.data.size": 1}, "start as many ranks as there are parts")},
        "fp16 fp16_params": on(to({"fp16.mode": "naive"}, "a static 1.0 there, where the optimizer got no loss scale")),
        "bf16": on(to({"bf16.mode": "naive"})),
        "static_loss_scale": "fp16.loss_scale",
        "dynamic_loss_scale": lambda value, values: to(
            {"fp16.loss_scale": "dynamic" if value else values.get("static_loss_scale", 1.0)}
        ),
        "dynamic_loss_args.init_scale": "fp16.initial_scale",
        "dynamic_loss_args.scale_window": "fp16.growth_interval",
        "dynamic_loss_args.min_scale": "fp16.min_scale",
        "dynamic_loss_args.delayed_shift": "fp16.hysteresis",
        "dynamic_loss_args.scale_factor": lambda value, values: to(
            {"fp16.growth_factor": value, "fp16.backoff_factor": 1 / value}
        ),
        "dynamic_loss_args.*": no("hysteresis is refilled when the scale grows, and not before"),
        "shard_optimizer_state": on(to(ZERO1)),
        "sharded_data_parallel_degree": {1: AS_HERE, "*": _SHARDED},
        "hybrid_shard_degree": {0: lost("the FSDP of your script: parallel = dict(data='fsdp')"), "*": _SHARDED},
        "sdp_gradient_clipping": "clip_grad_norm",
        "offload_activations sm_activation_offloading": "activation_offload",
        "random_seed": "seed",
        "context_parallel_degree": CONTEXT,
        "expert_parallel_degree": ("parallel.expert.size", "multiply the loader's batch size by it"),
        "optimize prescaled_batch placement_strategy memory_weight active_* activation_loading_horizon contiguous "
        "horovod *_partition ddp_* trace_* deterministic_server static_mode fast_mode partition_file sdp_* "
        "skip_tracing _sharded_data_parallel delayed_param*": no("there is no such choice here; see docs/memory.md"),
        "*enabled smdistributed.dataparallel.* torch_distributed.* pytorchddp.* mpi.* instance_*": done("halfmesh run"),
    },
    needs=(
        ("static_loss_scale dynamic_loss_scale dynamic_loss_args.*", "bf16", False, False),
        ("static_loss_scale", "dynamic_loss_scale", False, False),
        ("dynamic_loss_args.*", "dynamic_loss_scale", True, False),
        ("shard_optimizer_state", "sharded_data_parallel_degree", 1, 1),
    ),
    always=_defaults,
    look="SageMaker's rdp is dp here, its dp is dp x tp, its mp is pp x tp; pp x dp x tp is the number of ranks",
)
