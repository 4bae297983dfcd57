"""DeepSpeed's ds_config.json."""

from .table import AS_HERE, CLIPPED, MICROBATCHES, OFFLOAD, STAGES, TENSOR, ZERO, Origin, Values, lost, no, on, to

_HALF = "half-precision weights, fp32 masters; gradients are averaged in fp32, in DeepSpeed in half precision"
_STAYS = dict.fromkeys([True, "cpu"], no("zero1 keeps optimizer state on the device; data='fsdp' has cpu_offload"))
_offload = lambda _, values: OFFLOAD if values.get("zero_optimization.stage") == 3 else OFFLOAD | _STAYS  # noqa: E731


def _batch(value: int, values: Values) -> object:
    """A loader's batch is one microbatch in DeepSpeed's pipelines; here it is split into all of them."""
    count = values.get("gradient_accumulation_steps", 1) if values.get("pipeline.stages", 1) > 1 else 1
    return to({"BATCH_SIZE": value * count}, f"for your DataLoader: {value} x {count} microbatches of a pipeline")


DEEPSPEED = Origin(
    title="DeepSpeed",
    rows={
        "train_batch_size": ("global_batch_size", "it has to be batch size x gradient_accumulation x data ranks"),
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
        "fp16.hysteresis": "fp16.hysteresis",
        "fp16.* bf16.*": no("masters and their gradients are fp32; hysteresis is refilled when the scale grows"),
        "torch_autocast.enabled": on(lost("write fp16 or bf16 = dict(mode='torch'), by torch_autocast.dtype")),
        "amp.enabled": on(to({"fp16.mode": "apex"})),
        "amp.*": "fp16.*",
        "zero_optimization.stage": ZERO,
        "zero_optimization.offload_*.device zero_optimization.cpu_offload*": _offload,
        "zero_optimization.mics_shard_size zero_optimization.zero_hpz_partition_size": lost("see parallel.data.hybrid"),
        "zero_optimization.*": no("parallel.data has bucket_mb and prefetch; engine.save_weights writes whole weights"),
        "communication_data_type data_types.* prescale* *predivide*": no("see reduce_dtype and gradient_dtype"),
        "pipeline.stages": STAGES,
        "pipeline.activation_checkpoint_interval": {0: AS_HERE, "*": "activation_checkpoint.every"},
        "tensor_parallel.autotp_size": TENSOR,
        "*.cpu_checkpointing": on(to({"activation_offload": True, "activation_checkpoint.every": 1})),
        "activation_checkpointing.partition_activations": lost("parallel.tensor.sequence_parallel is nearest"),
        "pipeline.* tensor_parallel.* activation_checkpointing.*": no("halfmesh partitions the model automatically"),
        "optimizer.* scheduler.*": no("make it in your script; Adam is torch.optim.AdamW, unless adam_w_mode is false"),
        "compile.deepcompile": on(to({"compile.enabled": True})),
        "dataloader_drop_last": on(no("give your DataLoader drop_last=True")),
        "seed": "seed",
        "steps_per_print *_breakdown dump_state tensorboard.* wandb.* csv_monitor.* comet.*": no("see Trainer's hooks"),
        "torch_autocast.* flops_profiler.* comms_logger.* autotuning.* elasticity.* data_efficiency.* curriculum_* "
        "aio.* zero_* sparse_* compression_training.* hybrid_engine.* nebula.* progressive_layer_drop.* eigenvalue.* "
        "quantize_training.* checkpoint.* monitor_config.*": no("halfmesh has nothing of the kind"),
    },
    needs=(
        ("fp16.*", "fp16.enabled", True, False),
        ("amp.*", "amp.enabled", True, False),
        ("fp16.*_power fp16.*_window fp16.hysteresis fp16.min_loss_scale", "fp16.loss_scale", 0, 0),
    ),
    always=lambda values: {} if "gradient_clipping" in values else CLIPPED,
)
