"""accelerate: default_config.yaml, and the arguments of `Accelerator`."""

from __future__ import annotations

from typing import Any

from .convert import Origin
from .outcome import (
    Converted,
    Lost,
    Outcome,
    Rule,
    UnreadableError,
    Without,
    done,
    flag,
    lost,
    no,
    number,
    one_of,
    to,
    whole,
)
from .source import Source

_LAUNCH = no("torchrun, or halfmesh run, has it: it is no matter of the config")
_TPU = no("there is no TPU here")
_BLOCKS = no("blocks that repeat are found by themselves")


def _kind(source: Source) -> str:
    kind = source.get("distributed_type", "NO")
    return "NO" if kind is False else str(kind).upper()  # YAML reads a plain NO as False


def _only_under(kind: str, rule: Rule) -> Rule:
    """A rule of a section that accelerate reads under one `distributed_type` only."""

    def do(value: Any, source: Source) -> Outcome:
        if source.has("distributed_type") and _kind(source) != kind:
            return Without(f"distributed_type is {_kind(source)}, so accelerate does not read it")
        return rule.do(value, source)

    return Rule(do, any_value=rule.any_value)


def _precision(value: Any, source: Source) -> Outcome:
    key = one_of("no" if value is False else value, {"no": None, "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"})
    if key == "fp8":
        return Lost("there is no fp8 here; bf16 = dict(mode='torch') is nearest")
    if key is None:
        return Converted(says="fp32: neither fp16 nor bf16 is set")
    mode = "naive" if _kind(source) == "DEEPSPEED" else "torch"
    look = ""
    if _kind(source) == "FSDP":
        look = "mode 'torch' gathers weights in fp32; 'naive' in half precision, as FSDP's MixedPrecision does"
    return Converted({f"{key}.mode": mode}, look=look)


def _older_fp16(value: Any, source: Source) -> Outcome:
    return _precision("fp16" if flag(value) else "no", source)


def _type(value: Any, source: Source) -> Outcome:
    kind = _kind(source)
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU"):
        return Converted(says="data parallelism takes the ranks that there are")
    if kind == "FSDP":
        strategy = str(source.get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")).upper()
        if strategy in ("NO_SHARD", "3"):
            return Converted(says="NO_SHARD: data parallelism with whole copies")
        return Converted({"parallel.data.strategy": "fsdp"})
    if kind in ("DEEPSPEED", "TP"):
        return Converted(says=f"{kind}: its own keys say what it divides")
    if kind == "MEGATRON_LM":
        return Lost("parallel.tensor, parallel.pipeline and parallel.data are the keys: write them by hand")
    return Without(f"there is no {kind} here: CUDA devices and CPUs")


def _strategy(value: Any, source: Source) -> Outcome:
    names = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
    known = dict.fromkeys(names.values())
    name = names.get(str(value), str(value).lower())
    if name not in known:
        raise UnreadableError(f"{value!r} is not one of {', '.join(name.upper() for name in known)}")
    if name == "no_shard":
        return Converted(says="whole copies, as by default")
    settings: dict[str, Any] = {"parallel.data.strategy": "fsdp"}
    if name in ("shard_grad_op", "hybrid_shard_zero2"):
        settings["parallel.data.reshard_after_forward"] = False
    if not name.startswith("hybrid"):
        return Converted(settings)
    machines, processes = source.whole("num_machines", 1), source.whole("num_processes", 1)
    if machines > 1 and processes % machines == 0:
        settings["parallel.data.hybrid"] = processes // machines
        return Converted(settings)
    return Converted(settings, look="one machine: all ranks share the weights; hybrid=... says otherwise")


def _reshard(value: Any, source: Source) -> Outcome:
    if isinstance(value, str) and value.upper() in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        return _strategy(value, source)
    return Converted({"parallel.data.strategy": "fsdp", "parallel.data.reshard_after_forward": flag(value)})


def _offload(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return Converted(says="parameters stay on the device")
    return Converted({"parallel.data.strategy": "fsdp", "parallel.data.cpu_offload": True})


def _checkpointing(value: Any, source: Source) -> Outcome:
    return Converted({"activation_checkpoint": "full"} if flag(value) else {}, says="activations are kept")


def _zero(value: Any, source: Source) -> Outcome:
    stage = whole(value)
    if stage not in (0, 1, 2, 3):
        raise UnreadableError(f"{value!r} is not one of the stages 0, 1, 2 and 3")
    look = "stage 2 divides gradients, too; zero1 gives the same numbers with whole gradients" if stage == 2 else ""
    settings = {"parallel.data.strategy": "fsdp" if stage == 3 else "zero1"} if stage else {}
    return Converted(settings, says="each data rank has all", look=look)


def _zero_offload(value: Any, source: Source) -> Outcome:
    device = one_of(value, {"none": None, "cpu": "cpu", "nvme": "nvme"})
    if device is None:
        return Converted(says="all stays on the device")
    if device == "cpu" and source.get("deepspeed_config.zero_stage") == 3:
        return Converted({"parallel.data.cpu_offload": True})
    return Without("only fsdp puts parts into host memory here, none on disks: parallel.data.cpu_offload")


def _processes(value: Any, source: Source) -> Outcome:
    return Converted(says=f"halfmesh run --nproc {whole(value) // source.whole('num_machines', 1)}")


def _machines(value: Any, source: Source) -> Outcome:
    return Converted(says=f"halfmesh run --nnodes {whole(value)}")


def _backend(value: Any, source: Source) -> Outcome:
    if value is False or str(value).upper() == "NO":
        return Converted(says="nothing is compiled, as by default")
    return Converted({"compile.backend": str(value).lower()})


def _compiled(key: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        if str(source.get("dynamo_config.dynamo_backend", "NO")).upper() in ("NO", "FALSE"):
            return Without("without a backend nothing is compiled")
        return Converted({f"compile.{key}": value if key == "mode" else flag(value)})

    return Rule(do)


def _size(key: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        return Converted({key: whole(value)} if whole(value) > 1 else {}, says="1: off")

    return Rule(do)


def _shards(value: Any, source: Source) -> Outcome:
    size = whole(value)
    if size <= 1:
        return Converted(says="1: nothing is divided over data ranks")
    settings: dict[str, Any] = {"parallel.data.strategy": "fsdp"}
    if source.whole("parallelism_config.parallelism_config_dp_replicate_size", 1) > 1:
        settings["parallel.data.hybrid"] = size
    return Converted(settings)


def _debug(value: Any, source: Source) -> Outcome:
    return Converted({"debug": "sync"} if flag(value) else {}, says="off, as by default")


_FSDP = "fsdp_config.fsdp_"
_DS = "deepspeed_config."
_MESH = "parallelism_config.parallelism_config_"
_CALL = "Accelerator."
_PLUGINS = (
    *("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"),
    "parallelism_config",
)
"""Arguments of `Accelerator` that say how a model is sharded."""

RULES: dict[str, Rule] = {
    "mixed_precision": Rule(_precision),
    "fp16": Rule(_older_fp16),
    "distributed_type": Rule(_type),
    "num_processes": Rule(_processes),
    "num_machines": Rule(_machines),
    "debug": Rule(_debug),
    "use_cpu": no("initialize(device='cpu') says it; without a GPU it is so by itself"),
    "compute_environment": done("a machine of yours"),
    **dict.fromkeys(
        (
            *("machine_rank", "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend"),
            *(
                "same_network",
                "gpu_ids",
                "enable_cpu_affinity",
                "commands",
                "command_file",
                "num_cpu_threads_per_process",
            ),
            *("deepspeed_hostfile", "mpirun_config", "ipex_config", "max_restarts", "monitor_interval"),
        ),
        _LAUNCH,
    ),
    "downcast_bf16": _TPU,
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_name", "tpu_zone", "tpu_cluster"), _TPU),
    f"{_FSDP}sharding_strategy": Rule(_strategy),
    f"{_FSDP}reshard_after_forward": Rule(_reshard),
    f"{_FSDP}offload_params": Rule(_offload),
    f"{_FSDP}activation_checkpointing": Rule(_checkpointing),
    f"{_FSDP}version": done("fsdp is torch's FSDP2"),
    f"{_FSDP}auto_wrap_policy": _BLOCKS,
    f"{_FSDP}transformer_layer_cls_to_wrap": _BLOCKS,
    f"{_FSDP}min_num_params": _BLOCKS,
    f"{_FSDP}backward_prefetch": no("parallel.data.prefetch says how many blocks are gathered ahead"),
    f"{_FSDP}backward_prefetch_policy": no("parallel.data.prefetch says how many blocks are gathered ahead"),
    f"{_FSDP}forward_prefetch": no("parallel.data.prefetch says how many blocks are gathered ahead"),
    f"{_FSDP}cpu_ram_efficient_loading": no("give initialize a function that builds the model: docs/deferred.md"),
    f"{_FSDP}state_dict_type": done("checkpoints are in parts, for any layout; engine.save_weights writes whole ones"),
    f"{_FSDP}sync_module_states": done("all ranks begin with rank 0's weights"),
    f"{_FSDP}use_orig_params": done("parameters keep their names and shapes"),
    "fsdp_config.*": no("halfmesh has nothing of the kind"),
    f"{_DS}gradient_accumulation_steps": to("gradient_accumulation", whole),
    f"{_DS}gradient_clipping": to("clip_grad_norm", number),
    f"{_DS}zero_stage": Rule(_zero),
    f"{_DS}offload_optimizer_device": Rule(_zero_offload),
    f"{_DS}offload_param_device": Rule(_zero_offload),
    f"{_DS}zero3_init_flag": no("give initialize a function that builds the model: docs/deferred.md"),
    f"{_DS}zero3_save_16bit_model": no("engine.save_weights writes the whole model"),
    f"{_DS}deepspeed_config_file": lost("convert that file: halfmesh convert-config FILE --from deepspeed"),
    f"{_DS}deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_config.*": no("halfmesh has nothing of the kind"),
    "dynamo_config.dynamo_backend": Rule(_backend),
    "dynamo_backend": Rule(_backend),
    "dynamo_config.dynamo_mode": _compiled("mode"),
    "dynamo_config.dynamo_use_dynamic": _compiled("dynamic"),
    "dynamo_config.dynamo_use_fullgraph": _compiled("fullgraph"),
    "dynamo_config.dynamo_use_regional_compilation": no("compile.scope = 'blocks', which is 'auto' on several ranks"),
    f"{_MESH}tp_size": _size("parallel.tensor.size"),
    f"{_MESH}dp_replicate_size": done("the data ranks that do not share weights"),
    f"{_MESH}dp_shard_size": Rule(_shards),
    f"{_MESH}cp_size": lost("the sequence is not divided in attention; sequence_parallel=True is nearest"),
    f"{_MESH}sp_size": lost("the sequence is not divided in attention; sequence_parallel=True is nearest"),
    "megatron_lm_config.*": no("write parallel.tensor, parallel.pipeline and parallel.data by hand"),
    "fp8_config.*": no("there is no fp8 here"),
    f"{_CALL}mixed_precision": Rule(_precision),
    f"{_CALL}gradient_accumulation_steps": to("gradient_accumulation", whole),
    f"{_CALL}device_placement": done("model and batches are put on the device"),
    f"{_CALL}split_batches": Rule(lambda value, source: _split(value)),
    f"{_CALL}cpu": no("initialize(device='cpu') says it"),
    f"{_CALL}step_scheduler_with_optimizer": Rule(lambda value, source: _advances(value)),
    **dict.fromkeys((f"{_CALL}{name}" for name in _PLUGINS), lost("it is not read: write its parallel keys by hand")),
    "Accelerator.*": no("its place is an argument of initialize or of Trainer; see docs/migration/accelerate.md"),
}
for _name in list(RULES):
    if _name.startswith(("fsdp_config.", "deepspeed_config.")):
        RULES[_name] = _only_under("FSDP" if _name.startswith("fsdp") else "DEEPSPEED", RULES[_name])
for _name in ("fsdp_config", "deepspeed_config", "dynamo_config", "megatron_lm_config", "fp8_config", "Accelerator"):
    RULES[_name] = Rule(lambda value, source: _empty(value), any_value=True)


def _split(value: Any) -> Outcome:
    if not flag(value):
        return Converted(says="the batch size is that of each data rank")
    return Without("the batch size is that of each data rank: divide it by their number")


def _advances(value: Any) -> Outcome:
    if flag(value):
        return Converted(says="the engine advances the scheduler with each update that is not skipped")
    return Converted({"lr_interval": "manual"}, look="you call scheduler.step() yourself")


def _empty(value: Any) -> Outcome:
    if value in ({}, None):
        return Converted(says="nothing to write")
    raise UnreadableError(f"{value!r:.100} is not a dict of keys")


def _world_size(source: Source) -> int | None:
    ranks = source.get("num_processes")
    return ranks if type(ranks) is int and ranks > 0 else None


def _looks(source: Source) -> tuple[str, ...]:
    if source.has("Accelerator"):
        return ()
    return (
        "accelerator.accumulate and clip_grad_norm_ are in your script: gradient_accumulation, clip_grad_norm here",
    )


ACCELERATE = Origin(title="accelerate", rules=RULES, looks=_looks, world_size=_world_size)
