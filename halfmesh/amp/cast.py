"""Casts between formats: the model's parameters once, its inputs and outputs at each call."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import torch_private
from ..tree import map_tensors
from .o1 import CastTable, O1Casts, o1_scope
from .recipe import Recipe


def to_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`; integer, bool and complex tensors stay."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


class Precision:
    """Runs calls of the model and of the criterion in a recipe's formats, on one kind of device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.casts = CastTable() if recipe.cast_lists == "apex" else None
        """O1's lists, with additions; None where torch.autocast or nothing casts."""
        self.forget_casts: Callable[[], None] = _nothing
        """Drops cast weights that a scope of the user's around several calls would keep.

        Needed after each backward, whose graph they belong to, and with each new cycle: fused optimizers change weights
        without counting it as a change, and so does `param.data`.
        """
        if self.casts is not None:
            self.forget_casts = self.casts.forget_weights
        elif recipe.autocast:
            self.forget_casts = torch.clear_autocast_cache
        self._fp16_scalars: list[weakref.ref[torch.Tensor]] = []
        self._autocasts: bool | None = None  # whether torch does so here; None: not asked yet

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_fp16_scalars": []}  # a copy has returned nothing yet

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in: casts where the recipe has them, else nothing.

        With `enabled=False` the scope that switches the casts off.
        """
        if not self.recipe.autocast:
            return nullcontext()
        if not enabled:
            return torch.autocast(self.device.type, enabled=False)
        if self.casts is not None:
            return o1_scope(self.casts, self.device.type)
        return torch.autocast(self.device.type, self.recipe.compute_dtype)

    def backward(self) -> AbstractContextManager[Any]:
        """The scope that backward runs in, so that activation checkpointing casts as the forward did."""
        return nullcontext() if self.casts is None else O1Casts(self.casts, self.device.type)

    def forward(self, model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)` with inputs and outputs cast as the recipe says."""
        if self.recipe.param_dtype is not None:
            args, kwargs = self.cast_inputs(args), self.cast_inputs(kwargs)
        output = self.within(model, *args, **kwargs)
        return output if self.recipe.output_dtype is None else self.cast_output(output)

    def around(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """What does the same as `forward(model, ...)`, with no more calls than that takes here."""
        if self.recipe.param_dtype is not None or self.recipe.output_dtype is not None:
            return partial(self.forward, model)
        return partial(self.within, model) if self.recipe.autocast else model

    def cast_inputs(self, inputs: Any) -> Any:
        """What the model is called with, as the recipe says."""
        return inputs if self.recipe.param_dtype is None else to_dtype(inputs, self.recipe.param_dtype)

    def cast_output(self, output: Any) -> Any:
        """What the model returned, as the recipe says."""
        if self.recipe.output_dtype is None:
            return output
        self._fp16_scalars = [scalar for scalar in self._fp16_scalars if scalar() is not None]
        return map_tensors(self._cast_tensor, output)

    def within(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`call(*args, **kwargs)` in the scope of `autocast`.

        Making and entering that one costs more than the layers of a small model. What it sets is set here, without what
        it looks up each time: whether torch can autocast here is asked once, and whether it caches is left as it is.
        """
        if not self.recipe.autocast:
            return call(*args, **kwargs)
        if self.casts is not None:
            with self.autocast():
                return call(*args, **kwargs)
        kind = self.device.type
        if self._autocasts is None:
            with self.autocast():
                self._autocasts = torch.is_autocast_enabled(kind)
        outside, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.autocast_increment_nesting()
        try:
            torch.set_autocast_enabled(kind, self._autocasts)
            torch.set_autocast_dtype(kind, self.recipe.compute_dtype)
            return call(*args, **kwargs)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(kind, outside)
            torch.set_autocast_dtype(kind, dtype)

    criterion = within
    """The criterion runs where the forward ran, so that losses are fp32 where autocast says so."""

    def starts_in_fp16(self, loss: torch.Tensor) -> bool:
        """Whether the gradient of `loss` starts in fp16: a loss in fp16, or one that the model itself returned so."""
        if loss.dtype == torch.float16:
            return True
        return bool(self._fp16_scalars) and any(scalar() is loss for scalar in self._fp16_scalars)

    def _cast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.recipe.output_dtype)
        if tensor.dtype == torch.float16 and tensor.numel() == 1:
            self._fp16_scalars.append(weakref.ref(cast))
        return cast


def _nothing() -> None:
    pass


def cast_model(model: nn.Module, recipe: Recipe, apart: Collection[int] = ()) -> None:
    """Cast parameters and floating-point buffers in place. Parameter objects, ties and names stay.

    Args:
        apart: ids of parameters that stay as they are.
    """
    if recipe.param_dtype is None:
        return
    if apart:
        for _, tensor in list(tensors_to_cast(model, recipe, apart)):
            tensor.data = tensor.data.to(recipe.param_dtype)
        return
    kept = [(tensor, tensor.data) for tensor in _stays_fp32(model, recipe)]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")  # put back below
        torch_private.move_module(model, recipe.param_dtype)
    for tensor, data in kept:
        tensor.data = data
    # `to` makes new buffers: one for each place, of complex ones too, whose imaginary part is lost.
    stays = {id(tensor) for tensor, _ in kept}
    new: dict[int, torch.Tensor] = {}
    for module, name, buffer in buffers:
        as_it_was = id(buffer) in stays or not buffer.is_floating_point()
        setattr(module, name, buffer if as_it_was else new.setdefault(id(buffer), getattr(module, name)))


def tensors_to_cast(
    model: nn.Module, recipe: Recipe, apart: Collection[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers whose dtype `cast_model` changes, by name."""
    stays = {id(tensor) for tensor in _stays_fp32(model, recipe)} | set(apart)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and id(tensor) not in stays and tensor.dtype != recipe.param_dtype:
            yield name, tensor


def find_overflow(name: str, value: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with casting `value`, of the tensor `name`, to `dtype`: it is beyond the range."""
    largest, short = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
    if value.is_meta or not value.numel() or value.element_size() == 1:  # float8, which fits
        return None
    most = max(abs(end.item()) for end in value.aminmax())
    if not most <= largest:  # inf or nan, which fit, may hide what does not
        finite = value[value.isfinite()]
        most = finite.abs().max().item() if finite.numel() else 0.0
    if most <= largest:
        return None
    return (
        f"{name!r} holds values up to {most:g}, but {short} ends at {largest:g}; use bf16, or mode='torch', which "
        "keeps parameters and buffers in float32"
    )


def _stays_fp32(model: nn.Module, recipe: Recipe) -> Iterator[torch.Tensor]:
    """apex's rule: BatchNorm with weights stays as it is, with its buffers; without weights it is cast."""
    for module in model.modules() if recipe.keep_batchnorm_fp32 else ():
        if torch_private.is_batch_norm(module) and module.affine:
            yield from chain(module.parameters(recurse=False), module.buffers(recurse=False))
