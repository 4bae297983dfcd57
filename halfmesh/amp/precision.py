"""Casts the model's parameters once, and the inputs and outputs of each forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean, find_module, shorten
from ..utils.log import get_logger
from ..utils.tensors import dtype_name, map_named, map_tensors, parameter_names, position_names
from ..utils.torch_private import BATCH_NORMS
from .o1 import CastTable, O1Casts, o1_scope
from .recipe import HALF, Recipe

_log = get_logger(__name__)

# Masks added to attention scores have values below this (-1e9, the least number), which work the same as -inf.
_MASK = -1e8

# In the words of torch's operations: matmul, convolution, attention, linear algebra, index_put, scatter.
_MIXED_DTYPES = r"types? .*(the same|match|equal)|same (scalar )?d?type|expected (scalar type|dtype)|mixed dtype"
_INTEGERS = r"(?i)\b(long|int|short|byte|char|bool)\b"  # which no mode casts

# Names of frequencies in transformers, timm and others: times a position they are an angle, which rounding moves by
# radians. Such models compute angles in fp32, and cast sine and cosine to the dtype of what they rotate.
FREQUENCIES = ("*inv_freq", "*freqs", "inv_timescales", "bands", "periods")


class Precision:
    """Casts the model by a recipe, and runs it and the criterion in its formats, on one kind of device.

    Attributes:
        casts: the cast lists of O1. None if torch.autocast does the casts, or nothing is cast.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.casts = CastTable() if recipe.cast_lists == "apex" else None
        self._names: dict[Any, Sequence[str]] = {}  # arguments by method, or by the class of a module that is called

    def find_problem(self) -> str | None:
        """Return the reason why it cannot work on the device, or None. Called before halfmesh changes anything."""
        return None

    def cast_model(self, model: nn.Module, excluded: Collection[int] = ()) -> None:
        """Cast parameters and floating-point buffers in place, except those whose ids are in `excluded`."""
        cast_model(model, self.recipe, excluded)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in; with `enabled=False` the scope that switches its casts off."""
        if not self.recipe.autocast:
            return nullcontext()
        if enabled and self.casts is not None:
            return o1_scope(self.casts, self.device.type)
        return torch.autocast(self.device.type, self.recipe.compute_dtype, enabled)

    def backward(self) -> AbstractContextManager[Any]:
        """The scope that backward runs in, so that activation checkpointing casts as the forward did."""
        return nullcontext() if self.casts is None else O1Casts(self.casts, self.device.type)

    def clear_weight_cache(self) -> None:
        """Drop the cast weights that a user's autocast scope around several calls would keep.

        Needed after each backward, whose graph they belong to, and after each update: fused steps and writes through
        `param.data` do not change the version of the tensor.
        """
        if self.casts is not None:
            self.casts.forget_weights()
        elif self.recipe.autocast:
            torch.clear_autocast_cache()

    def forward(self, model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)` with inputs and outputs cast by the recipe."""
        args, kwargs = self.cast_inputs(model, args, kwargs)
        return self.cast_output(self.run_in_autocast(model, *args, **kwargs))

    def run_in_autocast(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`call(*args, **kwargs)` in the scope of `autocast`."""
        with self.autocast():
            return call(*args, **kwargs)

    criterion = run_in_autocast  # in the scope of the forward, so that autocast computes losses in fp32

    def cast_inputs(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for `model`, or a method of it: floating-point tensors in the dtype of its parameters, except
        those kept in fp32.

        The first call is checked for values that the cast changes much; for this the host waits.
        """
        dtype, keep = self.recipe.param_dtype, self.recipe.keep_fp32 or ()
        if dtype is None:
            return args, kwargs
        method = getattr(model, "__qualname__", type(model))
        is_first = method not in self._names
        if is_first:
            self._names[method] = parameter_names(model)
            is_first = not torch.compiler.is_compiling()

        def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or (keep and is_kept(name, keep)):
                return tensor
            new = tensor.to(dtype)
            if is_first and (change := find_change(tensor, new)):
                _log.warning(
                    "the model's argument %r %s in %s. If that matters, keep it in float32 with keep_fp32=[%r] (and "
                    "cast what the model computes from it: .to(x.dtype)), or set mode='torch'",
                    *(name, change, dtype_name(dtype), name),
                )
            return new

        names = position_names(self._names[method], len(args))
        return (
            tuple(map_named(cast, value, name) for name, value in zip(names, args, strict=True)),
            {name: map_named(cast, value, name) for name, value in kwargs.items()},
        )

    def cast_output(self, output: Any) -> Any:
        """`output` of the model in the recipe's `output_dtype`."""
        dtype = self.recipe.output_dtype
        return output if dtype is None else map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, output)

    def explain(self, model: nn.Module, error: RuntimeError) -> None:
        """Raise InputError if `error`, of a call of `model`, is torch's rejection to mix dtypes in a cast model."""
        words = str(error)
        if self.recipe.param_dtype not in HALF or not re.search(_MIXED_DTYPES, words) or re.search(_INTEGERS, words):
            return
        where = find_module(model, error) or "forward"
        dtype = dtype_name(self.recipe.param_dtype)
        kept = [name for name, tensor in named_tensors(model) if tensor.dtype == torch.float32]
        stay = f"; these of the model stay in float32: {shorten(kept)}" if kept else ""
        raise InputError(
            f"in {where}: {error}. The mode casts weights and the model's inputs to {dtype}, but not tensors that "
            f"forward makes{stay}. Cast those (x.to(self.weight.dtype)), or set mode='torch'"
        ) from error


def cast_model(model: nn.Module, recipe: Recipe, excluded: Collection[int] = ()) -> None:
    """Cast parameters and floating-point buffers, except those whose ids are in `excluded`. Parameter objects, ties and
    names stay. Linear layers get the recipe's product."""
    if recipe.linear is not None:
        recipe.linear.install(model)
    casts = {id(tensor) for _, tensor in tensors_to_cast(model, recipe, excluded)}
    if not casts:
        return
    for param in model.parameters():
        if id(param) in casts:
            param.data = param.data.to(recipe.param_dtype)
    buffers: dict[int, torch.Tensor] = {}  # new ones, which may have several names: others may hold the old ones
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in casts:
                setattr(module, name, buffers.setdefault(id(buffer), buffer.to(recipe.param_dtype)))
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs the new weights in one block of memory


def tensors_to_cast(
    model: nn.Module, recipe: Recipe, excluded: Collection[int] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers whose dtype `cast_model` changes, by name."""
    if recipe.param_dtype is None:
        return
    stays = set(excluded) | set(map(id, kept_tensors(model, recipe)))
    for module in model.modules() if recipe.keep_batchnorm_fp32 else ():
        if isinstance(module, BATCH_NORMS) and module.affine:  # apex's rule: those without weights are cast
            stays.update(map(id, chain(module.parameters(recurse=False), module.buffers(recurse=False))))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and id(tensor) not in stays and tensor.dtype != recipe.param_dtype:
            yield name, tensor


def find_change(value: torch.Tensor, new: torch.Tensor) -> str | None:
    """Describe a change of `value` by the cast to `new` that is larger than an activation may have: to inf, or any
    change if there is at most one number for each sample, as a timestep."""
    if new.dtype == value.dtype or value.layout != torch.strided:
        return None
    is_many = value.dim() > 1 and value.numel() > len(value)  # numbers for each sample
    changed = (new.isinf() if is_many else new != value) & value.isfinite() & (value > _MASK)
    if not changed.any():
        return None
    was, now = value.detach()[changed], new.detach()[changed]
    place = (was - now).abs().argmax()
    return f"changes from {was[place].item():.7g} to {now[place].item():g}"


def find_overflow(name: str, value: torch.Tensor, dtype: torch.dtype | None) -> str | None:
    """The problem of casting `value`, of the tensor `name`, to `dtype`: it is out of range (inf and nan fit)."""
    if dtype is None or value.is_meta or not value.numel() or value.element_size() == 1:  # float8, which fits
        return None
    if all(abs(end.item()) <= torch.finfo(dtype).max for end in value.aminmax()):  # without a copy
        return None
    most = value.abs().nan_to_num(0.0, posinf=0.0).max().item()
    if most <= torch.finfo(dtype).max:
        return None
    return f"{name!r} holds values up to {most:g}, above the maximum of {dtype_name(dtype)}; use bf16, or mode='torch'"


# -- tensors that stay in fp32 when a model is cast ------------------------------------------------------------------


def is_kept(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches the argument `name` of a call ("batch.t"), or one that contains it ("batch")."""
    heads = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    return any(fnmatchcase(head, pattern) for pattern in patterns for head in (*heads, name))


def kept_tensors(model: nn.Module, recipe: Recipe) -> Iterator[torch.Tensor]:
    """The parameters and buffers that `recipe` leaves in fp32."""
    yield from kept_by_name(model, recipe)
    # transformers and diffusers load these in fp32, and their code casts the other operand; the second also in bf16.
    keys = ["_keep_in_fp32_modules"] * (recipe.param_dtype == torch.float16) + ["_keep_in_fp32_modules_strict"]
    for module in model.modules() if _keeps(recipe) else ():
        words = {word for key in keys for word in getattr(module, key, None) or ()}
        pattern = "|".join(re.escape(word).replace(r"\*", ".*") for word in words)
        for name, tensor in named_tensors(module) if words else ():
            if re.search(rf"(^|\.)({pattern})($|\.)", name):
                yield tensor


def kept_by_name(model: nn.Module, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Those among them that match the config's patterns, or are frequencies that are not trained."""
    for name, tensor in named_tensors(model) if _keeps(recipe) else ():
        patterns = (*(recipe.keep_fp32 or ()), *(() if tensor.requires_grad else FREQUENCIES))
        if any(_matches(name, pattern) for pattern in patterns):
            yield tensor


def find_kept_problems(model: nn.Module, recipe: Recipe) -> Iterator[str]:
    """Patterns of the config that match nothing of `model`, where all of its arguments have names."""
    arguments, tensors = parameter_names(model), dict(named_tensors(model))
    for pattern in recipe.keep_fp32 or () if not any(name.startswith("*") for name in arguments) else ():
        head = pattern.partition(".")[0]
        is_argument = head != "*" and any(fnmatchcase(name, head) for name in arguments)
        if not is_argument and not any(_matches(name, pattern) for name in tensors):
            yield (
                f"keep_fp32: no buffer, parameter or argument of the model's forward is named {pattern!r}"
                f"{did_you_mean(pattern, [*arguments, *tensors])} (its arguments: {shorten(arguments)})"
            )


def named_tensors(model: nn.Module, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under each of their names."""
    return chain(model.named_parameters("", recurse, False), model.named_buffers("", recurse, False))


def _keeps(recipe: Recipe) -> bool:
    return recipe.keep_fp32 is not None and recipe.param_dtype in HALF


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
