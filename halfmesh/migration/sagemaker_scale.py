"""The loss scale of SageMaker's optimizer, which bf16 does without."""

from __future__ import annotations

from typing import Any

from .outcome import Converted, Outcome, Rule, UnreadableError, Without, flag, number
from .source import Source

_UNSCALED = Without("bf16 has the range of fp32, so the loss is not scaled")


def _in_bf16(source: Source) -> bool:
    return source.get("bf16") is True


def static(value: Any, source: Source) -> Outcome:
    if _in_bf16(source):
        return _UNSCALED
    if source.get("dynamic_loss_scale") is True:
        return Without("dynamic_loss_scale=True: the static scale has no effect")
    return Converted({"fp16.mode": "naive", "fp16.loss_scale": float(number(value))})


def dynamic(value: Any, source: Source) -> Outcome:
    if _in_bf16(source):
        return _UNSCALED
    if flag(value):
        look = "" if source.has("dynamic_loss_args.init_scale") else "the scale begins at 2**16 here, theirs at 2**32"
        return Converted({"fp16.mode": "naive", "fp16.loss_scale": "dynamic"}, look=look)
    if source.has("static_loss_scale"):
        return Converted(says="the scale is static_loss_scale")
    return Converted({"fp16.mode": "naive", "fp16.loss_scale": 1.0}, look="a static scale of 1: SageMaker's default")


def of_dynamic(*keys: str, look: str = "") -> Rule:
    """An argument of the dynamic scale, which has no effect on a static one."""

    def do(value: Any, source: Source) -> Outcome:
        if _in_bf16(source):
            return _UNSCALED
        if source.get("dynamic_loss_scale") is not True and source.has("static_loss_scale"):
            return Without("the scale is static_loss_scale: this has no effect")
        return Converted({"fp16.mode": "naive", **{f"fp16.{key}": number(value) for key in keys}}, look=look)

    return Rule(do)


def factor(value: Any, source: Source) -> Outcome:
    if _in_bf16(source):
        return _UNSCALED
    factor = number(value)
    if factor <= 1:
        raise UnreadableError(f"{value!r} is not greater than 1")
    return Converted({"fp16.mode": "naive", "fp16.growth_factor": float(factor), "fp16.backoff_factor": 1 / factor})
