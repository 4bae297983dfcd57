"""Exact counts of a step, which no other process on the machine can disturb: calls, operators, reads, bytes."""

from __future__ import annotations

import cProfile
import gc
import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .harness import Contender

# What hands a device's value to Python: .item(), float(), bool() and `if tensor` all end in the first of these.
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}
_SCATTERING = ("_reduce_scatter_base",)
_REDUCING = ("allreduce", "all_reduce", "reduce_scatter", "reduce_")
_SENDING = ("send",)


class OpCounter(TorchDispatchMode):
    """Counts what reaches the dispatcher below autograd, in backward, too.

    Attributes:
        ops: aten operators.
        reads: values that Python got, but for `counter_reads`.
        counter_reads: of those, the optimizer's step counters, which live on the host whatever the device.
        reduced: bytes that this rank gave to collectives that sum.
        sent: bytes that this rank sent to another one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.ops = self.reads = self.counter_reads = self.reduced = self.sent = 0
        state = {} if optimizer is None else optimizer.state
        steps = [entry.get("step") for entry in state.values() if isinstance(entry, dict)]
        self._counters = {step.data_ptr() for step in steps if isinstance(step, torch.Tensor) and not step.is_cuda}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _wrapped(types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("aten::"):
            self.ops += 1
            if name in _READS:
                if args[0].data_ptr() in self._counters:
                    self.counter_reads += 1
                else:
                    self.reads += 1
        elif name.startswith(("c10d::", "_c10d_functional::")):
            operation = name.partition("::")[2]
            if operation.startswith(_SCATTERING):
                self.reduced += tensor_bytes(args[1])  # the first is what comes back
            elif operation.startswith(_REDUCING):
                self.reduced += tensor_bytes(args[0])
            elif operation.startswith(_SENDING):
                self.sent += tensor_bytes(args[0])
        return func(*args, **(kwargs or {}))


def _wrapped(types: Any) -> bool:
    """Whether a DTensor or the like is among the arguments. It goes first then, and what it calls is seen again."""
    return any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types)


def tensor_bytes(given: Any) -> int:
    """Of all tensors within."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StorageTracker(TorchDispatchMode):
    """Bytes of all storages that operators made and that are alive, now and at most.

    A storage counts from the operator that returns it until nobody holds it: a weak reference to it tells. What a
    kernel allocates and frees within itself is not seen, nor is what `ignored` holds.
    """

    def __init__(self, ignored: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in ignored}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _wrapped(types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        if func.namespace == "c10d":
            self.look_again()
        return made

    def look_again(self) -> None:
        """FSDP2 gives memory up, and takes it again, by changing the size of a storage."""
        for key, ref in list(self._known.items()):
            if ref is not None and (storage := ref()) is not None:
                self._resize(key, storage.nbytes())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:

            def forget(_: Any) -> None:
                del self._known[key]
                self.alive -= self._sizes.pop(key)

            self._known[key] = weakref.ref(storage, forget)
        if self._known[key] is not None:
            self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        self.alive += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)


def count_calls(contender: Contender, steps: int = 20) -> float:
    """Calls of Python functions a step, built-in ones included, as cProfile counts them; the median of a few."""
    counted = []
    for _ in range(steps):
        if contender.before is not None:
            contender.before()
        profile = cProfile.Profile()
        profile.enable()
        contender.step()
        profile.disable()
        counted.append(sum(entry.callcount for entry in profile.getstats()) - 1)  # without disable() itself
    return statistics.median(counted)


def count_ops(contender: Contender, steps: int = 4) -> dict[str, float]:
    """Operators, host reads and bytes between ranks, in the median of `steps` steps; and the most reads of any of them:
    an engine may look at something once in a while."""
    counted: dict[str, list[int]] = {}
    for _ in range(steps):
        if contender.before is not None:
            contender.before()
        with OpCounter(contender.optimizer) as counter:
            contender.step()
        one = {
            "aten ops": counter.ops,
            "host reads": counter.reads,
            "step counter reads": counter.counter_reads,
            "bytes reduced": counter.reduced,
            "bytes sent": counter.sent,
        }
        for name, value in one.items():
            counted.setdefault(name, []).append(value)
    most = float(max(counted["host reads"]))
    return {name: float(statistics.median(values)) for name, values in counted.items()} | {"most host reads": most}


def count_memory(make: Callable[[], Contender], ignored: Sequence[torch.Tensor]) -> dict[str, float]:
    """Bytes a parameter that a fresh contender keeps after a step, and at its peak within one.

    Kept are parameters, buffers, gradients, masters and optimizer state: all that is alive after a step, and that was
    made since before the model was. The batch is `ignored`.
    """
    gc.collect()
    tracker = StorageTracker(ignored)
    with tracker:
        contender = make()
        contender.run(3)  # the first ones make the optimizer's state
        gc.collect()
        tracker.peak = tracker.alive
        contender.run(1)
        gc.collect()
        kept, peak = tracker.alive, tracker.peak
    numbers = sum(param.numel() for param in contender.model.parameters())
    if contender.close is not None:
        contender.close()
    return {"bytes kept": kept / numbers, "bytes at peak": peak / numbers}
