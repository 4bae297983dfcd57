"""Helpers for plans and partitioners: compare a module's class, copy it without memory, and run it without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ..utils.tensors import map_tensors
from ..utils.torch_private import shapes_only, unobserved


def comes_from(module: nn.Module, kinds: Collection[type[nn.Module] | str], method: str = "forward") -> bool:
    """Return True if the class that `module` has its `method` from is one of `kinds`: classes, or their full names."""
    origin = next((kind for kind in type(module).__mro__ if method in vars(kind)), nn.Module)
    return origin in kinds or f"{origin.__module__}.{origin.__qualname__}" in kinds


def is_within(name: str, top: str) -> bool:
    """Return True if the module or tensor `name` is `top`, or in it."""
    return not top or name == top or name.startswith(f"{top}.")


def meta_copy(module: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of `module`, one of `model`'s (or `model` itself), with parameters and buffers on the meta device.

    Frozen parameters are not frozen in the copy. Functions on modules (`self.mlp = lambda x: drop(linear(x))`) call its
    modules.

    Raises:
        Exception: any error of copy.deepcopy.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.is_floating_point())
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    new = copy.deepcopy(module, memo)
    for each in new.modules():
        own = vars(each)
        own |= {name: _rebind(value, memo) for name, value in own.items() if isinstance(value, FunctionType)}
    return new


def _rebind(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """`function` with `copies`, by id, of the objects in its closure and of its defaults."""
    empty = CellType()
    closure = [
        CellType(copies[id(cell.cell_contents)]) if cell != empty and id(cell.cell_contents) in copies else cell
        for cell in function.__closure__ or ()
    ]
    defaults = [copies.get(id(value), value) for value in function.__defaults__ or ()]
    new = FunctionType(function.__code__, function.__globals__, function.__name__, tuple(defaults), tuple(closure))
    new.__kwdefaults__ = function.__kwdefaults__
    return new


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[Callable[[], bool]]:
    """Restore the attributes and buffers of `modules` afterwards, with the contents of lists, dicts and sets. It gives
    a function that returns True if one was set to another object in the scope so far."""
    owned = list(map(vars, modules))
    containers = {id(each): each for own in owned for each in (own, *own.values()) if type(each) in (dict, list, set)}
    before = [(container, copy.copy(container)) for container in containers.values()]
    try:
        yield lambda: any(_ids(now) != _ids(then) for now, then in before)
    finally:
        for now, then in before:
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(then)


def _ids(container: Any) -> list[int]:
    """The ids of the objects that `container` holds."""
    return list(map(id, container.values() if isinstance(container, dict) else container))


def run_without_data(model: nn.Module, run: Callable[..., Any], device: torch.device, *args: Any) -> Any:
    """The result of `run(*args)` for tensors of these shapes, as if on `device`. Nothing is computed or sent.

    Args:
        model: whose modules `run` calls. It stays as it is.

    Raises:
        Exception: `run` needs values.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
        )

    whole = nn.Module()  # functional_call takes a module
    whole.model, whole.forward = model, run
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    with torch.inference_mode(False), torch.enable_grad(), unchanged(model.modules()), unobserved(), shapes_only():
        weights = {name: fake(tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(whole, weights, map_tensors(fake, args))
