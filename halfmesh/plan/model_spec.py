"""The user's model and a batch of its inputs, built without memory."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .._torch import has_no_memory, outside_of_dry_run
from ..errors import InputError, did_you_mean
from ..tensors import map_tensors, tensors_of

_FORM = "write --batch 8,2048:int64 (rows of one data rank first, then the dtype; float32 if left out)"
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class ModelSpec:
    """A model and a batch of one data rank.

    Attributes:
        inputs: a tensor, a tuple of positional arguments, or a dict of named ones; None if unknown.
        targets: the criterion's second argument.
        criterion: None if the model computes its loss; without such a loss, a stand-in is used.
    """

    model: nn.Module
    inputs: Any = None
    targets: Any = None
    criterion: Callable[..., Any] | None = None

    @property
    def call(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Positional and named arguments of the model."""
        if isinstance(self.inputs, Mapping):
            return (), self.inputs
        return (self.inputs if isinstance(self.inputs, (tuple, list)) else (self.inputs,)), {}

    @property
    def rows(self) -> int:
        """The batch size: the first dim of the first tensor that has dims."""
        return next((tensor.shape[0] for tensor in tensors_of(self.inputs) if tensor.dim()), 0)

    def with_rows(self, rows: int) -> ModelSpec:
        """The same model with a batch of `rows` rows."""
        whole = self.rows

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != whole or rows == whole:
                return tensor
            return tensor.new_zeros((rows, *tensor.shape[1:]))

        return replace(self, inputs=map_tensors(resize, self.inputs), targets=map_tensors(resize, self.targets))


def build_model(reference: str, batch: Sequence[str] = ()) -> ModelSpec:
    """Call the function that `reference` ("package.module:build") names, on the meta device, inside a dry run.

    `build()` returns the model; or (model, inputs); or (model, (inputs, targets), criterion), as in
    `criterion(model(inputs), targets)`. The shapes in `batch` replace its inputs.

    Raises:
        InputError: the function does not exist, fails, or returns something else.
    """
    build = _find(reference)
    try:
        with outside_of_dry_run(), torch.device("meta"):
            made = build()
    except Exception as error:
        raise InputError(
            f"--model {reference}: it raised {type(error).__name__}: {error}. It is called without arguments, on the "
            "meta device, where tensors have no values: let it build the model without loading weights"
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            f"--model {reference}: it returned {f'({kinds})' if isinstance(made, tuple) else kinds}; let it return the "
            "model (a torch.nn.Module), or (model, inputs), or (model, (inputs, targets), criterion)"
        )
    model, inputs, targets, criterion = parts[0], None, None, None
    if len(parts) == 2:
        inputs = parts[1]
    elif len(parts) == 3:
        if not isinstance(parts[1], (tuple, list)) or len(parts[1]) != 2 or not callable(parts[2]):
            raise InputError(f"--model {reference}: expected (model, (inputs, targets), criterion)")
        (inputs, targets), criterion = parts[1], parts[2]
    if batch:
        inputs = tuple(map(read_tensor, batch))
    if criterion is not None and batch:
        criterion = targets = None  # their shapes belong to the other inputs
    _without_memory(model)
    if isinstance(criterion, nn.Module):
        _without_memory(criterion)
    return ModelSpec(model, _faked(inputs), _faked(targets), criterion)


def _without_memory(model: nn.Module) -> None:
    """Move the parameters and buffers of `model`, from the meta device or another fake mode, to the fake CPU of the dry
    run, in place."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*params, *buffers, *vars(module).items()]:
            if isinstance(tensor, torch.Tensor) and (tensor.is_meta or has_no_memory(tensor)):
                if id(tensor) not in made:
                    made[id(tensor)] = _on_cpu(tensor)
                setattr(module, name, made[id(tensor)])


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (or parameter) like `tensor`, on the fake CPU of the dry run."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _faked(tree: Any) -> Any:
    return map_tensors(lambda t: _on_cpu(t) if t.is_meta else t, tree)


def read_tensor(text: str) -> torch.Tensor:
    """Zeros of the shape and dtype that `text` ("8,2048:int64") gives.

    Raises:
        InputError: the shape or the dtype is wrong.
    """
    shape, _, dtype = text.partition(":")
    if dtype and dtype not in _DTYPES:
        near = did_you_mean(dtype, _DTYPES)
        raise InputError(f"--batch {text}: {dtype!r} is not a dtype{near}; allowed: {', '.join(_DTYPES)}")
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--batch {text}: {shape!r} is not a shape; {_FORM}")
    return torch.zeros(sizes, dtype=getattr(torch, dtype or "float32"))


def _find(reference: str) -> Callable[[], Any]:
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise InputError(f"--model {reference}: name a function as package.module:build")
    here = os.getcwd()
    if here not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        where = f" (looked for in {here} and in the installed packages)" if isinstance(error, ImportError) else ""
        raise InputError(
            f"--model {reference}: importing {module_name} raised {type(error).__name__}: {error}{where}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, nn.Module):
        functions = [key for key, value in vars(module).items() if callable(value)]
        what = "is not a function" if hasattr(module, name) else f"does not exist{did_you_mean(name, functions)}"
        raise InputError(f"--model {reference}: {module_name}.{name} {what}; name a function that builds the model")
    return found
