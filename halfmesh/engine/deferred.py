"""Models built without values: the scopes in which they are, and how each rank makes the values that it holds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn, optim

from ..errors import InputError, shorten
from ..parallel.comm import same_on_ranks
from ..parallel.mesh import ParallelContext
from ..utils.optimizer_state import kinds_of
from ..utils.tensors import map_tensors, replace_data, tensors_of
from ..utils.torch_private import grad_hooks, in_shapes_only
from .recording import Recording, View, default_dtype, recording_of

_MARK = "_halfmesh_recorded"
Check = Callable[[str, torch.Tensor], str | None]

# -- scopes --------------------------------------------------------------------------------------------------------


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built within have shapes and no memory; `initialize` makes the values that this rank holds.

    The values are the same in every layout, and in one process: each random tensor has its own seed, drawn from torch's
    generator. They are not those of an ordinary build, but have the same distribution. `torch.empty` gives zeros.

    Tensors with outside values (`torch.tensor([...])`, `torch.from_numpy`) keep rank 0's; do not change their source
    before `initialize` returns. Tensors in plain attributes are created at once, with each rank's own seeds: make
    random ones buffers. Modules with weak references to their parameters (nn.LSTM) get new parameters, created whole on
    each rank before sharding; all other parameters stay the same objects.

    Example:
        with halfmesh.deferred_init():
            model = LlamaForCausalLM(config)
        engine = halfmesh.initialize(model, lambda params: AdamW(params, lr=1e-4), config="config.py")
    """
    with warnings.catch_warnings():
        # Copies of tensors ask for their address first.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with nullcontext() if in_shapes_only() else Recording():  # in a dry run no tensor has memory, or gets values
            yield


@contextmanager
def model_creation(dtype: torch.dtype | str | None = None, *, deferred: bool = False) -> Iterator[None]:
    """Models built within have parameters of `dtype`; with `deferred`, no memory either, see `deferred_init`.

    Args:
        dtype: of floating-point tensors that are made without one: float32, float16, bfloat16 or float64; None: torch's
            default. Mode NAIVE takes a model in its own dtype, and its fp32 masters start from the rounded weights.
    """
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with deferred_init() if deferred else nullcontext(), nullcontext() if chosen is None else default_dtype(chosen):
        yield


def build(model: Callable[[], Any]) -> nn.Module:
    """Return `model()`, built without memory."""
    try:
        with deferred_init():
            built: nn.Module = model()
    except Exception as error:
        error.add_note(
            "halfmesh called `model` without arguments, under deferred_init(); if that is the reason, build the model "
            "first and pass it"
        )
        raise
    return built


# -- the model on the meta device ----------------------------------------------------------------------------------


def recorded(tensor: torch.Tensor) -> View | None:
    """Where the value of `tensor`, of a converted model, is recorded; None if the tensor has it."""
    return getattr(tensor, _MARK, None)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def convert_to_meta(model: nn.Module, optimizer: Any, undo: ExitStack) -> None:
    """Turn the tensors of `model` that have no memory into ordinary ones on the meta device; `undo` turns them back.

    They stay the same objects, except those with weak references (nn.LSTM's): these are replaced, in `optimizer`, too,
    by new tensors that get their values at once. Does nothing to a model with values.

    Raises:
        InputError: a tensor has gradient hooks, or its memory in common with another.
    """
    ours = {name: (tensor, view) for name, tensor in named_tensors(model) if (view := _view(tensor)) is not None}
    if not ours:
        return
    by_memory: dict[Any, list[str]] = {}
    for name, (_, view) in ours.items():
        by_memory.setdefault((view.recording, view.memory), []).append(name)
    if shared := next((names for names in by_memory.values() if len(names) > 1), None):
        raise InputError(
            f"model: {shorten(shared)} were made under deferred_init and share one memory; make each a separate "
            "parameter, or build the model without deferred_init"
        )
    if hooked := [name for name, (tensor, _) in ours.items() if grad_hooks(tensor)]:
        raise InputError(
            f"model: {shorten(hooked)} were made under deferred_init and have gradient hooks, which would be lost; "
            "register them after initialize"
        )
    new: dict[int, torch.Tensor] = {}

    def made(tensor: torch.Tensor) -> torch.Tensor:
        """One with its value if it has no memory: `new` has these, by the ids of the old ones."""
        if id(tensor) not in new and (view := _view(tensor)) is not None:
            new[id(tensor)] = _like(tensor, view.value())
        return new.get(id(tensor), tensor)

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is None or (view := _view(tensor)) is None:
                    continue
                if weakref.getweakrefcount(tensor):
                    setattr(module, name, made(tensor))
                    continue
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                setattr(meta := _like(tensor, meta), _MARK, view)
                torch.utils.swap_tensors(tensor, meta)
                undo.callback(torch.utils.swap_tensors, tensor, meta)
    internal = vars(nn.Module()).keys()
    for module in model.modules():  # after all parameters: an attribute may be one of them
        for name, value in list(vars(module).items()):
            # Tensors that a module keeps in other attributes are never sharded.
            if name not in internal and isinstance(value, (torch.Tensor, list, tuple, dict)):
                completed = map_tensors(made, value)
                if completed is not value:
                    setattr(module, name, completed)
    for group in getattr(optimizer, "param_groups", ()) if isinstance(optimizer, optim.Optimizer) else ():
        group["params"][:] = [new.get(id(param), param) for param in group["params"]]


def _view(tensor: torch.Tensor) -> View | None:
    recording = recording_of(tensor)
    return None if recording is None else recording.view(tensor)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a parameter if `tensor` is one, with the attributes that the user has set on it."""
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    with Recording():
        of_torch = vars(nn.Parameter(torch.empty(0))).keys()
    vars(made).update((name, value) for name, value in vars(tensor).items() if name not in of_torch)
    return made.requires_grad_(tensor.requires_grad)


def reject_early_state(optimizer: Any) -> None:
    """Raise InputError if `optimizer` has made its state from weights that have no values yet."""
    held = getattr(optimizer, "state", {}) if isinstance(optimizer, optim.Optimizer) else {}
    if any(v.is_meta or recording_of(v) is not None for v in tensors_of(dict(held))):
        raise InputError(
            f"optimizer: {kinds_of(optimizer)} made its state from weights that have no values yet; use one that "
            "makes it in its first step, or build the model without deferred_init"
        )


# -- values --------------------------------------------------------------------------------------------------------


class Materializer:
    """Gives the tensors of a model that is on the meta device their values: each rank makes what it holds.

    Args:
        tensors: by their names in the full model. Values go to the device of `context`.
        check: is called with the name and value of each tensor of this rank; returns why it cannot be used, or None.

    Attributes:
        cuts: for each sharded parameter a function from the full tensor to this rank's shard.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], context: ParallelContext, check: Check) -> None:
        self.cuts: Mapping[Any, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._context, self._check = context, check
        self._problems: list[str] = []

    def make(self, module: nn.Module) -> None:
        """Make the tensors of `module`."""
        for _, tensor in list(named_tensors(module)):
            if (view := recorded(tensor)) is not None:
                value = view.value()
                value = self.cuts[tensor](value) if tensor in self.cuts else value
                if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                    value = value.clone(memory_format=torch.preserve_format)
                if problem := self._check(self._names[id(tensor)], value):
                    self._problems.append(problem)
                _give(tensor, value.to(self._context.device, tensor.dtype))

    def finish(self) -> None:
        """All tensors are made. All ranks together.

        Raises:
            InputError: on all ranks, if a value cannot be used.
        """
        if problems := list(chain(*self._context.everyone(self._problems))):
            raise InputError(f"model: {problems[0]}")


def make_materializer(model: nn.Module, context: ParallelContext, check: Check) -> Materializer | None:
    """Make the source of values for the tensors of `model`; None if they have them. All ranks together.

    Args:
        check: see `Materializer`.

    Raises:
        InputError: on all ranks, if they have not built the same.
    """
    views = {name: view for name, tensor in named_tensors(model) if (view := recorded(tensor)) is not None}
    recordings = list({id(view.recording): view.recording for view in views.values()}.values())
    same_on_ranks(
        [list(views), [] if context.size == 1 else [recording.digest() for recording in recordings]],
        what="{ranks} would make other weights than rank 0; use deferred_init, and seed torch, python and numpy the "
        "same, on all ranks, or build without deferred_init",
    )
    if not views:
        return None
    for recording in recordings:
        recording.is_over = True
        seeds = context.from_first([op.seed for op in recording.ops])  # ranks differ if the user has not seeded torch
        for op, seed in zip(recording.ops, seeds, strict=True):
            op.seed = seed
    return Materializer({name: t for name, t in named_tensors(model) if name in views}, context, check)


def materialize(model: nn.Module, optimizer: Any = None) -> None:
    """Give the tensors of `model` that have no memory the values that one process makes. Others stay as they are.

    Raises:
        InputError: a tensor has gradient hooks.
    """
    convert_to_meta(model, optimizer, ExitStack())
    for _, tensor in named_tensors(model):
        if (view := recorded(tensor)) is not None:
            view.recording.is_over = True
            _give(tensor, view.value())


def _give(tensor: torch.Tensor, value: torch.Tensor) -> None:
    replace_data(tensor, value)
    vars(tensor).pop(_MARK)  # a recording may hold large tensors
