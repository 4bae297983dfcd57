"""The config as an immutable value that compares, prints, pickles and converts to YAML; and what is wrong with one, in
words: problems of pydantic, and keys of other engines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ValidationError

from ..amp.plugin import AMP_PLUGINS, PRECISIONS
from ..errors import ConfigError, did_you_mean, show, show_name
from ..options import Options
from ..parallel.registries import AXES
from .schema import PrecisionConfig, Settings, data_config, get_plugin, parallel_config, strategy_keys
from .text import as_python, to_yaml


class Config(Settings, extra="allow"):
    """The settings of `Settings` as attributes, and your UPPERCASE constants next to them.

    `halfmesh.load_config` makes one.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The user's constants."""

    def __reduce__(self) -> Any:
        return Config.model_validate, (self.to_dict(),)  # classes with keys of an axis or strategy have no place

    @property
    def user(self) -> dict[str, Any]:
        """The user's own constants."""
        return dict(self.model_extra or {})

    @property
    def precision(self) -> PrecisionConfig | None:
        """The value of `fp16`, `bf16` or `fp8`, whichever is set."""
        return self.fp16 or self.bf16 or self.fp8

    @property
    def precision_key(self) -> Literal["fp16", "bf16", "fp8"] | None:
        """The key that sets it."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp8" if self.fp8 else None

    @property
    def precision_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """The half precision in use; under fp8, that of everything except the float8 products."""
        return "float16" if self.fp16 else "bfloat16" if self.precision else None

    def to_dict(self) -> dict[str, Any]:
        """The keys that differ from the defaults, and the constants, as a user would write them."""
        given = self.model_dump(include=set(Settings.model_fields), exclude_defaults=True)
        for key in PRECISIONS.keys() & given.keys():
            given[key] = {"mode": given[key]["mode"], **given[key]["options"]}
        if "compile" in given:
            given["compile"] = given["compile"] or True
        if given.get("clip_grad_norm", {}).get("norm_type") == math.inf:
            given["clip_grad_norm"]["norm_type"] = "inf"  # JSON has no infinite numbers
        return {**given, **self.user}

    def to_yaml(self) -> str:
        """`to_dict` as YAML; loading it gives an equal config.

        Raises:
            ConfigError: YAML cannot hold a value (an object, a function).
        """
        return to_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Config:
        """A copy with new values for the top-level keys in `changes`.

        Raises:
            ConfigError: a key is unknown or a value is not allowed.
        """
        return build({**self.to_dict(), **changes}, "config.replace()")

    def __repr__(self) -> str:
        items = [f"{key}={as_python(value)}" for key, value in self.to_dict().items()]
        return f"Config({', '.join(items)})"

    __str__ = __repr__


def build(raw: Mapping[Any, Any], source: str = "the config") -> Config:
    """The config that `raw` describes.

    Raises:
        ConfigError: with all problems at once.
    """
    unknown = {key: problem for key in raw if (problem := explain_key(key)) is not None}
    known = {key: value for key, value in raw.items() if key not in unknown}
    config: Config | None = None
    errors: Sequence[Mapping[str, Any]] = ()
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems = [*unknown.values(), *find_contradictions(known), *explain(known, errors)]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


# -- mistakes in words -------------------------------------------------------------------------------------------------


def explain_key(key: Any) -> str | None:
    """The mistake in a top-level key that is neither a setting nor an UPPERCASE constant; None if it is one."""
    if not isinstance(key, str):
        return f"{show(key)}: keys must be strings, not {type(key).__name__}"
    if key == "NUM_MICRO_BATCHES":  # the one constant of Colossal-AI that was a setting
        return f"{key}: {FOREIGN_KEYS[key.lower()]}"
    if key in Settings.model_fields or (key.isupper() and not key.startswith("_")):
        return None
    return f"{show_name(key)}: {_explain_unknown(key, (), {})}"


def find_contradictions(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are valid alone, but not together, and those of a mode that mean nothing in this precision."""
    given = [key for key in PRECISIONS if raw.get(key) is not None]
    if len(given) > 1:
        yield f"{', '.join(given)}: a run has one precision; keep one of these keys"
    for key in given:
        try:
            plugin = get_plugin(raw[key].get("mode"))
        except (ValueError, AttributeError):
            continue  # reported by the schema
        has = "bf16 has" if key == "bf16" else "fp8 computes gradients in bf16, which has"
        for name in sorted(plugin.scale_keys & raw[key].keys()) if key != "fp16" else ():
            yield f"{key}.{name}: {has} the range of fp32, so the loss is not scaled; remove {name}, or use fp16"
        for name in sorted(plugin.float8_keys & raw[key].keys()) if key != "fp8" else ():
            yield f"{key}.{name}: it sets how float8 works, which {key} does not use; remove {name}, or use fp8"


def explain(raw: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per wrong value. The branches of a union each report it; their messages are joined."""
    by_path: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        by_path.setdefault(_path(error, raw), []).append(error)
    for path, found in by_path.items():
        depth = max(len(error["loc"]) for error in found)  # of the branch that fits the value best
        deepest = [error for error in found if len(error["loc"]) == depth]
        yield f"{'.'.join(map(show_name, path))}: {_reason(deepest, path, raw)}"


def _path(error: Mapping[str, Any], raw: Any) -> tuple[str, ...]:
    """The keys of the user's that lead to the error; pydantic's `loc` also has list items, union branches, and the long
    form of a shorthand."""
    path = []
    for part in error["loc"]:
        if isinstance(raw, Mapping) and part in raw:
            path.append(str(part))
        elif not isinstance(raw, (list, tuple)) or not isinstance(part, int):
            break
        raw = raw[part]
    return (*path, error["loc"][-1]) if error["type"] == "missing" else tuple(path)


def _reason(errors: Sequence[Mapping[str, Any]], path: tuple[str, ...], raw: Mapping[str, Any]) -> str:
    """The mistake in one value."""
    first = errors[0]
    if first["type"] == "extra_forbidden":
        return _explain_unknown(path[-1], path[:-1], raw)
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return str(first["msg"])
    said = " or ".join(dict.fromkeys(error["msg"].replace("Input should be", "expected") for error in errors))
    return f"{said.replace('or expected', 'or')}, got {show(first['input'])}"


def _explain_unknown(key: str, parents: tuple[str, ...], raw: Mapping[str, Any]) -> str:
    """Which key was meant: one of another library, one from elsewhere in the tree, or a similar one here."""
    if (foreign := FOREIGN_KEYS.get(key.lower())) is not None:
        return f"unknown key; {foreign}"
    is_of_mode = bool(parents) and parents[0] in PRECISIONS
    paths = list(_walk(get_plugin(raw[parents[0]]["mode"]).options, f"{parents[0]}.")) if is_of_mode else _all_paths()
    here = [name for section, _, name in (path.rpartition(".") for path in paths) if section == ".".join(parents)]
    if parents == ("parallel", "data"):  # the keys of other strategies are not allowed beside this one
        strategy = raw["parallel"]["data"].get("strategy", "replicate")
        if others := [name for name, keys in strategy_keys().items() if key in keys]:
            return f"only strategy={others[0]!r} has this key, and the strategy is {strategy!r}; remove it"
        here = list(data_config(strategy).model_fields)
    elsewhere = [path for path in paths if path.rpartition(".")[2] == key and not is_of_mode]
    if elsewhere:
        return f"unknown key; it belongs at {' or '.join(map(repr, elsewhere))}"
    allowed = f"; allowed: {', '.join(['mode', *here] if is_of_mode else here)}"
    if not parents:
        allowed = "; write your own constants in UPPERCASE, and begin helpers of a .py config with an underscore"
    return f"unknown key{did_you_mean(key, here) or allowed}"


def _all_paths() -> list[str]:
    """All keys, dotted; those of all modes under fp16, and of all axes and strategies."""
    paths = [*_walk(Settings, ""), *_walk(parallel_config([name for name, _ in AXES.each()]), "parallel.")]
    paths += [f"parallel.data.{key}" for keys in strategy_keys().values() for key in keys]
    for name in AMP_PLUGINS.names():
        with contextlib.suppress(ValueError):  # a plugin that cannot be imported must not hide the mistake at hand
            paths += [f"fp16.{key}" for key in get_plugin(name).options.model_fields]
    return list(dict.fromkeys([*paths, "fp16.mode"]))


def _walk(model: type[Options], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _find_models(info.annotation):
            if inner is not PrecisionConfig:
                yield from _walk(inner, f"{prefix}{name}.")


def _find_models(annotation: Any) -> Iterator[type[Options]]:
    if isinstance(annotation, type) and issubclass(annotation, Options):
        yield annotation
    for inner in get_args(annotation):
        yield from _find_models(inner)


_OURS = "or keep it here as an UPPERCASE constant"
_FOREIGN = {
    "pipeline_parallel_degree partitions pipeline_parallelism pipeline_parallel": "set parallel.pipeline instead",
    "num_micro_batches": "set parallel.pipeline.microbatches instead",
    "tensor_parallel_degree tensor_parallel": "set parallel.tensor instead",
    "zero zero_optimization": "set parallel.data = 'zero1' or 'fsdp' instead",
    "shard_optimizer_state": "set parallel.data = 'zero1' instead",
    "fsdp sharded_data_parallel_degree": "set parallel.data = 'fsdp' instead",
    "data_parallel ddp dp": "omit it: data ranks are what the other axes leave; or set parallel.data.size",
    "amp dtype precision mixed_precision": "set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead",
    "static_loss_scale dynamic_loss_scale": "set fp16.loss_scale to that number or 'dynamic', with mode='naive'",
    "dynamic_loss_args": "set growth_interval (scale_window), min_scale and hysteresis (delayed_shift) in fp16 instead",
    "scale_window": "set growth_interval instead",
    "delayed_shift": "set hysteresis instead",
    "offload_activations": "set activation_offload instead",
    "max_grad_norm grad_clip gradient_clipping gradient_clip_val": "set clip_grad_norm instead",
    "accumulate_grad_batches gradient_accumulation_steps": "set gradient_accumulation instead",
    "train_batch_size": "set global_batch_size instead",
    "batch_size": "give it to the DataLoader: the batch size of one data rank",
    "num_workers shuffle drop_last pin_memory": "give it to the DataLoader",
    "lr learning_rate weight_decay momentum betas eps": f"give it to the optimizer in your script, {_OURS}",
    "epochs num_epochs max_epochs max_steps": f"give it to Trainer.fit or your loop, {_OURS}",
    "optimizer model criterion scheduler lr_scheduler": "build it in your script, and pass it to initialize",
    "optimize gradient_handler": "remove it: halfmesh has no such choice",
}
FOREIGN_KEYS: Mapping[str, str] = MappingProxyType(
    {name: instead for names, instead in _FOREIGN.items() for name in names.split()}
)
"""Keys of other libraries, lower case, and what to write here."""
