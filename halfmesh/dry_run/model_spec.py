"""The user's model and a batch of its inputs, built without memory."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, did_you_mean
from ..utils.tensors import count_rows, map_tensors
from ..utils.torch_private import has_no_memory, with_memory

_FORM = "write --batch 8,2048:int64 (rows of one data rank first, then the dtype; float32 if left out)"
_LIBRARIES = str(Path(torch.__file__).parents[1]), f"{Path(__file__).parents[1]}{os.sep}", sysconfig.get_path("stdlib")
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
        return call_of(self.inputs)

    @property
    def rows(self) -> int:
        """The batch size; 0 if there is no batch."""
        return count_rows(self.inputs, none=0)

    def with_rows(self, rows: int) -> ModelSpec:
        """The same model with a batch of `rows` rows."""
        whole = self.rows

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != whole or rows == whole:
                return tensor
            return tensor.new_zeros((rows, *tensor.shape[1:]))

        return replace(self, inputs=map_tensors(resize, self.inputs), targets=map_tensors(resize, self.targets))


@dataclass(frozen=True)
class Built:
    """The result of a builder.

    Attributes:
        batches: inputs and targets of each; empty if it returned the model only. Without a criterion targets are None.
    """

    model: nn.Module
    batches: Sequence[tuple[Any, Any]]
    criterion: Callable[..., Any] | None


def call_of(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Positional and named arguments of the model, whose `inputs` are a tensor, a tuple, or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def build_model(reference: str, batch: Sequence[str] = ()) -> ModelSpec:
    """Call the function that `reference` ("package.module:build") names, on the meta device, inside a dry run.

    `build()` returns the model; or (model, inputs); or (model, (inputs, targets), criterion), as in
    `criterion(model(inputs), targets)`; of a list of batches as the second element the first is taken. The shapes in
    `batch` replace its inputs.

    Raises:
        InputError: the function does not exist, fails, or returns something else.
    """
    build = find_function(reference)
    with with_memory(), torch.device("meta"):
        how = "on the meta device, where tensors have no values: let it build the model without loading weights"
        built = call_builder(build, f"--model {reference}", how)
    (inputs, targets), criterion = built.batches[0] if built.batches else (None, None), built.criterion
    if batch:
        inputs = tuple(map(read_tensor, batch))
    if criterion is not None and batch:
        criterion = targets = None  # their shapes belong to the other inputs
    _without_memory(built.model)
    if isinstance(criterion, nn.Module):
        _without_memory(criterion)
    return ModelSpec(built.model, _faked(inputs), _faked(targets), criterion)


def call_builder(build: Callable[[], Any], name: str, how: str) -> Built:
    """The result of `build()`, if it can be trained.

    Args:
        name: of `build` in messages, such as "--model package.module:build".
        how: the form of the call, in messages.

    Raises:
        InputError: it fails, or returns something else.
    """
    try:
        made = build()
    except Exception as error:
        raise InputError(
            f"{name}: it raised {type(error).__name__}: {error} ({_where(error)}). It is called without "
            f"arguments, {how}"
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            f"{name}: it returned {f'({kinds})' if isinstance(made, tuple) else kinds}; let it return the model (a "
            "torch.nn.Module), or (model, inputs), or (model, (inputs, targets), criterion); a list in place of the "
            "second element is of batches"
        )
    model, given, criterion = (*parts, None, None)[:3]
    batches = given if isinstance(given, list) else [given]
    if len(parts) == 1:
        return Built(model, [], None)
    if len(parts) == 2 and batches:
        return Built(model, [(batch, None) for batch in batches], None)
    if not batches or not callable(criterion) or any(not isinstance(one, tuple) or len(one) != 2 for one in batches):
        raise InputError(
            f"{name}: expected (model, (inputs, targets), criterion), where a list in place of (inputs, targets) is of "
            f"such pairs; it returned {', '.join(type(part).__name__ for part in parts[1:])} beside the model"
        )
    return Built(model, batches, criterion)


def _where(error: Exception) -> str:
    """The line of the user's own code that `error` comes from; of a library's, if there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith(("<", *_LIBRARIES))]
    file, line = (own or frames)[-1]
    return f"{file}:{line}"


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


def find_function(reference: str, option: str = "--model") -> Callable[..., Any]:
    """The function that `reference` ("package.module:name") names, which `option` of a command was given.

    Raises:
        InputError: there is none.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise InputError(f"{option} {reference}: name a function as package.module:function")
    here = os.getcwd()
    if here not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        where = f" (looked for in {here} and in the installed packages)" if isinstance(error, ImportError) else ""
        raise InputError(
            f"{option} {reference}: importing {module_name} raised {type(error).__name__}: {error}{where}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, nn.Module):
        functions = [key for key, value in vars(module).items() if callable(value)]
        what = "is not a function" if hasattr(module, name) else f"does not exist{did_you_mean(name, functions)}"
        raise InputError(f"{option} {reference}: {module_name}.{name} {what}; name a function of a module's top level")
    return found
