"""Mode apex: the opt levels O0 to O3 of NVIDIA's apex.amp, with the same keys and defaults, on torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator

from ..options import Names, Options, PositiveFloat, PositiveInt, Scale
from .plugin import ALL_PARALLEL, AMPPlugin, Composes
from .recipe import LossScale, Recipe

if TYPE_CHECKING:
    from .precision import Precision

# The initial value of a dynamic scale (apex.amp.scaler).
INITIAL_SCALE = 2.0**16


@dataclass(frozen=True)
class Properties:
    """The settings of an opt level.

    Attributes:
        cast_model_type: the dtype of parameters, buffers and inputs; None leaves them unchanged.
        patch_torch_functions: cast for each function, by O1's lists.
    """

    cast_model_type: Literal["float32", "float16"] | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | Literal["dynamic"]


# apex.amp.frontend: the classes O0 to O3. (Its None, for "does not apply", is False here.)
OPT_LEVELS = MappingProxyType(
    {
        "O0": Properties("float32", False, False, False, 1.0),
        "O1": Properties(None, True, False, False, "dynamic"),
        "O2": Properties("float16", False, True, True, "dynamic"),
        "O3": Properties("float16", False, False, False, 1.0),
    }
)


def _to_dtype_name(value: Any) -> Any:
    """apex has torch.float16."""
    name = str(value).removeprefix("torch.") if isinstance(value, (torch.dtype, str)) else value
    if name == "bfloat16":
        raise ValueError("apex has no bf16; use bf16 = dict(mode='naive') or dict(mode='torch')")
    return name


def _from_text(value: Any) -> Any:
    """apex also takes numbers and booleans as strings, from command lines."""
    if value in ("True", "False"):
        return value == "True"
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


_DtypeName = Annotated[Literal["float32", "float16"], BeforeValidator(_to_dtype_name)]


class ApexOptions(Options):
    """The keys of mode apex: the arguments of `apex.amp.initialize`, with its names and defaults.

    A key that is None has the value of the opt level.

    Attributes:
        enabled: false turns the mode off: fp32 without loss scaling, as in apex.
        cast_model_type: the dtype of parameters, buffers and inputs: torch.float16, torch.float32 or their names. False
            casts nothing.
        patch_torch_functions: false turns off the casts of O1.
        loss_scale: A number is a static scale: it never changes, and no step is skipped.
        num_losses: the number of losses. Each has a separate loss scale: `engine.backward(loss, loss_id)`.
        verbosity: 1 logs changes of a dynamic loss scale, 0 does not.
        min_loss_scale: the lower bound of a dynamic scale. None: no bound.
        max_loss_scale: the upper bound of a dynamic scale.
        backend: the library that casts: halfmesh, or an installed apex.amp (CUDA only).
        keep_fp32: patterns of names that are not cast, as in mode naive. apex has no such key.
    """

    enabled: bool = True
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1"
    cast_model_type: _DtypeName | Literal[False] | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: Annotated[bool | None, BeforeValidator(_from_text)] = None
    master_weights: bool | None = None
    loss_scale: Annotated[Literal["dynamic"] | Scale | None, BeforeValidator(_from_text)] = None
    cast_model_outputs: _DtypeName | None = None
    num_losses: PositiveInt = 1
    verbosity: int = Field(1, ge=0)
    min_loss_scale: PositiveFloat | None = None
    max_loss_scale: Scale = 2.0**24
    backend: Literal["native", "apex"] = "native"
    keep_fp32: Names = ()

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
        given = self.model_dump(include=set(Properties.__dataclass_fields__), exclude_none=True)
        if self.cast_model_type is False:
            given["cast_model_type"] = None
        return replace(OPT_LEVELS[self.opt_level], **given)


def _find_problems(options: ApexOptions) -> Iterator[str]:
    if options.opt_level != "O1" and options.patch_torch_functions:
        yield f"patch_torch_functions=True with opt_level={options.opt_level!r}: only opt_level='O1' patches functions"
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights") if options.opt_level == "O1" else ():
        value = getattr(options, name)
        if value is not None and (name != "cast_model_type" or value == "float16"):
            yield f"{name}={value!r} with opt_level='O1', which keeps weights in float32; remove it, or use 'O2'"
    if options.keep_fp32 and (options.properties.cast_model_type != "float16" or options.backend == "apex"):
        yield "keep_fp32 is for opt levels that cast the model, O2 and O3, with backend='native'; remove it"
    low, high = options.min_loss_scale or 0.0, options.max_loss_scale
    if low > high:
        yield f"min_loss_scale={low:g} is above max_loss_scale={high:g}; lower it"
    elif options.properties.loss_scale == "dynamic" and low > INITIAL_SCALE:
        yield f"min_loss_scale={low:g} is above the first loss scale, which is {INITIAL_SCALE:g}; lower it"


_EACH_RANK_ALONE = (
    "each rank of apex decides alone whether to skip an update, so shards would drift apart; "
    "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch' (close to O1)"
)


class ApexAMP(AMPPlugin):
    """The opt levels O0 to O3 of NVIDIA's apex.amp."""

    options = ApexOptions
    composes = Composes(
        dtypes=frozenset({"float16"}),
        why_not=dict.fromkeys(ALL_PARALLEL - {"replicate"}, _EACH_RANK_ALONE)
        | {"bfloat16": "apex has no bf16; use bf16 = dict(mode='torch') or dict(mode='naive')"},
    )

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        assert isinstance(options, ApexOptions)
        if not options.enabled:
            return Recipe(num_losses=options.num_losses)  # a script that passes loss_id keeps working
        properties = options.properties
        param_dtype = _dtype(properties.cast_model_type)
        casts_model = param_dtype == torch.float16
        masters = properties.master_weights and casts_model
        patches = properties.patch_torch_functions
        return Recipe(
            compute_dtype=torch.float16 if casts_model or patches else torch.float32,
            param_dtype=param_dtype,
            autocast=patches,
            cast_lists="apex" if patches else "torch",
            keep_batchnorm_fp32=properties.keep_batchnorm_fp32 and casts_model,
            master_weights=masters,
            loss_scale=_loss_scale(options, properties.loss_scale),
            num_losses=options.num_losses,
            wide_gradients=masters,  # apex adds them up in the masters' gradients
            output_dtype=_dtype(options.cast_model_outputs) or (torch.float32 if param_dtype else None),
            keep_fp32=options.keep_fp32 if options.backend == "native" else None,
        )

    @classmethod
    def precision(cls, options: Options, recipe: Recipe, device: torch.device) -> Precision:
        assert isinstance(options, ApexOptions)
        if not options.enabled or options.backend == "native":
            return super().precision(options, recipe, device)
        from .apex_backend import ApexPrecision

        return ApexPrecision(recipe, device, options.model_dump())


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _loss_scale(options: ApexOptions, scale: float | Literal["dynamic"]) -> LossScale | None:
    """apex.amp.scaler: from 2**16, halved on overflow, doubled after 2000 good steps; a static 1 scales nothing."""
    if scale == 1.0:
        return None
    if scale != "dynamic":
        return LossScale(initial=scale, dynamic=False, skips=False)
    return LossScale(
        initial=min(options.max_loss_scale, INITIAL_SCALE),
        min_scale=options.min_loss_scale or 0.0,
        max_scale=options.max_loss_scale,
        verbose=options.verbosity > 0,
    )
