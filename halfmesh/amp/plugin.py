"""The precision plugin: a mode's keys, the recipe that they make, and what the mode composes with."""

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


PRECISIONS = MappingProxyType({"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"})
"""The key of a config that names a mode, and the dtype for the mode's recipe."""


class AMP_TYPE(StrEnum):  # noqa: N801 (the name that Colossal-AI's configs use)
    """The built-in precision modes. A config may give the enum or its name in any case."""

    TORCH = "torch"
    NAIVE = "naive"
    APEX = "apex"


@dataclass(frozen=True)
class Composes:
    """The features that a mode works with. The defaults are cautious: one process or plain data parallelism."""

    parallel: frozenset[str] = frozenset({"replicate"})
    """The names of the axes (`AXES`) and data strategies (`DATA_STRATEGIES`) that it works with."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})
    """The `PRECISIONS` that it has."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """For a rejected axis, data strategy, device or dtype: the reason and what to use instead."""


ALL_PARALLEL = frozenset({"tensor", "pipeline", "context", "expert", "replicate", "zero1", "fsdp"})
"""All built-in features, for modes that work with all of them."""


class AMPPlugin(ABC):
    """One precision mode. Subclass, fill in the attributes and `recipe`, and register the class:

        @AMP_PLUGINS.register("my_mode")
        class MyMode(AMPPlugin): ...

    The mode is then valid in a config, checked with the rest of it, and listed in the composition table.
    """

    options: ClassVar[type[Options]]
    """The mode's keys, with defaults and bounds."""
    composes: ClassVar[Composes] = Composes()
    scale_keys: ClassVar[frozenset[str]] = frozenset()
    """The `options` that only concern loss scaling; they are rejected where nothing is scaled (bf16, fp8)."""
    float8_keys: ClassVar[frozenset[str]] = frozenset()
    """The `options` that only concern float8; they are rejected under fp16 and bf16."""

    @classmethod
    @abstractmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        """The recipe of `options` with `dtype`: torch.float16, torch.bfloat16 or torch.float8_e4m3fn (key `fp8`)."""

    @classmethod
    def precision(cls, options: Options, recipe: Recipe, device: torch.device) -> Precision:
        """The object that casts the model and its calls. Override it only if another library casts."""
        from .precision import Precision  # here: a config needs none of it

        return Precision(recipe, device)


def _no_mode(obj: object) -> str | None:
    fits = isinstance(obj, type) and issubclass(obj, AMPPlugin)
    return None if fits else f"{obj!r} is not a mode; expected a subclass of halfmesh.AMPPlugin"


AMP_PLUGINS: Registry[type[AMPPlugin]] = Registry("AMP mode", "halfmesh.amp_plugins", _no_mode)
AMP_PLUGINS.register_lazy("torch", "halfmesh.amp.torch_amp:TorchAMP")
AMP_PLUGINS.register_lazy("naive", "halfmesh.amp.naive_amp:NaiveAMP")
AMP_PLUGINS.register_lazy("apex", "halfmesh.amp.apex_amp:ApexAMP")
