"""The keys of a config: types, bounds, defaults."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, create_model, model_validator

from ..amp.plugin import AMP_PLUGINS, AMPPlugin
from ..errors import RegistryError, did_you_mean, find_near, shorten, show
from ..options import DType, Names, Options, PositiveFloat, PositiveInt
from ..parallel.dims import ParallelDims
from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS, TENSOR_STYLES
from ..utils.registry import Registry


class ActivationCheckpointConfig(Options):
    """`activation_checkpoint`: the modules whose activations are recomputed in backward. Off if no key is set.

    The shorthand "full" is `every=1`; "selective" is `every=1, selective=True`.
    """

    every: PositiveInt | None = None
    """Every N-th repeated block of the model, starting with the first."""
    patterns: Names = ()
    """Patterns of module names, instead of blocks."""
    selective: bool = False
    """Keep the outputs of matrix products and attention."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every is not None and self.patterns:
            raise ValueError("every and patterns both choose modules; leave one of them out")
        return self

    @property
    def enabled(self) -> bool:
        """True if anything is recomputed."""
        return self.every is not None or bool(self.patterns)

    @property
    def label(self) -> str:
        """The value as a user would write it."""
        blocks = "full" if self.every == 1 else f"every={self.every}"
        chosen = shorten(list(self.patterns)) if self.patterns else blocks
        return f"{chosen}, selective" if self.selective else chosen


_ACTIVATIONS = {None: {}, False: {}, True: {"every": 1}, "full": {"every": 1}, "selective": {"selective": True}}
"""The shorthand forms of `activation_checkpoint`."""


def _expand_activations(value: Any) -> Any:
    if isinstance(value, (str, bool, type(None))) and value in _ACTIVATIONS:
        value = _ACTIVATIONS[value]
    if isinstance(value, Mapping):
        chosen = value.get("patterns") or value.get("every") is not None
        return {"every": 1, **value} if value.get("selective") is True and not chosen else dict(value)
    if isinstance(value, ActivationCheckpointConfig):
        return value
    near = did_you_mean(value, ["full", "selective"]) if isinstance(value, str) else ""
    forms = "'full', 'selective', dict(every=2), dict(patterns=['blocks.*.mlp']) or False"
    raise ValueError(f"{show(value)} does not say what to recompute; use {forms}{near}")


def _check_signals(names: tuple[str, ...]) -> tuple[str, ...]:
    known = [one.name for one in signal.Signals if one.name not in ("SIGKILL", "SIGSTOP")]
    for name in names:
        if name not in known:
            near = "" if name in signal.Signals.__members__ else did_you_mean(name, known)
            raise ValueError(f"{name!r} is not a signal that a program can handle{near}")
    return names


_FROM_PATH = BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
Folder = Annotated[str, _FROM_PATH]
"""A string, or a path, which becomes one."""


class CheckpointConfig(Options):
    """`checkpoint`. The shorthand is the directory."""

    directory: Annotated[str, Field(min_length=1), _FROM_PATH]
    """A folder that all ranks share; created if needed."""
    every: PositiveInt | None = None
    """Updates between two saves. None: save only when the run receives a stop signal."""
    keep: PositiveInt | None = 3
    """How many checkpoints to keep; None: all."""
    in_background: bool = True
    """True: training continues during a save. A run that receives a stop signal waits for its last save."""
    signals: Annotated[Names, AfterValidator(_check_signals)] = ("SIGTERM", "SIGUSR1")
    """Stop signals: the run saves after the current step and exits with status 75."""


def get_plugin(mode: object) -> type[AMPPlugin]:
    """The plugin for `mode` (an AMP_TYPE, or a registered name in any case).

    Raises:
        ValueError: there is none; the message lists the modes.
    """
    if not isinstance(mode, str) or mode not in AMP_PLUGINS:
        near = did_you_mean(mode, AMP_PLUGINS.names())
        raise ValueError(f"mode={show(mode)} is not a registered mode; allowed: {list_names(AMP_PLUGINS)}{near}")
    try:
        return AMP_PLUGINS.get(mode)
    except RegistryError as error:
        raise ValueError(str(error)) from error


_OTHER_STRATEGIES = {"zero0": "replicate", "ddp": "replicate", "zero2": "zero1", "zero3": "fsdp", "full_shard": "fsdp"}
"""Other libraries' names of data strategies, and ours."""


def list_names(registry: Registry[Any], *more: str) -> str:
    """The registered names, quoted, for a message."""
    return ", ".join(map(repr, [*more, *registry.names()]))


def _registered(registry: Registry[Any], *more: str) -> AfterValidator:
    """A validator of names: those of `registry`, in any case, and `more`."""

    def check(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        known = [*more, *registry.names()]
        if name.lower() not in known:
            near = did_you_mean(name, known, _OTHER_STRATEGIES if registry is DATA_STRATEGIES else {})
            raise ValueError(f"{show(name)} is not one of {list_names(registry, *more)}{near}")
        return name.lower()

    return AfterValidator(check)


def _shorthand(key: str, kind: Any = object, allowed: str = "", none: Any = MappingProxyType({})) -> BeforeValidator:
    """A validator that reads a value of `kind` as {key: value}, and None as `none`; `allowed` is for the message."""

    def expand(value: Any) -> Any:
        if value is None:
            value = none
        if isinstance(value, Mapping):
            return dict(value)
        if value is None or isinstance(value, Options):
            return value
        if isinstance(value, kind):
            return {key: value}
        raise ValueError(f"{show(value)} is not {allowed}")

    return BeforeValidator(expand)


def _expand_parallel(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        given = dict(value or {})
        kind = parallel_config(given)
        return given if kind is ParallelConfig else kind.model_validate(given)
    if isinstance(value, Options):
        return value
    is_strategy = isinstance(value, str) and value in DATA_STRATEGIES.names()
    example = f"data={value!r}" if is_strategy else "tensor=2, pipeline=1, data='replicate'"
    raise ValueError(f"{show(value)} is not a dict; write for example dict({example})")


def _expand_precision(value: Any) -> Any:
    if value is None or isinstance(value, PrecisionConfig):
        return value
    if not isinstance(value, Mapping):
        mode = str(value).lower() if isinstance(value, str) and value in AMP_PLUGINS else "torch"
        raise ValueError(f"{show(value)} is not a dict; write dict(mode={mode!r}); modes: {list_names(AMP_PLUGINS)}")
    options = dict(value)
    if "mode" not in options:
        if near := find_near("mode", [key for key in options if isinstance(key, str)]):
            raise ValueError(f"unknown key {near!r}; did you mean 'mode'?")
        raise ValueError(f"mode is missing; write dict(mode='torch', ...); modes: {list_names(AMP_PLUGINS)}")
    mode = options.pop("mode")
    return PrecisionConfig(mode=str(mode).lower(), options=get_plugin(mode).options.model_validate(options))


def _check_styles(value: Any) -> Any:
    """Check the styles of a plan of patterns; their arguments are checked with the model."""
    for pattern, text in value.items() if isinstance(value, dict) else ():
        name = text.partition("(")[0].strip()
        if name != "auto" and name not in TENSOR_STYLES:
            near = did_you_mean(name, ["auto", *TENSOR_STYLES.names()])
            raise ValueError(f"{show(pattern)}: {show(text)} is not one of {list_names(TENSOR_STYLES, 'auto')}{near}")
    return value


class PrecisionConfig(Options):
    """`fp16`, `bf16` or `fp8`: the lower-case name of the mode, and the keys that its plugin defines."""

    mode: str
    options: SerializeAsAny[Options]

    @property
    def label(self) -> str:
        """The mode and its variant."""
        return f"{self.mode} {self.options.variant}".strip()


class TensorConfig(Options):
    """`parallel.tensor`. `plan` is a name, or a dict from patterns of module names to tensor styles."""

    size: PositiveInt = 1
    plan: Annotated[str | dict[str, str], AfterValidator(_check_styles), _registered(TENSOR_PLANS, "auto")] = "auto"
    sequence_parallel: bool = False
    mode: Annotated[Literal["1d"], BeforeValidator(lambda mode: "1d" if mode is None else mode)] = "1d"


class PipelineConfig(Options):
    """`parallel.pipeline`. `partition` is a name, or the names of the modules that begin a stage."""

    size: PositiveInt = 1
    microbatches: PositiveInt | None = None
    schedule: Annotated[str, _registered(SCHEDULES)] = "1f1b"
    chunks: PositiveInt = 1
    partition: Annotated[str | Names, _registered(PARTITIONERS, "auto")] = "auto"
    non_split: Names = ()
    """Arguments of the model and of the criterion that have no batch dimension."""
    send_dtype: Literal["same", "compute"] = "same"
    """The dtype of fp32 activations and their gradients on their way between stages: unchanged, or autocast's dtype
    (half the bytes)."""
    keep_outputs: bool = False
    eval_outputs: Literal["all", "last"] = "last"


class DataConfig(Options):
    """`parallel.data`. A derived class adds the keys of the strategy."""

    def __reduce__(self) -> Any:
        return _read_data, (self.model_dump(),)  # a derived class cannot be found by its name

    strategy: Annotated[str, _registered(DATA_STRATEGIES)] = "replicate"
    size: PositiveInt | None = None
    """None: the ranks that the other axes leave."""
    reduce_dtype: DType = "float32"
    bucket_mb: PositiveFloat | None = None
    """MiB; None: 25 as torch's DDP, or 1 for each data rank if that is more, as Megatron-LM lets buckets grow."""
    max_inflight: PositiveInt = 8


def data_config(strategy: object) -> type[DataConfig]:
    """The class of a `parallel.data` with this strategy: the keys of all strategies, and its own. (Without its own if
    there is no such strategy.)

    Raises:
        ValueError: a package's strategy cannot be imported.
    """
    try:
        known = isinstance(strategy, str) and strategy in DATA_STRATEGIES
        return _data_with(DATA_STRATEGIES.get(str(strategy)).options if known else Options)
    except RegistryError as error:
        raise ValueError(str(error)) from error


@cache
def _data_with(own: type[Options]) -> type[DataConfig]:
    bases: Any = (own, DataConfig)
    return DataConfig if own is Options else create_model("DataConfig", __base__=bases)


def _read_data(keys: Mapping[str, Any]) -> DataConfig:
    """The value of these keys. Those of another strategy may be there if they have their defaults."""
    kind = data_config(keys.get("strategy", "replicate"))
    if foreign := keys.keys() - kind.model_fields.keys():
        others = {key: field.default for fields in strategy_keys().values() for key, field in fields.items()}
        keys = {key: value for key, value in keys.items() if key not in foreign & others.keys() or value != others[key]}
    return kind.model_validate(keys)


def strategy_keys() -> dict[str, Mapping[str, Any]]:
    """Of each data strategy its own keys, and their fields."""
    return {name: kind.options.model_fields for name, kind in DATA_STRATEGIES.each()}


class ParallelConfig(Options):
    """`parallel`. A derived class adds fields for axes that you or a package registered."""

    def __reduce__(self) -> Any:
        return _read_parallel, (self.model_dump(),)  # a derived class cannot be found by its name

    tensor: Annotated[TensorConfig, _shorthand("size")] = TensorConfig()
    pipeline: Annotated[PipelineConfig, _shorthand("size")] = PipelineConfig()
    data: Annotated[
        SerializeAsAny[DataConfig],
        BeforeValidator(lambda value: _read_data(value) if isinstance(value, dict) else value),
        _shorthand("strategy", str, "a strategy or a dict; write for example 'zero1' or dict(size=2)"),
    ] = DataConfig()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all axes but data, by key."""
        return {name: getattr(self, name).size for name in AXES.names() if name in type(self).model_fields}

    @property
    def ranks_of_batch(self) -> int:
        """The number of ranks that together compute the batch of one data rank."""
        return math.prod(size for name, size in self.sizes.items() if not AXES.get(name).replica_dim)

    def dims(self, world_size: int) -> ParallelDims:
        """The mesh of `world_size` ranks: pp, dp, others, tp. `halfmesh.compat.check` says whether the sizes fit."""
        kinds = [(AXES.get(name), size) for name, size in self.sizes.items()]
        views = [(kind, size) for kind, size in kinds if kind.replica_dim and size > 1]
        kinds = [(kind, size) for kind, size in kinds if not kind.replica_dim]
        (outermost, stages), *others = sorted(kinds, key=lambda item: not item[0].splits_modules)
        dp = self.data.size or max(1, world_size // self.ranks_of_batch)
        named = [(kind.dim, size) for kind, size in reversed(others)]
        averaged = ("dp", *(kind.dim for kind, size in kinds if kind.splits_loss and size > 1))
        dims = ParallelDims(world_size, {outermost.dim: stages, "dp": dp} | dict(named), grad_axes=averaged)
        for kind, size in views:
            if dp % size == 0:
                dims = dims.split("dp", {kind.replica_dim: dp // size, kind.dim: size})
        return dims


def parallel_config(keys: Collection[str]) -> type[ParallelConfig]:
    """The class of a `parallel` with these keys, with a field for each registered axis among them."""
    others = (name for name in AXES.names() if name not in ParallelConfig.model_fields)
    return _parallel_with(tuple(name for name in others if name in keys))


@cache
def _parallel_with(names: tuple[str, ...]) -> type[ParallelConfig]:
    options = {name: AXES.get(name).options for name in names}
    fields: dict[str, Any] = {name: (Annotated[kind, _shorthand("size")], kind()) for name, kind in options.items()}
    return create_model("ParallelConfig", __base__=ParallelConfig, **fields) if names else ParallelConfig


def _read_parallel(keys: dict[str, Any]) -> ParallelConfig:
    return parallel_config(keys).model_validate(keys)


class ClipConfig(Options):
    """`clip_grad_norm`; `max_norm` 0 is off."""

    max_norm: Annotated[float, Field(ge=0)] = 0.0
    norm_type: Annotated[
        float, Field(gt=0, allow_inf_nan=True), BeforeValidator(lambda value: math.inf if value == "inf" else value)
    ] = 2.0


class CompileConfig(Options):
    """`compile`. From `backend` on, arguments of `torch.compile` with its meanings and defaults."""

    enabled: bool = True
    scope: Literal["auto", "model", "blocks"] = "auto"
    """The modules to compile: the model, or each repeated block. "auto": blocks with several ranks, else the model."""
    backend: str = "inductor"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    @property
    def graphs(self) -> dict[str, str]:
        """Of `mode` and `backend` what makes torch run the compiled code in CUDA graphs, by key."""
        given = {"mode": self.mode, "backend": self.backend} if self.enabled else {}
        return {key: name for key, name in given.items() if name in ("reduce-overhead", "max-autotune", "cudagraphs")}


Precision = Annotated[PrecisionConfig | None, BeforeValidator(_expand_precision)]


class Settings(Options):
    """The keys of a config."""

    fp16: Precision = None
    bf16: Precision = None
    fp8: Precision = None
    parallel: Annotated[SerializeAsAny[ParallelConfig], BeforeValidator(_expand_parallel)] = ParallelConfig()
    gradient_accumulation: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    """Samples per update over all data ranks; sets `gradient_accumulation`."""
    clip_grad_norm: Annotated[ClipConfig, _shorthand("max_norm")] = ClipConfig()
    loss_reduction: Literal["mean", "sum", "weighted"] = "mean"
    lr_interval: Literal["step", "epoch", "manual"] = "step"
    gradient_dtype: Literal["auto", "float32"] = "auto"
    activation_checkpoint: Annotated[ActivationCheckpointConfig, BeforeValidator(_expand_activations)] = (
        ActivationCheckpointConfig()
    )
    activation_offload: Annotated[bool, BeforeValidator(lambda value: False if value is None else value)] = False
    compile: Annotated[
        CompileConfig,
        _shorthand(
            "enabled", bool, "True, False or a dict such as dict(scope='blocks')", MappingProxyType({"enabled": False})
        ),
    ] = CompileConfig(enabled=False)
    fused: Literal["auto", False] = "auto"
    on_nonfinite: Literal["auto", "skip", "raise"] = "auto"
    max_consecutive_skips: PositiveInt = 50
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1024
    timeout: PositiveFloat = 600.0
    """Seconds that a collective may take."""
    checkpoint: Annotated[
        CheckpointConfig | None,
        _shorthand(
            "directory",
            (str, os.PathLike),
            "a folder; write 'checkpoints' (to recompute activations: activation_checkpoint)",
            none=None,
        ),
    ] = None
    debug: Literal["sync", "nonfinite"] | None = None
    """"sync": compare the ranks' shared state after each step. "nonfinite": find the first module with inf or nan in
    every update."""
    profile_ranges: bool = False
    """Name the parts of each step ("halfmesh.forward") for torch.profiler and, on CUDA, Nsight Systems."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """The name of the engine, if a program has several: shown in messages, and required to match when loading."""
    resume: Folder | None = None
    """A folder to load; or "auto": the newest checkpoint in `checkpoint.directory`, if there is one."""
    track_grad_norm: bool = False
