"""What can be counted of a step, and is the same in each run: values that the host reads, and bytes of tensors."""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .contenders import Setup
from .harness import Contender

# `.item()`, float(), bool() and `if tensor` all end in the first of these.
_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}


class ReadCounter(TorchDispatchMode):
    """Counts values of tensors that Python gets (`reads`); on a GPU each of them waits for the device. Not those of the
    optimizer's step counters, which are on the host for any device."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.reads = 0
        state = {} if optimizer is None else optimizer.state
        steps = [entry.get("step") for entry in state.values() if isinstance(entry, dict)]
        self._counters = {step.data_ptr() for step in steps if isinstance(step, torch.Tensor) and not step.is_cuda}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _wrapped(types):
            return NotImplemented
        if func._schema.name in _READS and args[0].data_ptr() not in self._counters:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def _wrapped(types: Any) -> bool:
    """Whether a DTensor or the like is among the arguments. It goes first then, and what it calls is seen again."""
    return any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types)


def count_reads(contender: Contender, steps: int = 4) -> float:
    """Host reads of the median step."""
    counted = []
    for _ in range(steps):
        with ReadCounter(contender.optimizer) as counter:
            contender.run(1)
        counted.append(counter.reads)
    return statistics.median(counted)


def tensor_bytes(tree: Any) -> int:
    """Of all tensors within."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
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
        """FSDP2 frees and takes memory by changing the size of a storage."""
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


def count_bytes(make: Callable[[], Contender], setup: Setup) -> tuple[float, float]:
    """Bytes a parameter that a fresh contender keeps between two steps, and at its peak within one.

    Kept are parameters, buffers, gradients, masters and optimizer state, without the batch.
    """
    gc.collect()
    tracker = StorageTracker([setup.x, setup.y])
    with tracker:
        contender = make()
        contender.run(3)  # the first ones make the optimizer's state
        gc.collect()
        tracker.peak = tracker.alive
        contender.run(1)
        gc.collect()
        kept, peak = tracker.alive, tracker.peak
    numbers = sum(param.numel() for param in contender.model.parameters())
    contender.close()
    return kept / numbers, peak / numbers
