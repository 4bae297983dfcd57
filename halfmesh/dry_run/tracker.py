"""Tracks the memory and communication of a step, at torch's operators."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..utils.torch_private import has_no_memory, shapes_only

OTHER = "other"
"""Activations while the model computes; temporary memory while an update runs."""

_UNSENT = ("recv", "barrier")  # the sender counts

_DEVICE = torch.ops.prim.device.default
"""Three of four calls in a dry run; answering them here saves a third of its time."""

_COMPARISONS = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
"""Comparisons of values, which do not exist: their result is taken to be the expected one."""


@dataclass
class Traffic:
    """The communication of a rank: messages, and their bytes (of a gather or scatter: those of all ranks)."""

    messages: int = 0
    bytes: int = 0

    def add(self, other: Traffic, times: int = 1) -> None:
        """Add `other`, `times` times."""
        self.messages += other.messages * times
        self.bytes += other.bytes * times


@contextmanager
def dry_run_mode() -> Iterator[None]:
    """A scope in which new tensors have no memory, and messages go to a process group of the backend "fake"."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # a real run shows them
        with shapes_only():
            yield


@dataclass(slots=True)
class _Storage:
    """A storage that an operator made: a weak reference, its label, and the bytes that are counted."""

    ref: Any
    label: str = OTHER
    size: int = 0


class Tracker(TorchDispatchMode):
    """Bytes of all storages that operators made and that are alive, each with a label; and messages by mesh axis.

    A storage counts from the operator that returns it until nothing refers to it. Memory that a kernel allocates and
    frees inside is not seen. It also gives the host values of tensors without memory. Enter it after `dry_run_mode`; it
    also works on tensors with memory.

    Attributes:
        alive: bytes by label, now.
        largest: the most bytes of each label since `begin`.
        peak: the most bytes at once since `begin`.
        sent: the messages by axis; "all" for groups that are not in `axes`.
        axes: the axis of each process group, by the group's name.
        transfers: axes whose messages are labelled "communication", also those over further axes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: Counter[str] = Counter()
        self.largest: Counter[str] = Counter()
        self.total = self.peak = 0
        self.sent: dict[str, Traffic] = {}
        self.axes: Mapping[str, str] = {}
        self.transfers: Collection[str] = ()
        self._known: dict[int, _Storage] = {}

    def begin(self) -> None:
        """Start new peaks."""
        self.look_again()
        self.largest, self.peak = Counter(self.alive), self.total

    def label(self, tensors: Iterable[torch.Tensor | None], label: str, only: str | None = None) -> None:
        """Label the storages of `tensors` from now on; with `only`, those that have that label."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = self._note(tensor.untyped_storage())
            if only is None or storage.label == only:
                size = storage.size
                self._count_bytes(storage, 0)
                storage.label = label
                self._count_bytes(storage, size)

    def look_again(self) -> None:
        """Update the sizes of storages: FSDP2 frees and allocates memory by resizing them."""
        for storage in list(self._known.values()):
            if (held := storage.ref()) is not None:
                self._count_bytes(storage, held.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = any(isinstance(arg, torch.Tensor) and has_no_memory(arg) for arg in args[:2])
        if is_fake and func is _DEVICE:
            return args[0].fake_device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor has no memory itself; its local tensor comes here again
        if is_fake and func is torch.ops.aten._local_scalar_dense.default:
            return _value(args[0])
        if is_fake and func in _COMPARISONS:
            return True
        is_product = is_fake and func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32
        made = _grouped_product(*args) if is_product else func(*args, **(kwargs or {}))
        for leaf in (made,) if isinstance(made, torch.Tensor) else tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and leaf.layout == torch.strided:
                self._note(leaf.untyped_storage())
        if func.namespace == "c10d":
            self.look_again()
            self._count_message(func, args)
        return made

    def _note(self, held: torch.UntypedStorage) -> _Storage:
        key = id(held)  # it is kept as long as its memory
        if key not in self._known:
            self._known[key] = _Storage(weakref.ref(held, lambda _: self._count_bytes(self._known.pop(key), 0)))
        self._count_bytes(self._known[key], held.nbytes())
        return self._known[key]

    def _count_bytes(self, storage: _Storage, size: int) -> None:
        label, more = storage.label, size - storage.size
        if more:
            storage.size = size
            self.total += more
            self.alive[label] += more
            self.peak = max(self.peak, self.total)
            self.largest[label] = max(self.largest[label], self.alive[label])

    def _count_message(self, func: Any, args: Any) -> None:
        group = _group(args)
        if group is None:
            return
        axis = self.axes.get(group, "all")
        given = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args]
        if axis.partition(" x ")[0] in self.transfers:
            for tensors in given:
                self.label(tensors, "communication", only=OTHER)
        if not func.name().partition("::")[2].startswith(_UNSENT):
            size = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in given)
            self.sent.setdefault(axis, Traffic()).add(Traffic(1, size))


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The product of rows of `a` (or of all) with the matrices of `b`, where rows of each end at `ends`. torch has fp32
    kernels of it, but infers its shape for half precision only."""
    groups = ends.shape if a.dim() == b.dim() == 2 and ends is not None else a.shape[:1] if a.dim() == b.dim() else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _value(tensor: torch.Tensor) -> float | int:
    """The value that the host reads from `tensor` of one element in a dry run: its value if constant, else a guess.

    The guess is 0 (no gradient is inf or nan; nothing is wrong), except for two kinds of integers that torch's
    pipelines read: an int32 is torch 2.13's vote that all stages have their shapes, which is 1; an int64 is the number
    of a microbatch, an element of arange(n), which is its offset in memory.
    """
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    if tensor.dtype == torch.int32:
        return 1
    return int(tensor.storage_offset()) if tensor.dtype == torch.int64 else 0


def _group(args: Sequence[Any]) -> str | None:
    """The name of the process group among the arguments of an operator of torch.distributed; None if there is none."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(arg).group_name)
            except RuntimeError:  # a ReduceOp
                continue
    return None
