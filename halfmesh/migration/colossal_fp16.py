"""Colossal-AI's `fp16` section: which keys each mode has, and what they mean here."""

from __future__ import annotations

from typing import Any

from .from_apex import OPTIONS as APEX_OPTIONS
from .outcome import (
    Converted,
    NotUnderstood,
    Outcome,
    Rule,
    UnreadableError,
    Without,
    anything,
    flag,
    no,
    number,
    one_of,
)
from .source import Source

_MODES = {"torch": "torch", "apex": "apex", "naive": "naive", "parallel": "naive"}
_TORCH = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
SCALER_KEYS = (
    "initial_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
    "max_scale",
)


def whole_section(value: Any, name: str) -> Outcome:
    """A section that is not a dict of keys."""
    if value is None or value == {}:
        return Converted(says=f"nothing to write: {name} is off, as by default")
    raise UnreadableError(f"{name} is a dict of keys, not {value!r:.100}")


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
        allowed = {"torch": _TORCH, "naive": (*SCALER_KEYS, "verbose", "log_num_zeros_in_grad"), "apex": APEX_OPTIONS}[
            mode
        ]
        if name not in allowed:
            return NotUnderstood(f"mode {mode} has no such key; it has {', '.join(allowed)}")
        if value is None and mode == "naive":
            return _unbounded(name)
        if mode == "naive" and source.get("fp16.dynamic_grad_scale") is False:
            if name == "initial_scale":
                return Converted({"fp16.loss_scale": number(value)})
            if name in SCALER_KEYS:
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


FP16_RULES: dict[str, Rule] = {
    "fp16": Rule(lambda value, source: whole_section(value, "fp16"), any_value=True),
    "fp16.mode": Rule(_fp16_mode, any_value=True),
    **{f"fp16.{name}": _of_mode(name) for name in (*_TORCH, *SCALER_KEYS, *APEX_OPTIONS, "verbose")},
    "fp16.log_num_zeros_in_grad": _of_mode("log_num_zeros_in_grad"),
    "fp16.hysterisis": Rule(_hysterisis),
    "fp16.dynamic_grad_scale": Rule(_dynamic),
    "fp16.clip_grad_norm": no("Colossal-AI put the top-level clip_grad_norm in its place; set that one"),
    "fp16.dp_process_group": no("groups follow from the mesh: remove it"),
    "fp16.mp_process_group": no("groups follow from the mesh: remove it"),
}
