"""The keys of apex.amp: what each opt level stands for, the overrides, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator

from ..errors import did_you_mean
from ..options import Options, PositiveFloat, PositiveInt, Scale

INITIAL_SCALE = 2.0**16
"""What a dynamic scale begins with (apex.amp.scaler)."""


@dataclass(frozen=True)
class Properties:
    """What an opt level comes down to."""

    cast_model_type: Literal["float32", "float16"] | None
    """The dtype of parameters, buffers and inputs."""
    patch_torch_functions: bool
    """Cast for each operation, by O1's lists."""
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | Literal["dynamic"]


# apex.amp.frontend: the classes O0 to O3. (Its None, for "does not matter", is False here.)
OPT_LEVELS = MappingProxyType(
    {
        "O0": Properties("float32", False, False, False, 1.0),
        "O1": Properties(None, True, False, False, "dynamic"),
        "O2": Properties("float16", False, True, True, "dynamic"),
        "O3": Properties("float16", False, False, False, 1.0),
    }
)


def _to_opt_level(value: Any) -> Any:
    if type(value) in (str, int) and value not in OPT_LEVELS:
        near = f"O{str(value)[-1:]}"
        slip = near in OPT_LEVELS and str(value)[:-1] in ("", "0", "o")
        hint = f"; did you mean {near!r}, with the letter O?" if slip else did_you_mean(str(value), OPT_LEVELS)
        raise ValueError(f"{value!r} is not an opt level; allowed: 'O0', 'O1', 'O2', 'O3'{hint}")
    return value


def _to_dtype_name(value: Any) -> Any:
    """torch.float16, as apex has it, or its name."""
    name = str(value).removeprefix("torch.") if isinstance(value, (torch.dtype, str)) else value
    if name in ("bfloat16", "torch.bfloat16"):
        raise ValueError("apex has no bf16; use bf16 = dict(mode='naive') or dict(mode='torch')")
    return {"half": "float16", "float": "float32"}.get(name, name) if isinstance(name, str) else value


def _to_bool(value: Any) -> Any:
    """apex takes the strings "True" and "False", for command lines."""
    return {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value


def _to_scale(value: Any) -> Any:
    """apex takes a number as a string, too, for command lines."""
    if not isinstance(value, str) or value == "dynamic":
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a number nor 'dynamic'{did_you_mean(value, ['dynamic'])}") from None


_Dtype = Annotated[Literal["float32", "float16"], BeforeValidator(_to_dtype_name)]


class ApexOptions(Options):
    """The arguments of `apex.amp.initialize`, with its names and defaults. None: as the opt level has it."""

    enabled: bool = True
    """False does nothing at all: fp32, without loss scaling, as in apex."""
    opt_level: Annotated[Literal["O0", "O1", "O2", "O3"], BeforeValidator(_to_opt_level)] = "O1"
    cast_model_type: _Dtype | Literal[False] | None = None
    """dtype of parameters, buffers and inputs: torch.float16, torch.float32 or their names; False leaves all alone."""
    patch_torch_functions: bool | None = None
    """False takes O1 its casts."""
    keep_batchnorm_fp32: Annotated[bool | None, BeforeValidator(_to_bool)] = None
    master_weights: bool | None = None
    loss_scale: Annotated[Literal["dynamic"] | Scale | None, BeforeValidator(_to_scale)] = None
    """A number is a static scale: it never moves, and no step is skipped."""
    cast_model_outputs: _Dtype | None = None
    num_losses: PositiveInt = 1
    """Each loss has a loss scale of its own: `engine.backward(loss, loss_id)`."""
    verbosity: int = Field(1, ge=0)
    """1 logs changes of a dynamic loss scale, 0 does not."""
    min_loss_scale: PositiveFloat | None = None
    """Floor of a dynamic scale; None has none."""
    max_loss_scale: Scale = 2.0**24
    backend: Literal["native", "apex"] = "native"
    """native: halfmesh's own implementation; apex: an installed apex.amp does the work (CUDA only)."""

    @model_validator(mode="after")
    def _consistent(self) -> ApexOptions:
        problems = list(_find_problems(self))
        if problems:
            raise ValueError("; and ".join(problems))
        return self

    @property
    def variant(self) -> str:
        """O2, for example."""
        return self.opt_level + (" by NVIDIA's apex" if self.backend == "apex" else "") if self.enabled else "disabled"

    @property
    def properties(self) -> Properties:
        """The opt level's properties with the overrides."""
        given = {name: getattr(self, name) for name in Properties.__dataclass_fields__}
        overrides = {name: value for name, value in given.items() if value is not None}
        if self.cast_model_type is False:
            overrides["cast_model_type"] = None
        return replace(OPT_LEVELS[self.opt_level], **overrides)


def _find_problems(options: ApexOptions) -> Iterator[str]:
    level = options.opt_level
    if level == "O1":
        if options.cast_model_type not in (None, False, "float32"):
            yield (
                f"cast_model_type={options.cast_model_type!r} with opt_level='O1': O1 casts around functions and "
                "leaves the weights in float32; remove it, or use opt_level='O2' or 'O3' to cast the model"
            )
        if options.keep_batchnorm_fp32 is not None:
            yield (
                f"keep_batchnorm_fp32={options.keep_batchnorm_fp32} with opt_level='O1': O1 casts no weights, so "
                "BatchNorm is in float32 anyway; remove it, or use opt_level='O2' or 'O3'"
            )
        if options.master_weights is not None:
            yield (
                f"master_weights={options.master_weights} with opt_level='O1': under O1 the weights themselves are "
                "float32, so there is nothing to keep masters of; remove it, or use opt_level='O2'"
            )
    elif options.patch_torch_functions:
        yield (
            f"patch_torch_functions=True with opt_level={level!r}: only opt_level='O1' casts around functions; "
            "remove it, or use opt_level='O1'"
        )
    if options.backend == "apex" and options.num_losses > 1:
        yield (
            f"num_losses={options.num_losses} with backend='apex': there gradients are unscaled once per update, "
            "after they are averaged over the data ranks, so that all losses have one scale; remove it, or use "
            "backend='native'"
        )
    yield from _find_scale_problems(options)


def _find_scale_problems(options: ApexOptions) -> Iterator[str]:
    scale = options.properties.loss_scale
    low, high = options.min_loss_scale or 0.0, options.max_loss_scale
    if low > high:
        yield f"min_loss_scale={low:g} is above max_loss_scale={high:g}; lower it"
    elif scale == "dynamic":
        if low > INITIAL_SCALE:
            yield f"min_loss_scale={low:g} is above the first loss scale, which is {INITIAL_SCALE:g}; lower it"
    else:
        bounds = {"min_loss_scale": scale < low, "max_loss_scale": scale > high}
        for name in (name for name, broken in bounds.items() if broken and name in options.model_fields_set):
            yield (
                f"loss_scale={scale:g} is static and beyond {name}={getattr(options, name):g}, which bounds a dynamic "
                f"scale only; remove {name}, or set loss_scale='dynamic'"
            )
