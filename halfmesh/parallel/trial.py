"""Copies and trials of the user's model and optimizer: without memory, without data, and without a trace."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from ..errors import InputError
from ..utils.optimizer_state import inner_optimizers
from ..utils.tensors import is_compound, map_tensors, tensors_of
from ..utils.torch_private import shapes_only, unobserved, with_memory
from .rng import CPU, random_state, same_state, set_random_state

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
"""Of norms, where all is computed in fp32 and where not. Rounding does far less, but may send some tokens to other
experts in half precision."""


# -- modules ----------------------------------------------------------------------------------------------------------


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
    """Restore the attributes and buffers of `modules` afterwards, with the contents of lists, dicts, sets and
    dataclasses. It gives a function that returns True if one was set to another object in the scope so far."""
    containers: dict[int, Any] = {}
    for own in map(vars, modules):
        containers[id(own)] = own
        _find_containers(list(own.values()), containers)
    before = [(container, copy.copy(container)) for container in containers.values()]
    try:
        yield lambda: any(_ids(now) != _ids(then) for now, then in before)
    finally:
        for now, then in before:
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(then)


def _find_containers(value: Any, found: dict[int, Any]) -> None:
    """Add the lists, dicts and sets in `value`, and the dicts of dataclasses, by their ids."""
    inner = vars(value) if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else value
    if isinstance(value, type) or id(inner) in found or type(inner) not in (dict, list, set, tuple):
        return
    if type(inner) is not tuple:
        found[id(inner)] = inner
    for item in list(inner.values() if isinstance(inner, dict) else inner):
        _find_containers(item, found)


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


# -- trials -----------------------------------------------------------------------------------------------------------


class Effects(NamedTuple):
    """In a scope so far: if random numbers were drawn, and if attributes or buffers of the modules were changed."""

    drew: Callable[[], bool]
    wrote: Callable[[], bool]


@contextmanager
def no_side_effects(modules: Iterable[nn.Module], device: torch.device) -> Iterator[Effects]:
    """A scope without gradients after which all random generators, and the attributes, modes and buffers of `modules`,
    are as before."""
    held = list(modules)
    state = random_state(device)
    with with_memory(), torch.no_grad(), unchanged(held) as were_set:
        kept = (value for module in held for name, value in vars(module).items() if name != "_parameters")
        before = [(tensor, tensor.clone()) for value in kept for tensor in tensors_of(value)]  # buffers, and others

        def written() -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(t, value) for t, value in before if t.layout is not torch.strided or not torch.equal(t, value)]

        try:
            yield Effects(lambda: not same_state(state, random_state(device)), lambda: were_set() or bool(written()))
        finally:
            set_random_state(state, device)
            for tensor, value in written():  # some cannot be written: expanded, or made in inference mode
                tensor.copy_(value)


def rounds_products() -> bool:
    """Return True if products of fp32 are rounded, to TF32 or bf16."""
    fp32 = {backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)}
    return not fp32 <= {"none", "ieee"}


def find_gap(expected: Any, found: Any) -> float:
    """The largest difference of two outputs, relative to the norm of the expected one."""
    gaps = [0.0]
    for one, other in zip(tensors_of(expected), tensors_of(found), strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.is_floating_point():
            a, b = (x.detach().double().nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
            gaps.append(float((a - b).norm() / a.norm().clamp_min(1e-30)))
    return max(gaps)


_UNITS = ("element", "row", "matrix")
_MATRIX = {
    *("torch.Muon", "torch.Adafactor"),
    *(f"timm.{name}" for name in ("Muon", "Adafactor", "AdafactorBigVision", "Lars", "AdamP", "SGDP")),
}
"""Optimizers that are not tried: some look at all of a parameter only with some weights and settings."""
_STEPS = 3
_SIDE = 256  # of the matrix; some optimizers look at rows and columns of large ones only


def find_unit(optimizer: optim.Optimizer) -> str:
    """The unit that a rank must hold so that `optimizer` steps it as in one process: any "element" of a parameter, or
    the whole "matrix", as for Muon (singular values), LAMB (norms) and Adafactor (rows and columns).

    An optimizer declares it by its attribute `unit`, which may also be "row"; of optimizers that are not torch's it is
    tested: two halves of a matrix, or two matrices, are stepped together and apart, and the results are compared.

    Raises:
        InputError: it steps several parameters by what it reads of all, or could not be tried.
    """
    name = type(optimizer).__name__
    is_known = f"{type(optimizer).__module__.split('.')[0]}.{name}" in _MATRIX
    if (unit := getattr(optimizer, "unit", "matrix" if is_known else None)) is not None:
        if unit not in _UNITS:
            raise InputError(f"optimizer: {name} has unit={unit!r}; allowed: {', '.join(map(repr, _UNITS))}")
        return "element" if unit == "element" else "matrix"
    if inner := inner_optimizers(optimizer):  # its step is theirs, with the real parameters: it cannot be tried itself
        for other in (type(other).__name__ for other in inner if find_unit(other) != "element"):
            raise InputError(f"optimizer: {name} steps {other}, which needs whole parameters; pass {other} alone")
        return "element"
    groups = optimizer.param_groups
    try:
        with no_side_effects((), CPU), torch.enable_grad():
            if not any(_differs(optimizer, group, dim, cuts=True) for group in groups for dim in (0, 1)):
                return "element"
            couples = any(_differs(optimizer, group, 0, cuts=False) for group in groups)
    except Exception as error:
        raise InputError(
            f"optimizer: could not test on a matrix whether {name} can step sharded parameters "
            f"({type(error).__name__}: {error}); use SGD, Adam, AdamW or another optimizer that steps dense matrices, "
            f"or set {name}.unit = 'matrix' if it steps each parameter by itself"
        ) from error
    if couples:
        raise InputError(
            f"optimizer: {name} steps each parameter with values from others, but a rank holds only some. If it clips "
            "by its own norm (LAMB's max_grad_norm), set clip_grad_norm in the config instead; otherwise use tensor=1 "
            "and data='replicate'"
        )
    return "matrix"


def _differs(optimizer: optim.Optimizer, group: dict[str, Any], dim: int, cuts: bool) -> bool:
    """Return True if two halves of a matrix along `dim` are stepped otherwise together than apart.

    Args:
        cuts: together they are one parameter; else two of one group.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(_SIDE, _SIDE, generator=generator) for _ in range(_STEPS + 1)]
    # Halves of different magnitude, or their norms would hardly differ; another one in the weights than in gradients.
    for tensor in tensors:
        tensor.narrow(dim, 0, _SIDE // 2).mul_(3.0 if tensor is tensors[0] else 9.0)
    halves = list(zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True))
    together = _stepped(optimizer, group, [tensors] if cuts else halves)
    apart = [stepped for half in halves for stepped in _stepped(optimizer, group, [half])]
    return not torch.allclose(torch.cat(apart, dim), torch.cat(together, dim), rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: optim.Optimizer, group: dict[str, Any], given: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Parameters, each `given` as its start and the gradients of its steps, after these steps by a copy of `optimizer`
    with the settings of `group`."""
    params = [nn.Parameter(start.clone()) for start, *_ in given]
    group = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    trial = copy.copy(optimizer)
    # Not the group's learning rate, which may be 0 at the start of a warm-up.
    lr = torch.tensor(0.1) if isinstance(group.get("lr"), torch.Tensor) else 0.1
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "lr": lr, "params": params}]
    for name, value in vars(optimizer).items():  # settings that an optimizer keeps outside of its groups
        if isinstance(value, (bool, int, float, str)):
            vars(trial).setdefault(name, value)
    for grads in zip(*(grads for _, *grads in given), strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        type(optimizer).step(trial)  # not the instance's: a scheduler may have wrapped it
    for key, value in (pair for param in params for pair in trial.state[param].items()):
        if is_compound(value):
            raise InputError(f"it keeps {key!r} as a {type(value).__name__}, in blocks that shards would cut elsewhere")
    return [param.detach() for param in params]
