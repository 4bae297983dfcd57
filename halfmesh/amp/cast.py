"""Casts between formats: the model's parameters once, its inputs and outputs at each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..tree import map_tensors
from .recipe import Recipe


def to_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`; integer, bool and complex tensors stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


class Precision:
    """Runs calls of the model and of the criterion in a recipe's formats, on one kind of device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self._fp16_scalars: list[weakref.ref[torch.Tensor]] = []

    def autocast(self) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in: torch.autocast where the recipe has it, else nothing."""
        if self.recipe.autocast:
            return torch.autocast(self.device.type, self.recipe.compute_dtype)
        return nullcontext()

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)` with inputs and outputs cast as the recipe says."""
        recipe = self.recipe
        if recipe.param_dtype is not None:
            args, kwargs = to_dtype(args, recipe.param_dtype), to_dtype(kwargs, recipe.param_dtype)
        with self.autocast():
            output = model(*args, **kwargs)
        if recipe.output_dtype is None:
            return output
        self._fp16_scalars.clear()
        return map_tensors(self._cast_output, output)

    def criterion(self, criterion: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`criterion(*args, **kwargs)` in the forward scope, so that losses are fp32 where autocast says so."""
        with self.autocast():
            return criterion(*args, **kwargs)

    def starts_in_fp16(self, loss: torch.Tensor) -> bool:
        """Whether the gradient of `loss` starts in fp16: a loss in fp16, or one that the model itself returned so."""
        return loss.dtype == torch.float16 or any(scalar() is loss for scalar in self._fp16_scalars)

    def _cast_output(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.recipe.output_dtype)
        if tensor.dtype == torch.float16 and tensor.dim() == 0:
            self._fp16_scalars.append(weakref.ref(cast))
        return cast


def cast_model(model: nn.Module, recipe: Recipe) -> None:
    """Cast parameters and floating-point buffers in place. Parameter objects, ties and names stay."""
    if recipe.param_dtype is not None:
        model.to(recipe.param_dtype)
