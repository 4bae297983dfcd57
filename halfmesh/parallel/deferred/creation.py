"""Models built without values: the scopes in which they are, and as what."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from ...errors import InputError, bullet_list, shorten
from ...utils.tensors import map_tensors
from ...utils.torch_private import has_grad_hooks
from .operations import View
from .recording import Recording, recording_of

_MARK = "_halfmesh_recorded"


@dataclass(frozen=True)
class Recorded:
    """Where the value of a tensor is recorded."""

    recording: Recording
    view: View

    def value(self) -> torch.Tensor:
        """The whole value, in memory of its own."""
        return self.recording.value(self.view)


def recorded(tensor: torch.Tensor) -> Recorded | None:
    """Where the value of `tensor`, of a converted model, is recorded; None if the tensor has it."""
    return getattr(tensor, _MARK, None)


def forget(tensor: torch.Tensor) -> None:
    """`tensor` has its value now."""
    vars(tensor).pop(_MARK, None)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def convert_to_meta(model: nn.Module, optimizer: Any, undo: ExitStack) -> None:
    """Turn the tensors of `model` that have no memory into ordinary ones on the meta device; `undo` turns them back.

    They stay the same objects, except those with weak references (nn.LSTM's): these are replaced, in `optimizer`, too,
    by new tensors that get their values at once. Does nothing to a model with values.

    Raises:
        InputError: a tensor cannot be made separately.
    """
    found = {name: tensor for name, tensor in named_tensors(model) if recording_of(tensor) is not None}
    if not found:
        return
    if problems := list(_find_problems(found)):
        raise InputError(bullet_list("the model was built without memory, and cannot get its values:", problems))
    new: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and recording_of(tensor) is not None:
                    _replace(module, name, tensor, new, undo)
    internal = vars(nn.Module()).keys()
    for module in model.modules():  # after all parameters: an attribute may be one of them
        for name, value in list(vars(module).items()):
            if name not in internal:
                _complete(module, name, value, new)
    for group in getattr(optimizer, "param_groups", ()) if isinstance(optimizer, optim.Optimizer) else ():
        group["params"][:] = [new.get(id(param), param) for param in group["params"]]


def _replace(module: nn.Module, name: str, tensor: torch.Tensor, new: dict[int, torch.Tensor], undo: ExitStack) -> None:
    if weakref.getweakrefcount(tensor):
        setattr(module, name, _made(tensor, new))
        return
    made = _like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    setattr(made, _MARK, _where(tensor))
    torch.utils.swap_tensors(tensor, made)
    undo.callback(torch.utils.swap_tensors, tensor, made)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a parameter if `tensor` is one, with what is set on it."""
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(value, tensor.requires_grad)
    else:
        made = value.requires_grad_(tensor.requires_grad)
    vars(made).update(_own_attributes(tensor))
    return made


def _own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has set on `tensor`, without torch's own attributes."""
    with Recording():
        of_torch = vars(nn.Parameter(torch.empty(0))).keys()
    return {name: value for name, value in vars(tensor).items() if name not in of_torch}


def _where(tensor: torch.Tensor) -> Recorded:
    recording = recording_of(tensor)
    assert recording is not None
    return Recorded(recording, recording.view(tensor))


def _complete(module: nn.Module, name: str, value: Any, new: dict[int, torch.Tensor]) -> None:
    """Make tensors that a module keeps in other attributes at once: they are never sharded."""
    if isinstance(value, (torch.Tensor, list, tuple, dict)):
        completed = map_tensors(lambda tensor: _made(tensor, new), value)
        if completed is not value:
            setattr(module, name, completed)


def _made(tensor: torch.Tensor, new: dict[int, torch.Tensor]) -> torch.Tensor:
    """`tensor`, or one with its value if it has no memory: `new` has these, by the ids of the old ones."""
    if id(tensor) not in new and recording_of(tensor) is not None:
        new[id(tensor)] = _like(tensor, _where(tensor).value())
    return new.get(id(tensor), tensor)


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
    """Raise InputError if `optimizer` has made its state from weights that have no values yet."""
    held = getattr(optimizer, "state", {}) if isinstance(optimizer, optim.Optimizer) else {}
    state = [value for entry in held.values() for value in entry.values()]
    if any(isinstance(v, torch.Tensor) and (v.is_meta or recording_of(v) is not None) for v in state):
        raise InputError(
            f"optimizer: {type(optimizer).__name__} made its state from weights that have no values yet; take one "
            "whose state is made by its first step, or build the model as usual"
        )


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built within have shapes and no memory; `initialize` makes the values that this rank holds.

    The values are the same in every layout, and in one process: each random tensor has its own seed, drawn from torch's
    generator. They are not those of an ordinary build, but have the same distribution.

    Example:
        with halfmesh.deferred_init():
            model = LlamaForCausalLM(config)
        engine = halfmesh.initialize(model, lambda params: AdamW(params, lr=1e-4), config="config.py")
    """
    with warnings.catch_warnings():
        # Copies of tensors ask for their address first.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with Recording():
            yield


@contextmanager
def model_creation(dtype: torch.dtype | str | None = None, *, deferred: bool = False) -> Iterator[None]:
    """Models built within have parameters of `dtype`; with `deferred`, no memory either, see `deferred_init`.

    Args:
        dtype: of floating-point tensors that are made without one: float32, float16, bfloat16 or float64; None: torch's
            default. Mode NAIVE takes a model in its own dtype, and its fp32 masters start from the rounded weights.
    """
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    before = torch.get_default_dtype()
    with deferred_init() if deferred else nullcontext():
        if chosen is not None:
            torch.set_default_dtype(chosen)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build(model: Callable[[], Any]) -> nn.Module:
    """Return `model()`, built without memory.

    Raises:
        InputError: it raised something.
    """
    try:
        with deferred_init():
            built: nn.Module = model()
    except Exception as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        raise InputError(
            f"model: the callable {name} raised {type(error).__name__}: {error}. It is called without arguments, and "
            "what it builds has no memory (halfmesh.deferred_init); if that is the reason, build the model first and "
            "pass the model itself"
        ) from error
    return built
