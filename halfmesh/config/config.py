"""The config as an immutable value that compares, prints, pickles and converts to YAML; and what is wrong with one, in
words: problems of pydantic, and keys of other engines."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ValidationError

from ..amp.plugin import AMP_PLUGINS, PRECISIONS
from ..errors import ConfigError, did_you_mean, find_near, show, show_name
from ..options import Options
from ..parallel.registries import AXES
from .schema import PrecisionConfig, Settings, data_config, get_plugin, parallel_config, strategy_keys
from .text import as_python, to_yaml

OWN_NAMES = "; write your own constants in UPPERCASE"
"""The end of the message about an unknown key that is similar to no other."""


class Config(Settings, extra="allow"):
    """The settings of `Settings` as attributes, and your UPPERCASE constants next to them.

    `halfmesh.load_config` makes one.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The user's constants."""

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
            ConfigError: YAML cannot hold a value (an object, a function); the message names its key.
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
        line = f"Config({', '.join(items)})"
        return line if len(line) <= 88 else "\n".join(["Config(", *(f"    {item}," for item in items), ")"])

    __str__ = __repr__


def build(raw: Mapping[Any, Any], source: str = "the config", hint: str = OWN_NAMES) -> Config:
    """The config that `raw` describes.

    Raises:
        ConfigError: with all problems at once.
    """
    unknown = {key: problem for key in raw if (problem := explain_key(key, hint)) is not None}
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

_EXPECTED = {
    "literal_error": "{expected}",
    "bool_type": "True or False",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a number less than {lt:g}",
    "less_than_equal": "{le} or less",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "tuple_type": "a tuple",
    "dict_type": "a dict",
}
"""The values that are allowed, by pydantic's type of error."""
DATA = ("parallel", "data")
FAR_CUTOFF = 0.75  # stricter for keys of other levels, because there are many


def explain_key(key: Any, hint: str) -> str | None:
    """The mistake in a top-level key that is neither a setting nor an UPPERCASE constant; None if it is one.

    `hint` ends the line of a key that is like no other.
    """
    if not isinstance(key, str):
        return f"{show(key)}: keys must be strings, not {type(key).__name__}"
    if key == "NUM_MICRO_BATCHES":  # the one constant of Colossal-AI that was a setting
        return f"{key}: {FOREIGN_KEYS[key.lower()]}"
    if key in Settings.model_fields or (key.isupper() and not key.startswith("_")):
        return None
    return f"{show_name(key)}: unknown key{_suggest(key, (), {}, hint)}"


def find_contradictions(raw: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are valid alone, but not together."""
    given = [key for key in PRECISIONS if raw.get(key) is not None]
    if len(given) > 1:
        yield f"{', '.join(given)}: a run has one precision; keep one of these keys"
    for key in given:
        yield from _find_moot(key, raw[key])


def _find_moot(key: str, given: Any) -> Iterator[str]:
    """Keys of a mode that mean nothing in this precision."""
    if not isinstance(given, Mapping):
        return
    try:
        plugin = get_plugin(given.get("mode"))
    except ValueError:
        return  # reported by the schema
    has = "bf16 has" if key == "bf16" else "fp8 computes gradients in bf16, which has"
    for name in sorted(plugin.scale_keys & given.keys()) if key != "fp16" else ():
        yield f"{key}.{name}: {has} the range of fp32, so the loss is not scaled; remove {name}, or use fp16"
    for name in sorted(plugin.float8_keys & given.keys()) if key != "fp8" else ():
        yield f"{key}.{name}: it sets how float8 works, which {key} does not use; remove {name}, or use fp8"


def explain(raw: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per wrong value. The branches of a union each report it; their messages are joined."""
    by_path: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        by_path.setdefault(_path(error, raw), []).append(error)
    problems = []
    for path, found in by_path.items():
        depth = max(len(error["loc"]) for error in found)  # of the branch that fits the value best
        deepest = [error for error in found if len(error["loc"]) == depth]
        for _, same in groupby(deepest, key=lambda error: show(error["input"])):
            problems.append(f"{'.'.join(map(show_name, path))}: {_reason(list(same), path, raw)}")
    return problems


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
    """The mistake in one value, in pydantic's words if we have none."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        others = [n for n, keys in strategy_keys().items() if path[-1] in keys] if path[:-1] == DATA else []
        if others:
            strategy = raw["parallel"]["data"].get("strategy", "replicate")
            return f"only strategy={others[0]!r} has this key, and the strategy is {strategy!r}; remove it"
        return "unknown key" + _suggest(path[-1], path[:-1], raw, "")
    if kind in ("value_error", "assertion_error"):
        return str(errors[0]["ctx"]["error"])
    if all(error["type"] in _EXPECTED for error in errors):
        return _expect(errors)
    said = " or: ".join(dict.fromkeys(error["msg"] for error in errors))
    return said if kind in ("missing", "invalid_key") else f"{show(errors[0]['input'])}: {said}"


def _expect(errors: Sequence[Mapping[str, Any]]) -> str:
    """The allowed values in words, the value, and the number that a string of digits should be."""
    given = errors[0]["input"]
    allowed = " or ".join(dict.fromkeys(_EXPECTED[one["type"]].format(**one.get("ctx", {})) for one in errors))
    if not isinstance(given, str):
        return f"expected {allowed}, got {show(given)}"
    kinds = {"int_type": int, "float_type": float}
    for kind in filter(None, (kinds.get(error["type"]) for error in errors)):
        with contextlib.suppress(ValueError):
            return f"expected {allowed}, got the string {show(given)}; write {as_python(kind(given))}"
    return f"expected {allowed}, got {show(given)}"


def _suggest(key: str, parents: tuple[str, ...], raw: Mapping[str, Any], otherwise: str) -> str:
    """Which key was meant: one of another library, one from elsewhere in the tree, or a similar one here."""
    if (foreign := FOREIGN_KEYS.get(key.lower())) is not None:
        return f"; {foreign}"
    is_of_mode = bool(parents) and parents[0] in PRECISIONS
    plugin = get_plugin(raw[parents[0]]["mode"]) if is_of_mode else None
    paths = _all_paths() if plugin is None else list(_walk(plugin.options, f"{parents[0]}."))
    here = [name for section, _, name in (path.rpartition(".") for path in paths) if section == ".".join(parents)]
    if parents == DATA:  # the keys of other strategies are not allowed beside this one
        here = list(data_config(raw["parallel"]["data"].get("strategy", "replicate")).model_fields)
    if is_of_mode:
        modes = [name for name, keys in _mode_keys().items() if key in keys]
        elsewhere = f"; mode {' and '.join(map(repr, modes))} has it" if modes else ""
        return did_you_mean(key, here) or elsewhere or f"; allowed: {', '.join(['mode', *here])}"
    if found := [path for path in paths if path.rpartition(".")[2] == key]:
        return f"; it belongs at {' or '.join(map(repr, found))}"
    if near := did_you_mean(key, here):
        return near
    by_leaf = {path.rpartition(".")[2]: path for path in paths}
    if leaf := find_near(key, by_leaf, FAR_CUTOFF):
        return f"; did you mean {by_leaf[leaf]!r}?"
    return otherwise or f"; allowed: {', '.join(here)}"


def _all_paths() -> list[str]:
    """All keys, dotted; those of all modes under fp16, and of all axes and strategies."""
    paths = [f"fp16.{key}" for keys in _mode_keys().values() for key in keys]
    paths += [f"parallel.data.{key}" for keys in strategy_keys().values() for key in keys]
    paths += _walk(parallel_config([name for name, _ in AXES.each()]), "parallel.")
    return list(dict.fromkeys([*_walk(Settings, ""), *paths, "fp16.mode"]))


def _mode_keys() -> dict[str, list[str]]:
    """The keys of each mode, without plugins that cannot be imported: they must not hide the mistake at hand."""
    keys = {}
    for name in AMP_PLUGINS.names():
        with contextlib.suppress(ValueError):
            keys[name] = list(get_plugin(name).options.model_fields)
    return keys


def _find_models(annotation: Any) -> Iterator[type[Options]]:
    if isinstance(annotation, type) and issubclass(annotation, Options):
        yield annotation
    for inner in get_args(annotation):
        yield from _find_models(inner)


def _walk(model: type[Options], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _find_models(info.annotation):
            if inner is not PrecisionConfig:
                yield from _walk(inner, f"{prefix}{name}.")


_INSTEAD = {
    "parallel.pipeline.size": "pipeline_parallel_degree partitions pipeline_parallelism",
    "parallel.pipeline.microbatches": "num_micro_batches",
    "parallel.pipeline": "pipeline_parallel",
    "parallel.tensor.size": "tensor_parallel_degree",
    "parallel.tensor": "tensor_parallel",
    "parallel.data = 'zero1' or 'fsdp'": "zero zero_optimization",
    "parallel.data = 'zero1'": "shard_optimizer_state",
    "parallel.data = 'fsdp'": "fsdp sharded_data_parallel_degree",
    "fp16 = dict(mode='torch') or bf16 = dict(mode='torch')": "amp dtype precision mixed_precision",
    "growth_interval": "scale_window",
    "hysteresis": "delayed_shift",
    "activation_offload": "offload_activations",
    "clip_grad_norm": "max_grad_norm grad_clip gradient_clipping gradient_clip_val",
    "gradient_accumulation": "accumulate_grad_batches gradient_accumulation_steps",
    "global_batch_size": "train_batch_size",
}
"""The key to set here, and the keys of other libraries for it, lower case."""
_OTHERS = {
    "optimize": "remove it: halfmesh has no such choice; parallel.pipeline.partition sets the stages",
    "dynamic_loss_args": "set growth_interval (scale_window), min_scale and hysteresis (delayed_shift) in fp16 instead",
    "batch_size": "give it to the DataLoader: the batch size of one data rank",
    **dict.fromkeys(["num_workers", "shuffle", "drop_last", "pin_memory"], "give it to the DataLoader"),
    **dict.fromkeys(
        ["lr", "learning_rate", "weight_decay", "momentum", "betas", "eps"],
        "give it to the optimizer in your script, or keep it here as an UPPERCASE constant",
    ),
    **dict.fromkeys(
        ["epochs", "num_epochs", "max_epochs", "max_steps"],
        "give it to Trainer.fit or your loop, or keep it here as an UPPERCASE constant",
    ),
    **dict.fromkeys(
        ["optimizer", "model", "criterion", "scheduler", "lr_scheduler"],
        "build it in your script, and pass it to initialize",
    ),
    "gradient_handler": "remove it: halfmesh reduces gradients automatically; see parallel.data",
    **dict.fromkeys(
        ["static_loss_scale", "dynamic_loss_scale"],
        "set fp16.loss_scale to that number or 'dynamic', with mode='naive'",
    ),
    **dict.fromkeys(
        ["data_parallel", "ddp", "dp"],
        "omit it: data ranks are what the other axes leave; or set parallel.data.size",
    ),
}
FOREIGN_KEYS: Mapping[str, str] = types.MappingProxyType(
    {name: f"set {ours} instead" for ours, names in _INSTEAD.items() for name in names.split()} | _OTHERS
)
"""Keys of other libraries, lower case, and what to write here."""
