"""A model that was built without memory is put on torch's meta device, and still knows how its values are made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from ..._torch import FakeTensorMode, has_grad_hooks
from ...errors import InputError, bullet_list, shorten
from ...tensors import map_tensors
from .operations import View
from .recording import Recording, recording_of

_MARK = "_halfmesh_recorded"


@dataclass(frozen=True)
class Recorded:
    """Where the value of a tensor is recorded."""

    recording: Recording
    view: View

    def value(self) -> torch.Tensor:
        """The whole of it, in memory of its own."""
        return self.recording.value(self.view)


def recorded(tensor: torch.Tensor) -> Recorded | None:
    """Where the value of `tensor`, of a converted model, is recorded; None if it has one."""
    return getattr(tensor, _MARK, None)


def forget(tensor: torch.Tensor) -> None:
    """`tensor` has its value now."""
    vars(tensor).pop(_MARK, None)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class MetaConversion:
    """Tensors that were put on the meta device, and what they were before. As a scope it is undone by an error."""

    def __init__(self) -> None:
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []

    def swap(self, tensor: torch.Tensor, new: torch.Tensor) -> None:
        """`tensor` stays the same object, and becomes `new`."""
        torch.utils.swap_tensors(tensor, new)
        self._swapped.append((tensor, new))

    def __enter__(self) -> MetaConversion:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is done to them is recorded again."""
        while self._swapped and kind is not None:
            torch.utils.swap_tensors(*self._swapped.pop())


def convert_to_meta(model: nn.Module, optimizer: Any, conversion: MetaConversion) -> None:
    """Make those tensors of `model` that have no memory ordinary ones on the meta device. They stay the same objects,
    but for those to which somebody has weak references (nn.LSTM's), which get their values at once; `optimizer` holds
    the new ones. Does nothing to another model.

    Raises:
        InputError: a tensor cannot be made by itself.
    """
    found = {name: tensor for name, tensor in named_tensors(model) if recording_of(tensor) is not None}
    if not found:
        return
    if problems := [*_find_problems(found), *_find_state(optimizer)]:
        raise InputError(bullet_list("the model was built without memory, and cannot be completed:", problems))
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and recording_of(tensor) is not None:
                    _replace(module, name, tensor, new, conversion)
    internal = vars(nn.Module()).keys()
    for module in model.modules():  # after all parameters: an attribute may be one of them
        for name, value in list(vars(module).items()):
            if name not in internal:
                _complete(module, name, value, new)
    for group in getattr(optimizer, "param_groups", ()) if isinstance(optimizer, optim.Optimizer) else ():
        group["params"][:] = [new.get(id(param), param) for param in group["params"]]


def _replace(
    module: nn.Module, name: str, tensor: torch.Tensor, new: dict[int, torch.Tensor], conversion: MetaConversion
) -> None:
    if weakref.getweakrefcount(tensor):
        if id(tensor) not in new:
            new[id(tensor)] = _like(tensor, _where(tensor).value())
        setattr(module, name, new[id(tensor)])
        return
    made = _like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    setattr(made, _MARK, _where(tensor))
    conversion.swap(tensor, made)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a parameter if `tensor` is one, with what is set on it."""
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(value, tensor.requires_grad)
    else:
        made = value.requires_grad_(tensor.requires_grad)
    vars(made).update(_own_attributes(tensor))
    return made


def _own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What somebody has set on `tensor`, which has attributes of torch's, too."""
    with FakeTensorMode():
        of_torch = vars(nn.Parameter(torch.empty(0))).keys()
    return {name: value for name, value in vars(tensor).items() if name not in of_torch}


def _where(tensor: torch.Tensor) -> Recorded:
    recording = recording_of(tensor)
    assert recording is not None
    return Recorded(recording, recording.view(tensor))


def _complete(module: nn.Module, name: str, value: Any, new: dict[int, torch.Tensor]) -> None:
    """Tensors that a module keeps as other attributes are made at once: nobody cuts them."""

    def complete(tensor: torch.Tensor) -> torch.Tensor:
        recording = recording_of(tensor)
        if recording is None or id(tensor) in new:
            return new.get(id(tensor), tensor)
        where = Recorded(recording, recording.view(tensor))
        if recording.from_rank0 and recording.is_random(where.view):
            raise InputError(
                f"{type(module).__name__}.{name} holds random numbers, and is neither a parameter nor a buffer, which "
                "rank 0 would send; use register_buffer"
            )
        new[id(tensor)] = _like(tensor, where.value())
        return new[id(tensor)]

    if isinstance(value, (torch.Tensor, list, tuple, dict)):
        completed = map_tensors(complete, value)
        if completed is not value:
            setattr(module, name, completed)


def _find_problems(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    hooked = [name for name, tensor in tensors.items() if has_grad_hooks(tensor)]
    if hooked:
        yield f"{shorten(hooked)} have hooks on the gradient, which would be lost; register them after initialize"
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        where = _where(tensor)
        by_memory.setdefault((id(where.recording), where.view.memory), []).append(name)
    for names in by_memory.values():
        if len(names) > 1:
            yield f"{shorten(names)} are views of one memory; make each a parameter of its own, or build as usual"


def refuse_early_state(optimizer: Any) -> None:
    """Raise InputError if `optimizer`, just made, has made its state from weights that have no values yet."""
    for problem in _find_state(optimizer):
        raise InputError(problem)


def _find_state(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, optim.Optimizer):
        return
    held = getattr(optimizer, "state", {})  # one that is not ready is refused elsewhere
    state = [value for entry in held.values() for value in entry.values()]
    if any(isinstance(v, torch.Tensor) and (v.is_meta or recording_of(v) is not None) for v in state):
        yield (
            f"optimizer: {type(optimizer).__name__} made its state from weights that have no values yet; take one "
            "whose state is made by its first step, or build the model as usual"
        )
