"""Colossal-AI's legacy config.py: what its `launch` and `initialize` read of it."""

from __future__ import annotations

import keyword
from typing import Any

from ..errors import find_near
from .convert import Origin
from .from_apex import OPTIONS as APEX_OPTIONS
from .outcome import (
    Converted,
    NotUnderstood,
    Outcome,
    Rule,
    UnreadableError,
    Without,
    anything,
    done,
    flag,
    no,
    number,
    one_of,
    text,
    to,
    whole,
)
from .source import Code, Source

_BY_SCRIPT = no("halfmesh builds nothing from the config: make it in your script, and pass it to initialize")
_MODES = {"torch": "torch", "apex": "apex", "naive": "naive", "parallel": "naive"}
_TORCH = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_NAIVE = ("initial_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale")
_ZERO_SCALER = "zero.optimizer_config."


def _mode(source: Source) -> str | None:
    mode = source.get("fp16.mode")
    if isinstance(mode, str):
        return _MODES.get(mode.lower())
    return None


def _fp16_mode(value: Any, source: Source) -> Outcome:
    if value is None:
        return Converted(says="fp32: neither fp16 nor bf16 is set")
    return Converted({"fp16.mode": one_of(value, _MODES)}, look=_mode_look(source))


def _mode_look(source: Source) -> str:
    if _mode(source) != "naive" or source.has("fp16.initial_scale") or source.has("fp16.dynamic_grad_scale"):
        return ""
    return (
        "the loss scale begins at 2**16 here; Colossal-AI's page says 2**32 (its later code 2**16), from where the "
        "first 20 steps or so are lost"
    )


def _of_mode(name: str) -> Rule:
    """A key of fp16, if it is one of the mode's."""

    def do(value: Any, source: Source) -> Outcome:
        mode = _mode(source)
        if mode is None:
            return Without("without fp16.mode (or with None) mixed precision is off, and this key has no effect")
        allowed = {"torch": _TORCH, "naive": (*_NAIVE, "verbose", "log_num_zeros_in_grad"), "apex": APEX_OPTIONS}[mode]
        if name not in allowed:
            return NotUnderstood(f"mode {mode} has no such key; it has {', '.join(allowed)}")
        if value is None and mode == "naive":
            return _unbounded(name)
        if mode == "naive" and source.get("fp16.dynamic_grad_scale") is False:
            if name == "initial_scale":
                return Converted({"fp16.loss_scale": number(value)})
            if name in _NAIVE:
                return Without("dynamic_grad_scale=False: the scale never moves, and this key has no effect")
        return Converted({} if value is None else {f"fp16.{name}": anything(value)}, says="None is the default")

    return Rule(do, any_value=name in ("min_scale", "max_scale"))


def _unbounded(name: str) -> Outcome:
    ours = {"min_scale": "1", "max_scale": "2**32"}[name]
    return Without(
        f"None left the scale without a bound: it could reach 0 or inf; here {name} is {ours} unless you write a number"
    )


def _hysterisis(value: Any, source: Source) -> Outcome:
    if source.has("fp16.hysteresis"):
        return NotUnderstood("a misspelling of hysteresis, which is there, too")
    return _of_mode("hysteresis").do(value, source)


def _dynamic(value: Any, source: Source) -> Outcome:
    if _mode(source) != "naive":
        return _of_mode("dynamic_grad_scale").do(value, source)
    if flag(value):
        return Converted({"fp16.loss_scale": "dynamic"})
    if not source.has("fp16.initial_scale"):
        return NotUnderstood("False needs initial_scale, the static scale, which is missing")
    return Converted(says="fp16.loss_scale is the number that initial_scale was")


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
                return Without(
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
        return Without("ring attention over the sequence does not exist here; see parallel.tensor.size")
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
    return Converted({"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": whole(value)})


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
    "fp16": Rule(lambda value, source: _whole_section(value, "fp16"), any_value=True),
    "fp16.mode": Rule(_fp16_mode, any_value=True),
    **{f"fp16.{name}": _of_mode(name) for name in (*_TORCH, *_NAIVE, *APEX_OPTIONS, "verbose")},
    "fp16.log_num_zeros_in_grad": _of_mode("log_num_zeros_in_grad"),
    "fp16.hysterisis": Rule(_hysterisis),
    "fp16.dynamic_grad_scale": Rule(_dynamic),
    "fp16.clip_grad_norm": no("Colossal-AI put the top-level clip_grad_norm in its place; set that one"),
    "fp16.dp_process_group": no("groups follow from the mesh: remove it"),
    "fp16.mp_process_group": no("groups follow from the mesh: remove it"),
    "parallel": Rule(lambda value, source: _whole_section(value, "parallel"), any_value=True),
    "parallel.pipeline": _degree("parallel.pipeline.size", "pipeline"),
    "parallel.pipeline.size": _degree("parallel.pipeline.size", "pipeline"),
    "parallel.tensor": _degree("parallel.tensor.size", "tensor"),
    "parallel.tensor.size": _degree("parallel.tensor.size", "tensor"),
    "parallel.tensor.mode": Rule(_tensor_mode, any_value=False),
    "parallel.tensor.depth": no("the depth of 2.5d; layers are divided in one dimension here"),
    "parallel.data": Rule(_data),
    "parallel.data.size": Rule(_data),
    "parallel.sequence": no("there is no axis for ring attention here; nearest is tensor with sequence_parallel=True"),
    "parallel.sequence.size": no("there is no axis for ring attention; nearest is tensor with sequence_parallel=True"),
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
    "zero": Rule(lambda value, source: _whole_section(value, "zero"), any_value=True),
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
    **{f"{_ZERO_SCALER}{name}": _zero_scaler(name) for name in _NAIVE},
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


def _whole_section(value: Any, name: str) -> Outcome:
    """A section that is not a dict of keys."""
    if value is None or value == {}:
        return Converted(says=f"nothing to write: {name} is off, as by default")
    raise UnreadableError(f"{name} is a dict of keys, not {value!r:.100}")


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
