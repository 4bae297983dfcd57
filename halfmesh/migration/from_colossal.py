"""Colossal-AI's legacy config.py: what its `launch` and `initialize` read of it."""

from __future__ import annotations

import keyword
from typing import Any

from ..errors import find_near
from .colossal_fp16 import FP16_RULES, SCALER_KEYS, whole_section
from .convert import Origin
from .outcome import (
    Converted,
    Lost,
    Outcome,
    Rule,
    UnreadableError,
    Without,
    anything,
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
from .source import Code, Source

_BY_SCRIPT = no("halfmesh builds nothing from the config: make it in your script, and pass it to initialize")
_RING = lost("there is no axis for ring attention here; nearest is tensor with sequence_parallel=True")
_ZERO_SCALER = "zero.optimizer_config."


def _degree(key: str, what: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        size = whole(value)
        look = ""
        if what == "pipeline" and size > 1:
            look = (
                "the loop stays `engine(x)`, `criterion`, `backward`: there is no execute_schedule; a batch must be "
                "divisible by the microbatches"
            )
        if what == "tensor" and size > 1:
            mode = source.get("parallel.tensor.mode")
            if mode is not None and str(mode) == "sequence":
                return Lost(
                    "Colossal-AI's sequence parallelism (ring attention) does not exist here; nearest is "
                    "parallel.tensor = dict(size=..., sequence_parallel=True), which divides the layers, too"
                )
            look = (
                "the layers of your own model are divided by a plan; take Colossal-AI's parallel layers "
                "(colossalai.nn) out of it"
            )
            if mode is None:
                look += "; without a mode Colossal-AI made silent replicas instead"
        return Converted({key: size}, look=look)

    return Rule(do)


def _tensor_mode(value: Any, source: Source) -> Outcome:
    if value is None or value == "1d":
        return Converted(says="'1d' is how layers are divided here")
    if value not in ("2d", "2.5d", "3d", "sequence"):
        raise UnreadableError(f"{value!r} is not one of Colossal-AI's modes")
    if value == "sequence":
        return Lost("ring attention over the sequence does not exist here; see parallel.tensor.size")
    return Without(f"layers are divided in one dimension only, not by {value}: the same results, other traffic")


def _data(value: Any, source: Source) -> Outcome:
    size = whole(value)
    if size == -1:
        return Converted(says="data parallelism takes the ranks that are left")
    return Converted({"parallel.data.size": size})


def _microbatches(value: Any, source: Source) -> Outcome:
    size = source.get("parallel.pipeline.size", source.get("parallel.pipeline", 1))
    if size == 1:
        return Without(
            "without a pipeline it has no effect, as in Colossal-AI; for smaller batches set gradient_accumulation"
        )
    return Converted({"parallel.pipeline.microbatches": whole(value)})


def _chunks(value: Any, source: Source) -> Outcome:
    chunks = whole(value)
    if chunks == 1:
        return Converted(says="1: each rank has one stage, as by default")
    return Converted({"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": chunks})


def _placement(value: Any, source: Source) -> Outcome:
    choice = one_of(value, {"cpu": True, "cuda": False, "auto": None})
    if choice is None:
        return Without("nothing moves by itself here: parallel.data = dict(strategy='fsdp', cpu_offload=True), or not")
    return Converted({"parallel.data.cpu_offload": True} if choice else {}, says="shards are on the device")


def _zero_level(value: Any, source: Source) -> Outcome:
    level = whole(value)
    if level not in (1, 2, 3):
        raise UnreadableError(f"{value!r} is not one of the levels 1, 2 and 3")
    look = "level 2 divides gradients, too; zero1 gives the same numbers with whole gradients" if level == 2 else ""
    return Converted({"parallel.data.strategy": "fsdp" if level == 3 else "zero1"}, look=look)


def _zero_scaler(name: str) -> Rule:
    def do(value: Any, source: Source) -> Outcome:
        if source.has("fp16"):
            return Without("fp16 has the loss scale's keys here; Colossal-AI refused fp16 beside zero")
        return Converted({f"fp16.{name}": anything(value)})

    return Rule(do)


def _seed(value: Any, source: Source) -> Outcome:
    look = "Colossal-AI ignored this key, and took the seed of launch (1024); here it counts"
    return Converted({"seed": whole(value)}, look=look)


def _batch_size(value: Any, source: Source) -> Outcome:
    look = (
        "a dataloader's batch size is that of one data rank here, as in Colossal-AI's get_dataloader; if your script "
        "divides a global one by gpc's data parallel size, keep that division"
    )
    return Converted({"BATCH_SIZE": whole(value)}, look=look)


RULES: dict[str, Rule] = {
    **FP16_RULES,
    "parallel": Rule(lambda value, source: whole_section(value, "parallel"), any_value=True),
    "parallel.pipeline": _degree("parallel.pipeline.size", "pipeline"),
    "parallel.pipeline.size": _degree("parallel.pipeline.size", "pipeline"),
    "parallel.tensor": _degree("parallel.tensor.size", "tensor"),
    "parallel.tensor.size": _degree("parallel.tensor.size", "tensor"),
    "parallel.tensor.mode": Rule(_tensor_mode, any_value=False),
    "parallel.tensor.depth": no("the depth of 2.5d; layers are divided in one dimension here"),
    "parallel.data": Rule(_data),
    "parallel.data.size": Rule(_data),
    "parallel.sequence": _RING,
    "parallel.sequence.size": _RING,
    "gradient_accumulation": to(
        "gradient_accumulation",
        whole,
        "Colossal-AI dropped the batches left over at the end of an epoch; here a shorter cycle is averaged right",
    ),
    "clip_grad_norm": to("clip_grad_norm", number),
    "gradient_handler": no("gradients are reduced by themselves, over data ranks, stages and tensor ranks"),
    "NUM_MICRO_BATCHES": Rule(_microbatches),
    "schedule.num_microbatches": Rule(_microbatches),
    "TENSOR_SHAPE": no("the shapes that go from stage to stage are found before the run"),
    "BATCH_SIZE": Rule(_batch_size),
    "model.num_chunks": Rule(_chunks),
    "seed": Rule(_seed),
    "cudnn_benchmark": no("write torch.backends.cudnn.benchmark = ... in your script"),
    "cudnn_deterministic": no("write torch.backends.cudnn.deterministic = ... in your script"),
    "torch_ddp.bucket_cap_mb": to("parallel.data.bucket_mb", number),
    "torch_ddp.find_unused_parameters": done("parameters without gradient are seen by themselves"),
    "torch_ddp.*": no("torch's DistributedDataParallel is not used: halfmesh has a reducer of its own"),
    "zero": Rule(lambda value, source: whole_section(value, "zero"), any_value=True),
    "zero.level": Rule(_zero_level),
    "zero.model_config": done("parallel.data.strategy = 'fsdp'"),
    "zero.optimizer_config": done("the defaults of fp16"),
    "zero.model_config.shard_strategy": done("fsdp divides each parameter by rows"),
    "zero.model_config.tensor_placement_policy": Rule(_placement),
    "zero.model_config.reduce_scatter_bucket_size_mb": no("fsdp sends a block at a time: there are no buckets"),
    "zero.model_config.fp32_reduce_scatter": Rule(
        lambda value, source: Converted({"parallel.data.reduce_dtype": "float32" if flag(value) else "float16"})
    ),
    "zero.model_config.reuse_fp16_shard": no("gradients have memory of their own"),
    "zero.model_config.gradient_predivide_factor": no("gradients are averaged in fp32, where nothing overflows"),
    "zero.optimizer_config.gpu_margin_mem_ratio": no("nothing moves by itself; see parallel.data.cpu_offload"),
    **{f"{_ZERO_SCALER}{name}": _zero_scaler(name) for name in SCALER_KEYS},
    **{
        f"{section}.*": _BY_SCRIPT
        for section in ("model", "optimizer", "loss", "lr_scheduler", "train_data", "test_data", "dataset", "schedule")
    },
    **dict.fromkeys(("model", "optimizer", "loss", "lr_scheduler", "train_data", "test_data"), _BY_SCRIPT),
    "hooks": no("give them to Trainer.fit(hooks=[...])"),
    "logging.*": no("halfmesh uses Python's logging: halfmesh.get_logger()"),
    "logging": no("halfmesh uses Python's logging: halfmesh.get_logger()"),
}
for _name in ("dataset", "schedule"):
    RULES[_name] = _BY_SCRIPT


def _own_in_lower_case(value: Any, source: Source) -> Outcome:
    raise UnreadableError("Colossal-AI itself reads no such key; a constant of your own is written in UPPERCASE here")


def _others(name: str, value: Any) -> Rule | None:
    """UPPERCASE names are the user's own, here as there."""
    if isinstance(value, Code) and name.startswith("line "):
        return Rule(_line, any_value=True)
    top = name.partition(".")[0]
    if not (top.isupper() and top.isidentifier() and not top.startswith("_")) or keyword.iskeyword(top):
        is_near = find_near(top, [known for known in RULES if known.islower()])
        return Rule(_own_in_lower_case, any_value=True) if "." not in name and not is_near else None
    return Rule(lambda given, source: _constant(name, given), any_value=True)  # None is a value of theirs


def _line(value: Any, source: Source) -> Outcome:
    raise UnreadableError("the file is not run: see whether this changes one of the keys")


def _constant(name: str, value: Any) -> Outcome:
    if isinstance(value, Code):
        raise UnreadableError(f"its value is known only when the file runs: copy it by hand: {name} = {value}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UnreadableError("a key of it is not a name")
    if not _is_literal(value):
        raise UnreadableError(f"a {text(type(value).__name__)} cannot be written into a config: copy it by hand")
    return Converted({name: value})


def _is_literal(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_literal, value)) and value != set()
    if type(value) is dict:
        return all(_is_literal(key) and _is_literal(item) for key, item in value.items())
    return value is None or type(value) in (str, int, float, bool, bytes, complex)


def _defaults(source: Source) -> dict[str, Any]:
    if not source.has("zero") or source.get("zero", 0) in (None, {}):
        return {}
    return {"parallel.data.strategy": "fsdp"} | ({} if source.has("fp16") else {"fp16.mode": "naive"})


def _looks(source: Source) -> tuple[str, ...]:
    looks = []
    if _defaults(source):
        looks.append(
            "zero divided parameters, gradients and state over the data ranks, in fp16 with fp32 masters: that is "
            "parallel.data = 'fsdp' with fp16 = dict(mode='naive'). Where only optimizer state has to be divided, "
            "'zero1' sends less."
        )
    return tuple(looks)


COLOSSAL = Origin(title="Colossal-AI", rules=RULES, others=_others, defaults=_defaults, looks=_looks)
