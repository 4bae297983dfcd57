"""Helpers for tensors: in nested containers, in buckets, and the order of their elements in memory."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from .torch_private import has_no_memory

_MIB = 2**20
_T = TypeVar("_T")


def map_tensors(fn: Callable[[Any], Any], tree: Any, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """`tree` with `fn` applied to its tensors (or leaves of another `kind`); containers keep their type.

    Walks lists, tuples, named tuples, mappings (also dict subclasses such as a model's output class) and dataclass
    instances; returns anything else unchanged. A container in which `fn` changes nothing is itself returned, so that
    code that compares outputs by identity still works.
    """
    return map_named(lambda _, leaf: fn(leaf), tree, "", kind)


def map_named(fn: Callable[[str, Any], Any], tree: Any, name: str, kind: type | tuple[type, ...] = torch.Tensor) -> Any:
    """`map_tensors` of a `fn` that also takes the name of a leaf: `name` and the keys below it, as "batch.images.0"."""
    if isinstance(tree, kind):
        return fn(name, tree)
    if isinstance(tree, (list, tuple)):
        values = [map_named(fn, value, f"{name}.{i}", kind) for i, value in enumerate(tree)]
        if all(map(is_, values, tree)):
            return tree
        make: Any = type(tree)
        return make(*values) if hasattr(tree, "_fields") else make(values)
    old: dict[Any, Any]
    if isinstance(tree, Mapping):
        old = dict(tree.items())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
    else:
        return tree
    new = {key: map_named(fn, value, f"{name}.{key}", kind) for key, value in old.items()}
    return tree if all(new[key] is value for key, value in old.items()) else _rebuild(tree, new)


def leaves_of(tree: Any, kind: type | tuple[type, ...]) -> list[Any]:
    """The leaves of that kind of `tree`, in the order in which `map_tensors` visits them."""
    found: list[Any] = []
    map_tensors(lambda leaf: found.append(leaf) or leaf, tree, kind)  # type: ignore[func-returns-value]
    return found


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of `tree`, in the order in which `map_tensors` visits them."""
    return leaves_of(tree, torch.Tensor)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; of sharded logits all of them, gathered from the ranks that have a shard."""
    full: torch.Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return full


def dtype_name(dtype: torch.dtype | None) -> str:
    """ "float16"; "" for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def count_rows(batch: Any, none: int = 1) -> int:
    """The batch size: the first dim of the first tensor that has dims, or the sequences of a PackedSequence before it;
    `none` if there is neither."""
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if isinstance(first, torch.Tensor) and first.dim():
        return first.shape[0]  # the usual batch, in each step: without a walk
    for found in leaves_of(batch, (PackedSequence, torch.Tensor)):
        if isinstance(found, PackedSequence):
            return int(found.batch_sizes[0])
        if found.dim():
            return int(found.shape[0])
    return none


def parameter_names(what: Callable[..., Any], needed: bool = False) -> list[str]:
    """Names of the parameters, or only of those without a default (`needed`); with the stars of *args and **kwargs,
    which also represent an unknown signature."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    try:
        parameters = inspect.signature(getattr(what, "forward", what)).parameters
    except (TypeError, ValueError):
        return ["*args", "**kwargs"]
    found = [(name, p) for name, p in parameters.items() if not needed or p.default is p.empty]
    return [stars.get(parameter.kind, "") + name for name, parameter in found]


def position_names(names: Sequence[str], count: int) -> list[str]:
    """The names of `count` positional arguments, of a function with these `parameter_names`."""
    known = list(takewhile(lambda name: not name.startswith("*"), names))[:count]
    return known + [f"argument {place + 1}" for place in range(len(known), count)]


def _rebuild(tree: Any, new: dict[Any, Any]) -> Any:
    """A mapping or dataclass instance like `tree` with the values `new`."""
    kind: Any = type(tree)
    if kind is dict:
        return new
    if dataclasses.is_dataclass(tree) and isinstance(tree, Mapping):  # a model's output
        return kind(**new)
    if isinstance(tree, Mapping):
        if hasattr(tree, "copy") and hasattr(tree, "update") and type(rebuilt := tree.copy()) is kind:
            rebuilt.update(new)  # keeps attributes of a subclass, such as a default factory
            return rebuilt
        return kind(new)
    rebuilt = copy.copy(tree)  # keeps attributes that are not fields
    for name, value in new.items():
        object.__setattr__(rebuilt, name, value)  # also works on a frozen dataclass
    return rebuilt


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill their memory without gaps or overlap, in any order of the dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one shape have their elements in the same order in memory. As torch's kernels do,
    this ignores the strides of dims of size 1, in which layouts of a 1x1 convolution's weight may differ."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one contiguous dim, in memory order. A view; a copy if not dense."""
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()


def replace_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, also where one of the two is on the meta device, for which torch refuses that.

    Raises:
        RuntimeError: one of the two is on the meta device, and something holds a weak reference to `tensor`.
    """
    if tensor.is_meta == value.is_meta:
        tensor.data = value
        return
    new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.view(value.shape)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)


def is_compound(value: object) -> bool:
    """Return True if `value` is a tensor made of other tensors, such as a quantised one, without its own memory.
    (False for a DTensor, and for a tensor of a dry run.)"""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local")


def bucket_bytes(device: torch.device, published: int = 0) -> int:
    """The bytes of fp32 gradients to step at a time, so that few fp32 copies exist at a time: 25 MiB; on CUDA 512, as
    each bucket costs the host kernel launches, for which small models would wait.

    Args:
        published: elements whose new weights are sent to other ranks meanwhile: on CUDA a sixteenth of them at a time,
            so that most are sent during the update.
    """
    if device.type != "cuda":
        return 25 * _MIB
    return max(25 * _MIB, min(4 * published // 16, 512 * _MIB)) if published else 512 * _MIB


def by_bytes(items: Iterable[_T], limit: float, nbytes: Callable[[_T], int]) -> list[list[_T]]:
    """Consecutive buckets of `items` of at most `limit` bytes; a larger item has its own."""
    buckets: list[list[_T]] = []
    room = 0.0
    for item in items:
        size = nbytes(item)
        if size > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(item)
        room -= size
    return buckets


def digest(tree: Any) -> bytes:
    """The digest of dtypes, shapes and bits of the tensors in `tree`; without tensors, of its repr (nan equals nan)."""
    found, tensors = hashlib.sha256(), tensors_of(tree)
    for tensor in tensors:
        add_tensor(found, tensor)
    if not tensors:
        found.update(repr(tree).encode())
    return found.digest()[:16]


def add_tensor(found: Any, tensor: torch.Tensor) -> None:
    """Add `tensor` to a digest of hashlib; of a sparse, a nested one or one without memory only dtype and shape."""
    found.update(describe_form(tensor).encode())
    if has_values(tensor) and tensor.numel():
        found.update(as_bytes(tensor).numpy())


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has elements in memory that can be compared one by one."""
    return tensor.layout == torch.strided and not tensor.is_nested and not has_no_memory(tensor)


def describe_form(tensor: torch.Tensor) -> str:
    """The layout, dtype and shape: "float32 of shape [2, 3]"."""
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{layout}{dtype_name(tensor.dtype)} of shape {shape}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one dim of bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
