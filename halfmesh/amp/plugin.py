"""The base class of precision modes: a mode's config keys, its recipe, and the features it works with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch

from ..utils.registry import Registry
from .recipe import Recipe

if TYPE_CHECKING:
    from ..options import Options
    from .precision import Precision


# The key of a config that names a mode, and the dtype for the mode's recipe.
PRECISIONS = MappingProxyType({"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"})


class AMP_TYPE(StrEnum):  # noqa: N801 (the name that Colossal-AI's configs use)
    """The built-in precision modes. In a config, write the enum member or its name, in upper or lower case."""

    TORCH = "torch"
    NAIVE = "naive"
    APEX = "apex"


@dataclass(frozen=True)
class Composes:
    """The features that a precision mode works with. By default: one process, or data parallelism with `replicate`.

    Attributes:
        parallel: the names of axes (`AXES`) and data strategies (`DATA_STRATEGIES`) that the mode works with.
        devices: the types of the devices that the mode works on.
        dtypes: the dtypes (values of `PRECISIONS`) that the mode supports.
        why_not: for a rejected axis, data strategy, device or dtype: the reason and the alternative, for the error.
    """

    parallel: frozenset[str] = frozenset({"replicate"})
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})
    why_not: Mapping[str, str] = field(default_factory=dict)


# All built-in axes and data strategies, for modes that work with all of them.
ALL_PARALLEL = frozenset({"tensor", "pipeline", "context", "expert", "replicate", "zero1", "fsdp"})


class AMPPlugin(ABC):
    """The base class of precision modes. Subclass it, set `options`, implement `recipe`, and register the class:

        @AMP_PLUGINS.register("my_mode")
        class MyMode(AMPPlugin): ...

    A config can then name the mode. halfmesh checks its keys with the rest of the config.

    Attributes:
        options: the mode's config keys, with their defaults and bounds.
        composes: the features that the mode works with. halfmesh rejects a config that combines the mode with another
            feature.
        scale_keys: the keys of `options` that apply to loss scaling only. They are rejected under bf16 and fp8.
        float8_keys: the keys of `options` that apply to float8 only. They are rejected under fp16 and bf16.
    """

    options: ClassVar[type[Options]]
    composes: ClassVar[Composes] = Composes()
    scale_keys: ClassVar[frozenset[str]] = frozenset()
    float8_keys: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        """Return the recipe for `options`.

        Args:
            options: the mode's keys from the config, an instance of the class's `options`.
            dtype: `torch.float16` (config key `fp16`), `torch.bfloat16` (`bf16`) or `torch.float8_e4m3fn` (`fp8`).
        """

    @classmethod
    def precision(cls, options: Options, recipe: Recipe, device: torch.device) -> Precision:
        """Return the object that casts the model and its calls. Override it only if another library does the casts."""
        from .precision import Precision  # here: a config needs none of it

        return Precision(recipe, device)


def _no_mode(obj: object) -> str | None:
    fits = isinstance(obj, type) and issubclass(obj, AMPPlugin)
    return None if fits else f"{obj!r} is not a mode; expected a subclass of halfmesh.AMPPlugin"


AMP_PLUGINS: Registry[type[AMPPlugin]] = Registry("AMP mode", "halfmesh.amp_plugins", _no_mode)
AMP_PLUGINS.register_lazy("torch", "halfmesh.amp.torch_amp:TorchAMP")
AMP_PLUGINS.register_lazy("naive", "halfmesh.amp.naive_amp:NaiveAMP")
AMP_PLUGINS.register_lazy("apex", "halfmesh.amp.apex_amp:ApexAMP")
