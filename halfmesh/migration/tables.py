"""The keys of other libraries: a table for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import page
from .table import AS_HERE, Origin, Values, do, done, lost, no, on, to

STAGES, MICROBATCHES, TENSOR = "parallel.pipeline.size", "parallel.pipeline.microbatches", "parallel.tensor.size"
_SHARDING_PAGE = page("Sharding: zero1 and fsdp")
CONTEXT = "parallel.context.size", f"pass whole sequences to engine(...); see {page('Context parallelism')}"
CLIPPED = {"clip_grad_norm": 1.0}  # DeepSpeed's default of gradient_clipping since 0.19
ZERO1, FSDP = {"parallel.data.strategy": "zero1"}, {"parallel.data.strategy": "fsdp"}
ZERO = {0: AS_HERE, 1: to(ZERO1), 2: to(ZERO1, "zero1 computes the same, but does not shard gradients"), 3: to(FSDP)}
_OFFLOADED = to(
    {"parallel.data.cpu_offload": True}, "it keeps parameters, gradients and optimizer state in host memory"
)
_TO_DISK = do("halfmesh cannot offload to disk; parallel.data.cpu_offload=True uses host memory")
OFFLOAD = {False: AS_HERE, "none": AS_HERE, True: _OFFLOADED, "cpu": _OFFLOADED, "nvme": _TO_DISK}
_OFF = {"no": AS_HERE, False: AS_HERE}  # YAML reads a plain no as False
_KEPT = FSDP | {"parallel.data.reshard_after_forward": False}
_HYBRID = "on several nodes, set parallel.data.hybrid to the number of ranks of one node"
_SHARDING = {
    **dict.fromkeys(("full_shard", 1, True), to(FSDP)),
    **dict.fromkeys(("shard_grad_op", 2, False), to(_KEPT)),
    **dict.fromkeys(("no_shard", 3), do("to keep a whole copy on each rank, write parallel.data = 'replicate'")),
    **dict.fromkeys(("hybrid_shard", 4), to(FSDP, _HYBRID)),
    **dict.fromkeys(("hybrid_shard_zero2", 5), to(_KEPT, _HYBRID)),
}


def _half(value: str, values: Values) -> object:
    kind, key = values.get("distributed_type"), value.lower()
    look = "'torch' gathers weights in fp32; 'naive' in half precision, as FSDP's MixedPrecision does"
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
            "fp8": lost("the nearest is fp8 = dict(mode='torch'), which uses torchao"),
        },
        "distributed_type": {
            "fsdp": to(FSDP),
            "megatron_lm": lost("write parallel = dict(tensor=..., pipeline=...) yourself"),
            "*": done("see parallel"),
        },
        "debug": on(to({"debug": "sync"})),
        "use_cpu cpu": on(do("pass initialize(device='cpu'); it is the default on a machine without GPUs")),
        "num_* machine_rank main_* rdzv_backend same_network gpu_ids enable_cpu_affinity commands command_file mpirun* "
        "ipex* max_restarts monitor_interval compute_environment *hostfile *launcher": done("torchrun or halfmesh run"),
        "fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_reshard_after_forward": _SHARDING,
        "fsdp_config.fsdp_offload_params": OFFLOAD,
        "fsdp_config.fsdp_activation_checkpointing": on(to({"activation_checkpoint.every": 1})),
        "fsdp_config.*": no(f"halfmesh shards each repeated block with FSDP2; see {_SHARDING_PAGE}"),
        "gradient_accumulation_steps deepspeed_config.gradient_accumulation_steps": "gradient_accumulation",
        "deepspeed_config.gradient_clipping": "clip_grad_norm",
        "deepspeed_config.zero_stage": ZERO,
        "deepspeed_config.offload_*_device": OFFLOAD,
        "deepspeed_config.deepspeed_config_file": lost(
            "convert that file: halfmesh convert-config FILE --from deepspeed"
        ),
        "dynamo_config.dynamo_backend dynamo_backend": {**_OFF, "*": to({"compile.enabled": True})},
        "parallelism_config.parallelism_config_tp_size": TENSOR,
        "parallelism_config.parallelism_config_dp_shard_size": {1: AS_HERE, "*": to(FSDP, _HYBRID)},
        "parallelism_config.parallelism_config_cp_size parallelism_config.parallelism_config_sp_size": CONTEXT,
        "fsdp_plugin deepspeed_plugin* megatron_lm_plugin torch_tp_plugin": lost("write its parallel keys yourself"),
        "*_config.* log_with device_placement project_* *_plugin kwargs* tpu_* downcast_bf16": no(
            "halfmesh has no such key"
        ),
        "split_batches": on(do("give the DataLoader the batch size of one data rank: divide it by their number")),
        "step_scheduler_with_optimizer": {True: AS_HERE, False: to({"lr_interval": "manual"})},
    },
    needs=(
        ("fsdp_config.*", "distributed_type", "FSDP", "FSDP"),
        ("deepspeed_config.*", "distributed_type", "DEEPSPEED", "DEEPSPEED"),
        ("deepspeed_config.offload_*_device", "deepspeed_config.zero_stage", 3, 2),
    ),
    always=_clipping,
    calls={
        "gradient_accumulation": "accelerator.accumulate",
        "clip_grad_norm": "accelerator.clip_grad_norm_",
    },
)


_NAIVE = to(
    {"fp16.mode": "naive"}, "the loss scale starts at 2**16; from Colossal-AI's 2**32 about 20 updates are skipped"
)
_OWN_LAYERS = "remove Colossal-AI's own layers from the model"


def _microbatches(value: int, values: Values) -> object:
    has_stages = max(values.get("parallel.pipeline", 1), values.get("parallel.pipeline.size", 1)) > 1
    return MICROBATCHES if has_stages else no("it has no effect without a pipeline; see gradient_accumulation")


def _zero(values: Values) -> dict[str, str]:
    """Colossal-AI's zero sharded everything, in fp16."""
    if not any(key.startswith("zero.") for key in values):
        return {}
    return ({} if "zero.level" in values else FSDP) | ({} if "fp16.mode" in values else {"fp16.mode": "naive"})


COLOSSAL = Origin(
    title="Colossal-AI",
    has_constants=True,
    rows={
        "fp16.mode": {"naive": _NAIVE, "parallel": _NAIVE, "*": "fp16.mode"},
        "fp16.initial_scale": lambda value, values: (
            "fp16.loss_scale" if values.get("fp16.dynamic_grad_scale") is False else "fp16.initial_scale"
        ),
        "fp16.dynamic_grad_scale": {  # without the scale it is None, which is rejected
            True: AS_HERE,
            False: lambda value, values: to({"fp16.loss_scale": values.get("fp16.initial_scale")}),
        },
        "fp16.hysterisis": "fp16.hysteresis",
        "fp16.clip_grad_norm": do("set the top-level clip_grad_norm, which Colossal-AI used instead"),
        "fp16.*": "fp16.*",
        "parallel.pipeline parallel.pipeline.size": (
            STAGES,
            "keep your loop as it is; halfmesh has no execute_schedule",
        ),
        "NUM_MICRO_BATCHES schedule.num_microbatches": _microbatches,
        "parallel.tensor parallel.tensor.size": lambda value, values: (
            CONTEXT if values.get("parallel.tensor.mode") == "sequence" else (TENSOR, _OWN_LAYERS)
        ),
        "parallel.tensor.mode": {
            "1d": AS_HERE,
            "sequence": AS_HERE,
            "*": no("halfmesh shards '1d', with the same results"),
        },
        "parallel.sequence.*": lost(f"write parallel = dict(context=...); see {page('Context parallelism')}"),
        "parallel.data parallel.data.size": {-1: AS_HERE, "*": "parallel.data.size"},
        "zero.level": ZERO,
        "zero.model_config.tensor_placement_policy": OFFLOAD
        | {"cuda": AS_HERE, "auto": do("see parallel.data.cpu_offload")},
        "zero.optimizer_config.gpu_margin_mem_ratio zero.model_config.*": no("fsdp shards each block by rows"),
        "zero.optimizer_config.*": "fp16.*",
        "gradient_accumulation clip_grad_norm": "*",
        "gradient_handler torch_ddp.* fp16.?p_process_group TENSOR_SHAPE": no("halfmesh does this automatically"),
        "seed": ("seed", "Colossal-AI ignored this key and used the seed of launch (1024); halfmesh uses it"),
        "model.num_chunks": {1: AS_HERE, "*": do("set parallel.pipeline.schedule='interleaved' and chunks")},
        "model.* optimizer.* loss.* lr_scheduler.* train_data.* test_data.* dataset.* schedule.* hooks.* cudnn_* "
        "logging.*": do("build it in your script; halfmesh does not build it from the config"),
    },
    needs=(
        ("fp16.growth_* fp16.backoff_factor fp16.hyst* fp16.m??_scale", "fp16.dynamic_grad_scale", True, True),
        ("zero.optimizer_config.*", "fp16.mode", None, None),
    ),
    always=_zero,
)
APEX = Origin(
    title="apex.amp.initialize",
    rows={"num_losses": ("fp16.num_losses", "pass amp.scale_loss's loss_id to engine.backward"), "*": "fp16.*"},
    always=lambda values: {"fp16.mode": "apex"},
    look="'apex' works in one process or with data parallelism. For other layouts use 'torch', which is close to O1, "
    "or 'naive', which is O2 with BatchNorm in fp16",
)


_HALF = "halfmesh averages gradients in fp32, DeepSpeed in half precision"
_STAYS = dict.fromkeys([True, "cpu"], do("zero1 keeps optimizer state on the device; data='fsdp' has cpu_offload"))
_offload = lambda _, values: OFFLOAD if values.get("zero_optimization.stage") == 3 else OFFLOAD | _STAYS  # noqa: E731


def _batch(value: int, values: Values) -> object:
    """A loader's batch is one microbatch in DeepSpeed's pipelines; here it is split into all of them."""
    count = values.get("gradient_accumulation_steps", 1) if values.get("pipeline.stages", 1) > 1 else 1
    return to({"BATCH_SIZE": value * count}, f"give your DataLoader this batch size: {value} x {count} microbatches")


DEEPSPEED = Origin(
    title="DeepSpeed",
    rows={
        "train_batch_size": ("global_batch_size", "it must equal batch size x gradient_accumulation x data ranks"),
        "train_micro_batch_size_per_gpu": _batch,
        "gradient_accumulation_steps": lambda value, values: (
            MICROBATCHES if values.get("pipeline.stages", 1) > 1 else "gradient_accumulation"
        ),
        "gradient_clipping": "clip_grad_norm",
        "fp16.enabled": on(to({"fp16.mode": "naive"}, _HALF)),
        "bf16.enabled bfloat16.enabled": on(to({"bf16.mode": "naive"}, _HALF)),
        "fp16.loss_scale": {0: to({"fp16.loss_scale": "dynamic"}), "*": "fp16.loss_scale"},
        "fp16.initial_scale_power": lambda value, values: to({"fp16.initial_scale": 2.0**value}),
        "fp16.loss_scale_window": "fp16.growth_interval",
        "fp16.min_loss_scale": "fp16.min_scale",
        "fp16.* bf16.*": no("masters and their gradients are fp32; hysteresis is refilled when the scale grows"),
        "torch_autocast.enabled": on(
            lost("write fp16 or bf16 = dict(mode='torch'), whichever torch_autocast.dtype is")
        ),
        "amp.enabled": on(to({"fp16.mode": "apex"})),
        "amp.* fp16.hysteresis": "fp16.*",
        "zero_optimization.stage": ZERO,
        "zero_optimization.offload_*.device zero_optimization.cpu_offload*": _offload,
        "zero_optimization.mics_shard_size zero_optimization.zero_hpz_partition_size": lost("see parallel.data.hybrid"),
        "zero_optimization.*": no("parallel.data has bucket_mb and prefetch; engine.save_weights writes whole weights"),
        "communication_data_type data_types.* prescale* *predivide*": do(
            "see parallel.data.reduce_dtype, gradient_dtype"
        ),
        "pipeline.stages": STAGES,
        "pipeline.activation_checkpoint_interval": {0: AS_HERE, "*": "activation_checkpoint.every"},
        "tensor_parallel.autotp_size": TENSOR,
        "*.cpu_checkpointing": on(to({"activation_offload": True, "activation_checkpoint.every": 1})),
        "activation_checkpointing.partition_activations": lost("the nearest is parallel.tensor.sequence_parallel=True"),
        "pipeline.* tensor_parallel.* activation_checkpointing.*": no("halfmesh partitions the model automatically"),
        "optimizer.* scheduler.*": do(
            "build it in your script; Adam is torch.optim.AdamW, unless adam_w_mode is false"
        ),
        "compile.deepcompile": on(to({"compile.enabled": True})),
        "dataloader_drop_last": on(do("give your DataLoader drop_last=True")),
        "seed": "seed",
        "steps_per_print *_breakdown dump_state tensorboard.* wandb.* csv_monitor.* comet.*": no("see Trainer's hooks"),
        "torch_autocast.* flops_profiler.* comms_logger.* autotuning.* elasticity.* aio.* zero_* nebula.* "
        "hybrid_engine.* checkpoint.* monitor_config.*": no("halfmesh has no such feature"),
        "data_efficiency.* curriculum_* sparse_* compression_training.* progressive_layer_drop.* eigenvalue.* "
        "quantize_training.*": do("halfmesh has no such feature, and it changes the training"),
    },
    needs=(
        ("fp16.*", "fp16.enabled", True, False),
        ("amp.*", "amp.enabled", True, False),
        ("fp16.*_power fp16.*_window fp16.hysteresis fp16.min_loss_scale", "fp16.loss_scale", 0, 0),
    ),
    always=lambda values: {} if "gradient_clipping" in values else CLIPPED,
)


_SHARDED = to(FSDP, "if there are more data ranks than this, set parallel.data.hybrid to it")
_SCHEDULE = "parallel.pipeline.schedule"
_DIVIDE = "without a pipeline, halfmesh does not split batches: divide the DataLoader's batch size by it"


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
        "pipeline": {
            "simple": to({_SCHEDULE: "gpipe"}),
            "interleaved": to({_SCHEDULE: "1f1b"}, "the same order is called 1f1b here"),
        },
        "tensor_parallel_degree": (
            TENSOR,
            "multiply the DataLoader's batch size by it, unless prescaled_batch was set",
        ),
        "auto_partition": {True: AS_HERE, False: do("name the stages in parallel.pipeline.partition")},
        "ddp": {True: AS_HERE, False: to({"parallel.data.size": 1}, "start pipeline x tensor ranks")},
        "fp16 fp16_params": on(
            to({"fp16.mode": "naive"}, "SageMaker used a static loss scale of 1.0, unless the optimizer got another")
        ),
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
        "hybrid_shard_degree": {
            0: lost("write parallel = dict(data='fsdp') in place of the FSDP in your script"),
            "*": _SHARDED,
        },
        "sdp_gradient_clipping": "clip_grad_norm",
        "offload_activations sm_activation_offloading": "activation_offload",
        "random_seed": "seed",
        "context_parallel_degree": CONTEXT,
        "expert_parallel_degree": "parallel.expert.size",
        "optimize prescaled_batch placement_strategy memory_weight active_* activation_loading_horizon contiguous "
        "horovod *_partition ddp_* trace_* deterministic_server static_mode fast_mode partition_file sdp_* "
        "skip_tracing _sharded_data_parallel delayed_param*": no(f"halfmesh has no such choice; see {_SHARDING_PAGE}"),
        "*enabled smdistributed.dataparallel.* torch_distributed.* pytorchddp.* mpi.* instance_*": done("halfmesh run"),
    },
    needs=(
        ("static_loss_scale dynamic_loss_scale dynamic_loss_args.*", "bf16", False, False),
        ("static_loss_scale", "dynamic_loss_scale", False, False),
        ("dynamic_loss_args.*", "dynamic_loss_scale", True, False),
        ("shard_optimizer_state", "sharded_data_parallel_degree", 1, 1),
    ),
    always=_defaults,
    look="SageMaker's rdp is halfmesh's dp, its dp is dp x tp, its mp is pp x tp; ranks = pp x dp x tp",
)

ORIGINS: Mapping[str, Origin] = MappingProxyType(
    {"colossal": COLOSSAL, "apex": APEX, "sagemaker": SAGEMAKER, "deepspeed": DEEPSPEED, "accelerate": ACCELERATE}
)
"""By the name that `halfmesh convert-config --from` takes."""
