"""DeepSpeed's ds_config.json."""

from __future__ import annotations

from typing import Any

from ..errors import show
from .convert import Origin
from .deepspeed_values import (
    accumulation,
    is_on,
    loss_scale,
    micro_batch,
    offload,
    power,
    scaler,
    switch,
    train_batch,
    unless_on,
    world_size,
    zero,
)
from .from_apex import OPTIONS as APEX_OPTIONS
from .outcome import (
    Converted,
    Outcome,
    Rule,
    UnreadableError,
    Without,
    flag,
    lost,
    no,
    number,
    one_of,
    to,
    whole,
)
from .source import Source

_BUFFERS = no("a detail of its buffers; parallel.data has bucket_mb (MiB, not elements), max_inflight and prefetch")
_GROUPS = lost("parallel.data.hybrid is nearest: groups with all of the weights")
_TRACKER = no("give Trainer.fit a hook: 'tensorboard', 'csv' or 'jsonl'")
_LATER = no("halfmesh has nothing of the kind")
_OF_TORCH = ("AdamW", "Adagrad", "SGD", "RMSprop", "Muon")
"""Optimizers of DeepSpeed's configs that torch.optim has, besides Adam."""
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}


def _reduce_dtype(value: Any, source: Source) -> Outcome:
    return Converted({"parallel.data.reduce_dtype": one_of(value, _DTYPES)})


def _accumulated_in(value: Any, source: Source) -> Outcome:
    dtype = one_of(value, _DTYPES)
    if dtype == "float32":
        return Converted({"gradient_dtype": "float32"})
    return Without("gradients add up in the parameters' dtype, or in fp32 (gradient_dtype='float32')")


def _autocast(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return Converted(says="autocast is off, as by default")
    dtype = one_of(
        str(source.get("torch_autocast.dtype", "bfloat16")).removeprefix("torch."),
        {"float16": "fp16", "bfloat16": "bf16"},
    )
    return Converted({f"{dtype}.mode": "torch"})


def _apex(value: Any, source: Source) -> Outcome:
    return Converted({"fp16.mode": "apex"} if flag(value) else {}, says="apex's amp is off")


def _apex_option(name: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        if (off := unless_on(source, "amp")) is not None:
            return off
        return Converted({f"fp16.{name}": value})

    return Rule(do)


def _adam(value: Any, source: Source) -> Outcome:
    reason = "make the optimizer in your script"
    name = str(value)
    if name.lower() in ("adam", "fusedadam"):
        decoupled = source.get("optimizer.params.adam_w_mode", True)
        name = "AdamW (DeepSpeed's Adam is, unless adam_w_mode is false)" if decoupled else "Adam"
    elif name not in _OF_TORCH:
        return Without(f"{reason}: torch has no {show(name)}, so take the class from where you have it")
    return Without(f"{reason}: torch.optim.{name}, with what optimizer.params says")


def _cpu_checkpointing(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return Converted(says="activations stay on the device")
    look = "the model's own calls of deepspeed.checkpointing go; what the blocks are called with waits on the host"
    every = source.has("pipeline.activation_checkpoint_interval")  # which says what is checkpointed
    return Converted({"activation_offload": True} | ({} if every else {"activation_checkpoint": "full"}), look=look)


def _cpu_offload(what: str) -> Rule:
    """The older form, a flag."""

    def do(value: Any, source: Source) -> Outcome:
        return offload(what).do("cpu" if flag(value) else "none", source)

    return Rule(do)


def _drop_last(value: Any, source: Source) -> Outcome:
    if flag(value):
        return Without("give your DataLoader drop_last=True")
    return Converted(says="batches at the end are trained on")


def _compile(value: Any, source: Source) -> Outcome:
    return Converted({"compile": True} if flag(value) else {}, says="nothing is compiled, as by default")


_ZERO_BUFFERS = (
    *("contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size"),
    *("overlap_comm", "round_robin_gradients", "ignore_unused_parameters", "use_all_reduce_for_fetch_params"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "sub_group_size"),
    *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "memory_efficient_linear"),
    *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "override_module_apply"),
    *("use_multi_rank_bucket_allreduce", "allgather_sequential", "legacy_stage1"),
    *("cpu_offload_use_pin_memory", "log_trace_cache_warnings", "zeropp_loco_param", "mics_hierarchical_params_gather"),
)
_OFFLOAD_DETAILS = (
    *("pin_memory", "buffer_count", "fast_init", "ratio", "nvme_path", "buffer_size", "max_in_cpu"),
    *("pipeline", "pipeline_read", "pipeline_write", "super_offload"),
)

RULES: dict[str, Rule] = {
    "train_batch_size": Rule(train_batch),
    "train_micro_batch_size_per_gpu": Rule(micro_batch),
    "gradient_accumulation_steps": Rule(accumulation),
    "gradient_clipping": to("clip_grad_norm", number),
    "fp16.enabled": switch("fp16", "naive"),
    "fp16.auto_cast": no("floating-point arguments of the model are cast by the mode"),
    "fp16.loss_scale": Rule(loss_scale),
    "fp16.initial_scale_power": scaler("initial_scale", power),
    "fp16.loss_scale_window": scaler("growth_interval", whole),
    "fp16.hysteresis": scaler("hysteresis", whole),
    "fp16.min_loss_scale": scaler("min_scale"),
    "fp16.consecutive_hysteresis": no("hysteresis is refilled when the scale grows, and not before"),
    "fp16.fp16_master_weights_and_grads": no("masters are fp32; without any: mode='apex' with opt_level='O3'"),
    "bf16.enabled": switch("bf16", "naive"),
    "bfloat16.enabled": switch("bf16", "naive"),
    "bf16.immediate_grad_update": no("gradients reach the fp32 masters in the update"),
    "torch_autocast.enabled": Rule(_autocast),
    "torch_autocast.dtype": Rule(
        lambda value, source: Converted(says="the key that torch_autocast.enabled makes: fp16 or bf16")
    ),
    "torch_autocast.lower_precision_safe_modules": no("torch.autocast decides for each operation"),
    "amp.enabled": Rule(_apex),
    **{f"amp.{name}": _apex_option(name) for name in APEX_OPTIONS if name != "enabled"},
    "zero_optimization.stage": Rule(zero),
    "zero_optimization.offload_optimizer.device": offload("optimizer states"),
    "zero_optimization.offload_param.device": offload("parameters"),
    "zero_optimization.cpu_offload": _cpu_offload("optimizer states"),
    "zero_optimization.cpu_offload_params": _cpu_offload("parameters"),
    "zero_optimization.mics_shard_size": _GROUPS,
    "zero_optimization.zero_quantized_nontrainable_weights": no("weights travel in the mode's dtype"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": no("engine.save_weights writes the whole model"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": no("engine.save_weights writes the whole model"),
    "zero_optimization.gather_16bit_weights_on_model_save": no("engine.save_weights writes the whole model"),
    "zero_optimization.zero_hpz_partition_size": _GROUPS,
    "zero_optimization.zero_quantized_weights": no("weights travel in the mode's dtype"),
    "zero_optimization.zero_quantized_gradients": no("gradients travel in reduce_dtype"),
    **{f"zero_optimization.{name}": _BUFFERS for name in _ZERO_BUFFERS},
    "zero_optimization.load_from_fp32_weights": no("engine.load takes masters from what a checkpoint has"),
    "zero_optimization.elastic_checkpoint": no("checkpoints are read on any number of ranks"),
    **{
        f"zero_optimization.{section}.{name}": no("a detail of its offloading; there is parallel.data.cpu_offload")
        for section in ("offload_optimizer", "offload_param")
        for name in _OFFLOAD_DETAILS
    },
    "communication_data_type": Rule(_reduce_dtype),
    "data_types.grad_accum_dtype": Rule(_accumulated_in),
    "prescale_gradients": no("gradients are averaged in fp32, where nothing overflows"),
    "gradient_predivide_factor": no("gradients are averaged in fp32, where nothing overflows"),
    "sparse_gradients": no("gradients of embeddings are dense"),
    "pipeline.stages": to("parallel.pipeline.size", whole),
    "pipeline.partition": no("parallel.pipeline.partition says how stages are cut"),
    "pipeline.activation_checkpoint_interval": Rule(
        lambda value, source: Converted({"activation_checkpoint.every": whole(value)} if value else {}, says="0: off")
    ),
    "tensor_parallel.autotp_size": to("parallel.tensor.size", whole),
    "tensor_parallel.*": no("parallel.tensor.plan says how layers are divided"),
    "activation_checkpointing.cpu_checkpointing": Rule(_cpu_checkpointing),
    "activation_checkpointing.partition_activations": lost("parallel.tensor.sequence_parallel is nearest"),
    "activation_checkpointing.*": no("activation_checkpoint names the blocks; the model needs no call"),
    "optimizer.type": Rule(_adam, any_value=True),
    "optimizer.*": no("make the optimizer in your script"),
    "scheduler.*": no("make the scheduler in your script: LinearWarmupLR is WarmupDecayLR; the engine advances it"),
    "compile.deepcompile": Rule(_compile),
    "dataloader_drop_last": Rule(_drop_last),
    "seed": to("seed", whole),
    "steps_per_print": no("Trainer(log_every=...)"),
    "wall_clock_breakdown": no("Trainer's hook 'throughput', or torch.profiler"),
    "memory_breakdown": no("Trainer's hook 'memory'"),
    "dump_state": no("the effective plan is printed at the start"),
    "zero_allow_untested_optimizer": no("what an optimizer is not fit for is refused by name"),
    "zero_force_ds_cpu_optimizer": no("torch's own optimizers step, on the host, too"),
    **{f"{name}.*": _TRACKER for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
    **{
        f"{name}.*": _LATER
        for name in (
            *("flops_profiler", "comms_logger", "autotuning", "elasticity", "data_efficiency", "curriculum_learning"),
            *("sparse_attention", "compression_training", "aio", "hybrid_engine", "nebula", "progressive_layer_drop"),
            *("eigenvalue", "quantize_training", "checkpoint", "monitor_config"),
        )
    },
}

_SECTIONS = ("fp16", "bf16", "zero_optimization", "amp", "optimizer", "scheduler", "pipeline", "tensor_parallel")


def _empty(value: Any, source: Source) -> Outcome:
    if value == {} or value is None:
        return Converted(says="nothing to write")
    raise UnreadableError(f"{value!r:.100} is not a dict of keys")


for _name in (*_SECTIONS, *(name.removesuffix(".*") for name in list(RULES) if name.endswith(".*"))):
    RULES.setdefault(_name, Rule(_empty, any_value=True))


def _looks(source: Source) -> tuple[str, ...]:
    looks = []
    if is_on(source, "fp16"):
        looks.append(
            "DeepSpeed's fp16 and bf16 are mode 'naive': weights in half precision, fp32 masters. "
            "mode='torch' is autocast"
        )
    if is_on(source, "fp16") or is_on(source, "bf16") or is_on(source, "bfloat16"):
        looks.append("gradients are averaged in fp32 here (parallel.data.reduce_dtype), in DeepSpeed in fp16 or bf16")
    return tuple(looks)


DEEPSPEED = Origin(title="DeepSpeed", rules=RULES, looks=_looks, world_size=world_size, fills_in="auto")
