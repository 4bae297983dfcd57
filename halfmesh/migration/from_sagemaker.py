"""SageMaker's model parallel library: its parameters, MPI's beside them, and the loss scale of its optimizer."""

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
    text,
    to,
    whole,
)
from .sagemaker_scale import dynamic, factor, of_dynamic, static
from .source import Source

PREFIXES = (
    ("smdistributed", "modelparallel", "parameters"),
    ("distribution", "smdistributed", "modelparallel", "parameters"),
    ("modelparallel", "parameters"),
    ("parameters",),
    ("distribution",),
)
_STAGES = ("pipeline_parallel_degree", "partitions")
_TENSOR_ONLY = lost(
    "experts are not divided over ranks, nor the sequence in attention; tensor with sequence_parallel=True is nearest"
)
_TRAFFIC = no("a detail of how the library sends; parallel.data has bucket_mb, max_inflight and prefetch")


def _stages(source: Source) -> int:
    return next((source.whole(name, 1) for name in _STAGES if source.has(name)), 1)


def _degree(value: Any, source: Source) -> Outcome:
    size = whole(value)
    look = "stages are made by themselves of models with repeated blocks; others name parallel.pipeline.partition"
    return Converted({"parallel.pipeline.size": size}, look=look if size > 1 else "")


def _tensor(value: Any, source: Source) -> Outcome:
    size = whole(value)
    look = ""
    if size > 1 and source.get("prescaled_batch") is not True:
        look = (
            f"all tensor ranks of a copy see the same batch here, as with prescaled_batch=True: give the dataloader "
            f"{size} times the batch size that each rank had"
        )
    return Converted({"parallel.tensor.size": size}, look=look)


def _prescaled(value: Any, source: Source) -> Outcome:
    if flag(value):
        return Converted(says="tensor ranks of a copy see the same batch here")
    if source.whole("tensor_parallel_degree", 1) == 1:
        return Converted(says="without tensor parallelism it has no effect")
    return Without("tensor ranks of a copy see the same batch here: multiply the loader's batch size by their number")


def _microbatches(value: Any, source: Source) -> Outcome:
    count = whole(value)
    if _stages(source) > 1:
        return Converted({"parallel.pipeline.microbatches": count})
    if count == 1:
        return Converted(says="1: a batch is not split")
    look = (
        f"without a pipeline a batch is not split here: give the dataloader 1/{count} of the batch size, so that "
        f"{count} of its batches make an update"
    )
    return Converted({"gradient_accumulation": count}, look=look)


def _schedule(value: Any, source: Source) -> Outcome:
    schedule = one_of(value, {"simple": "gpipe", "interleaved": "1f1b"})
    look = "SageMaker's 'interleaved' is forward and backward in turn: 1f1b; 'interleaved' here is another one"
    return Converted({"parallel.pipeline.schedule": schedule}, look=look if schedule == "1f1b" else "")


def _ddp(value: Any, source: Source) -> Outcome:
    if flag(value):
        return Converted(says="data parallelism takes the ranks that tensor and pipeline leave")
    look = "ddp=False: there is one copy of the model, so start as many ranks as it has parts"
    return Converted({"parallel.data.size": 1}, look=look)


def _partition(value: Any, source: Source) -> Outcome:
    if flag(value):
        return Converted(says="parallel.pipeline.partition = 'auto', the default")
    return Without(
        "smp.partition contexts are not read; name the modules that begin a stage: parallel.pipeline.partition = (...)"
    )


def _placement(value: Any, source: Source) -> Outcome:
    order = text(value)
    if order == "PDT":
        return Converted(says="that is the order of ranks here")
    return Without(
        "tensor ranks are always neighbours, then data ranks, then stages ('PDT'): the same numbers, other neighbours"
    )


def _fp16(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return Converted(says="fp32: neither fp16 nor bf16 is set")
    look = ""
    if not any(source.has(name) for name in ("static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args")):
        look = (
            "the loss scale is not among these parameters: your script gives it to smp.DistributedOptimizer, whose "
            "default is a static 1.0. Here it is dynamic; write loss_scale=1.0 for the same"
        )
    return Converted({"fp16.mode": "naive"}, look=look)


def _bf16(value: Any, source: Source) -> Outcome:
    return Converted({"bf16.mode": "naive"} if flag(value) else {}, says="bf16 is off")


def _shard_state(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return Converted(says="optimizer state is whole on each data rank, as by default")
    if source.whole("sharded_data_parallel_degree", 1) > 1:
        return Converted(says="fsdp divides optimizer state, too")
    return Converted({"parallel.data.strategy": "zero1"})


def _sharded(value: Any, source: Source) -> Outcome:
    size = whole(value)
    if size == 1:
        return Converted(says="1: nothing is divided over data ranks")
    settings, look = _over_ranks(size, source)
    if not source.has("sdp_gradient_clipping"):
        settings["clip_grad_norm"] = 1.0
        look = f"{look}; " if look else ""
        look += "clip_grad_norm = 1.0 is what SageMaker does by default with sharded data parallelism"
    return Converted(settings, look=look)


def _hybrid(value: Any, source: Source) -> Outcome:
    """Of the library's version 2, over torch's FSDP; it clips nothing by itself."""
    size = whole(value)
    if size != 0:
        settings, look = _over_ranks(size, source)
        return Converted(settings, look=look)
    if source.whole("tensor_parallel_degree", 1) > 1:
        return Converted({"parallel.data.strategy": "fsdp"}, look="0: over as many data ranks as there are")
    return Lost("0: the FSDP in your script decides: if there is one, write parallel = dict(data='fsdp')")


def _over_ranks(size: int, source: Source) -> tuple[dict[str, Any], str]:
    """Settings of fsdp over `size` ranks, and what to look at."""
    if size < 1:
        raise UnreadableError(f"{size} is not a number of ranks")
    settings: dict[str, Any] = {"parallel.data.strategy": "fsdp"}
    copies = _data_ranks(source)
    if copies is None:
        look = (
            f"if there are more than {size} data ranks, write hybrid={size}: each {size} share one copy of the weights"
        )
        return settings, look
    if copies != size:
        settings["parallel.data.hybrid"] = size
    return settings, ""


def _data_ranks(source: Source) -> int | None:
    if source.world_size is None:
        return None
    return max(1, source.world_size // (_stages(source) * source.whole("tensor_parallel_degree", 1)))


def _hosts(value: Any, source: Source) -> Outcome:
    return Converted(says=f"torchrun --nproc-per-node {whole(value)}")


def _instances(value: Any, source: Source) -> Outcome:
    return Converted(says=f"torchrun --nnodes {whole(value)}")


RULES: dict[str, Rule] = {
    **{name: Rule(_degree) for name in _STAGES},
    "tensor_parallel_degree": Rule(_tensor),
    "microbatches": Rule(_microbatches),
    "pipeline": Rule(_schedule),
    "active_microbatches": no("1f1b keeps at most as many microbatches in flight as there are stages after it"),
    "auto_partition": Rule(_partition),
    "default_partition": no("modules outside smp.partition contexts go to a stage by themselves here"),
    "memory_weight": no("stages are balanced by parameters"),
    "optimize": no("halfmesh has no such choice; 'memory' is nearest to activation_checkpoint, 'speed' to none"),
    "placement_strategy": Rule(_placement),
    "prescaled_batch": Rule(_prescaled),
    "contiguous": no("a choice of its TensorFlow part"),
    "ddp": Rule(_ddp),
    "ddp_port": no("ranks meet where torchrun says"),
    "ddp_dist_backend": no("nccl for CUDA, gloo for the CPU; launch_from_torch(backend=...) chooses another"),
    "horovod": no("there is one kind of data parallelism, parallel.data"),
    "fp16": Rule(_fp16),
    "fp16_params": Rule(_fp16),
    "bf16": Rule(_bf16),
    "static_loss_scale": Rule(static),
    "dynamic_loss_scale": Rule(dynamic),
    "dynamic_loss_args.init_scale": of_dynamic("initial_scale"),
    "dynamic_loss_args.scale_window": of_dynamic("growth_interval"),
    "dynamic_loss_args.min_scale": of_dynamic("min_scale"),
    "dynamic_loss_args.delayed_shift": of_dynamic("hysteresis"),
    "dynamic_loss_args.scale_factor": Rule(factor),
    "dynamic_loss_args.consecutive_hysteresis": no("hysteresis is refilled when the scale grows, and not before"),
    "optimizer": done("the optimizer that halfmesh.initialize is given"),
    "shard_optimizer_state": Rule(_shard_state),
    "sharded_data_parallel_degree": Rule(_sharded),
    "sdp_gradient_clipping": to("clip_grad_norm", number),
    "sdp_reduce_bucket_size": _TRAFFIC,
    "sdp_param_persistence_threshold": no("fsdp divides every parameter of a block"),
    "sdp_max_live_parameters": no("parallel.data.prefetch says how many blocks are gathered ahead"),
    "sdp_hierarchical_allgather": no("NCCL chooses how it gathers; hybrid keeps weights within a node"),
    "_sharded_data_parallel": _TRAFFIC,
    "offload_activations": to("activation_offload", flag),
    "sm_activation_offloading": to("activation_offload", flag),
    "activation_loading_horizon": no("activations come back one block ahead"),
    "delayed_parameter_initialization": no("give initialize a function that builds the model: docs/deferred.md"),
    "delayed_param_initialization": no("give initialize a function that builds the model: docs/deferred.md"),
    **{
        name: no("a detail of how the library traces and runs stages")
        for name in ("trace_device", "deterministic_server", "static_mode", "fast_mode", "trace_execution_times")
    },
    "load_partition": no("stages are found anew, in no time"),
    "partition_file": no("stages are found anew, in no time"),
    "skip_tracing": no("nothing is traced with your data: shapes are found on tensors without memory"),
    "hybrid_shard_degree": Rule(_hybrid),
    "random_seed": to("seed", whole),
    "expert_parallel_degree": _TENSOR_ONLY,
    "context_parallel_degree": _TENSOR_ONLY,
    "enabled": done("the config says it"),
    "smdistributed.modelparallel.enabled": done("the config says it"),
    "modelparallel.enabled": done("the config says it"),
    "smdistributed.dataparallel.enabled": done("data parallelism takes the ranks that are left; NCCL sends"),
    "smdistributed.dataparallel.custom_mpi_options": no("variables of NCCL are set in the environment"),
    "torch_distributed.enabled": done("torchrun starts it"),
    "pytorchddp.enabled": done("torchrun starts it; plain data parallelism is the default"),
    "pytorchddp.custom_mpi_options": no("variables of NCCL are set in the environment"),
    "mpi.enabled": done("torchrun starts it; under mpirun use halfmesh.launch_from_openmpi"),
    "mpi.processes_per_host": Rule(_hosts),
    "mpi.custom_mpi_options": no("they belong to mpirun; variables of NCCL are set in the environment"),
    "instance_count": Rule(_instances),
    "instance_type": no("halfmesh plan --gpu-memory says whether a model fits on its devices"),
}


def _world_size(source: Source) -> int | None:
    hosts, each = source.get("instance_count"), source.get("mpi.processes_per_host")
    if type(each) is not int or type(hosts) not in (int, type(None)) or each < 1 or (hosts is not None and hosts < 1):
        return None
    return None if hosts is None else each * hosts


def _defaults(source: Source) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    if _stages(source) > 1 and not source.has("microbatches"):
        defaults["parallel.pipeline.microbatches"] = _stages(source)
    return defaults


def _looks(source: Source) -> tuple[str, ...]:
    looks = ["SageMaker's rdp is dp here, its dp is dp x tp, its mp is pp x tp; pp x dp x tp is the number of ranks"]
    if _defaults(source):
        looks.append("microbatches was left out, 1 in SageMaker: 1f1b needs one for each stage at least")
    return tuple(looks)


SAGEMAKER = Origin(
    title="SageMaker's model parallel library",
    rules=RULES,
    prefixes=PREFIXES,
    defaults=_defaults,
    looks=_looks,
    world_size=_world_size,
)
