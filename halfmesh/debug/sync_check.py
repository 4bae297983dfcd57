"""`debug="sync"`: compares all state that should be equal on several ranks after each step.

This is slow, because it copies all tensors to the host and computes digests of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..amp.step_result import StepResult
from ..checkpoint.state import ShardedState
from ..checkpoint.validate import IMPLEMENTATION
from ..distributed.env import RankNames, ranks_by_value
from ..errors import SyncError, show
from ..parallel.comm import broadcast_object, gather_objects
from ..parallel.reducer import STATISTICS
from ..utils.engine_hook import EngineHook
from ..utils.optimizer_state import is_plain, plain_settings
from ..utils.tensors import as_bytes, describe_form, digest

if TYPE_CHECKING:
    from ..data.loader import EngineDataLoader
    from ..parallel.mesh import ParallelContext
    from ..utils.engine_hook import Progress

_AVERAGED = (*STATISTICS, "num_batches_tracked")
_DRIFTED = (
    "Look for code that only some ranks run between two steps: an `if rank == 0` that writes weights, buffers, "
    "settings or optimizer state, draws random numbers inside the model, or steps a scheduler; or your own loader"
)


# Values that should be equal on several ranks: name for messages; a tensor, or a value that is equal if its repr is;
# and `among`: ranks that have the name with the same `among` should have the same value.
Values = Iterator[tuple[str, Any, Hashable]]


@dataclass(eq=False, repr=False)
class SyncCheck(EngineHook):
    """Compares, and raises the same SyncError on all ranks.

    Attributes:
        _step: the last step after which all was equal.
    """

    _sharded: ShardedState
    _context: ParallelContext
    _progress: Progress
    _loader: EngineDataLoader | None
    _step: int = 0

    def after_step(self, result: StepResult) -> None:
        step = self._progress.global_step
        found = _find_difference(self._state(result), self._context.rank_names, self._context.device)
        if found is not None:
            name, lines = found
            before = f"after step {self._step} they did not" if self._step else "this is the first comparison"
            step = self._context.from_first(step)  # the step itself may differ
            raise SyncError(f"after step {step} the ranks differ in {name} ({before}):\n{lines}\n{_DRIFTED}")
        self._step = step

    # -- state that should be equal ----------------------------------------------------------------------------

    def _state(self, result: StepResult) -> list[Values]:
        """All state of this rank after a step, causes before consequences. It reads the device.

        Ranks that hold the same shard of a tensor must have equal values: data ranks if it is replicated, tensor ranks
        if it is not split, stages that share it, replicas of hybrid sharding.
        """
        parts = self._position(), self._random(), self._verdict(result), self._settings(), self._weights()
        return [*parts, self._buffers(), self._optimizer_state()]

    def _position(self) -> Values:
        yield "engine.global_step", self._progress.global_step, None
        if self._loader is not None:
            yield "the place in engine.dataloader (epoch, batches trained on)", self._loader.position, None

    def _random(self) -> Values:
        """The model's random numbers, if the ranks of a tensor group draw the same."""
        parallel_model, stage = self._sharded.parallel_model, (self._context.coordinate("pp"), *self._batch())
        if parallel_model.random is not None:
            yield "the model's random numbers (torch)", parallel_model.random.state, stage

    def _batch(self) -> tuple[int, ...]:
        """The coordinates that determine this rank's shard of a batch."""
        return self._context.dp_rank, *map(self._context.coordinate, self._sharded.parallel_model.own_rng_axes)

    def _verdict(self, result: StepResult) -> Values:
        update = self._sharded.update
        yield "whether the step was skipped", result.skipped, None
        for number, state in enumerate(update.loss_scales.state_dict()):
            of = f" of loss {number}" if number else ""
            yield from ((f"{key} of the loss scaler{of}", value, None) for key, value in state.items())
        yield from ((f"{key} of the skip counter", v, None) for key, v in update.skip_counter.state_dict().items())
        yield "the gradient norm", result.grad_norm, None  # it is divided by the scale

    def _settings(self) -> Values:
        """The settings of the optimizer's groups, learning rates first."""
        groups = [dict(plain_settings(group)) for group in self._sharded.update.optimizer.param_groups]
        settings = [(key, number, value) for number, group in enumerate(groups) for key, value in group.items()]
        for key, number, value in sorted(settings, key=lambda setting: setting[0] != "lr"):
            if key not in IMPLEMENTATION:  # a rank may choose these by its shards
                yield f"{key} of parameter group {number}", value, None

    def _weights(self) -> Values:
        """The weights that the model computes with, then the masters."""
        parallel_model, masters = self._sharded.parallel_model, self._sharded.update.master_weights
        for shard, name in self._sharded.names():
            full = shard if shard.source is None or shard.original is not None else shard.source  # fsdp shards both
            yield f"the weight {name}", full.param.detach(), parallel_model.placement(full)
        for shard, name in self._sharded.names():
            if shard.param in masters.masters:
                yield f"the fp32 master of {name}", masters.value(shard), parallel_model.placement(shard)

    def _buffers(self) -> Values:
        """Buffers that halfmesh averages are equal on all data ranks, others on the ranks that compute one batch."""
        first = self._sharded.parallel_model.first_names(self._sharded.model)
        for name, buffer in self._sharded.model.named_buffers():
            among = None if name.rpartition(".")[2] in _AVERAGED else self._batch()
            yield f"the buffer {first.get(name, name)}", buffer.detach(), among

    def _optimizer_state(self) -> Values:
        update = self._sharded.update
        for shard, name in self._sharded.trained():
            placement = self._sharded.parallel_model.placement(shard)
            if placement.regions:  # else this rank holds nothing of it
                state = update.optimizer.state.get(update.master_weights.target(shard), {})
                yield f"which optimizer state there is of {name}", sorted(map(str, state)), placement
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) or is_plain(value):
                        yield f"the optimizer's {key} of {name}", value, None if key == "step" else placement


def _find_difference(mine: Sequence[Values], ranks: RankNames, device: torch.device) -> tuple[str, str] | None:
    """The first value that differs but should not: its name, and lines with the value of each rank. None: all are
    equal. All ranks call this together, and get the same result.

    It sends some bytes for each value; if one differs, also one copy of it.

    Args:
        mine: this rank's values, causes before consequences.
    """
    held = {(name, among): (order, value) for order, values in enumerate(mine) for name, value, among in values}
    everyone = gather_objects({key: (order, digest(value)) for key, (order, value) in held.items()})
    found: dict[Any, set[tuple[int, bytes]]] = {}
    for theirs in everyone:
        for key, its in theirs.items():
            found.setdefault(key, set()).add(its)
    unlike = [key for key, digests in found.items() if len(digests) > 1]
    if not unlike:
        return None
    first = min(unlike, key=lambda key: min(found[key])[0])
    holders = ranks_by_value({rank: theirs[first] for rank, theirs in enumerate(everyone) if first in theirs})
    groups = sorted(holders.values(), key=lambda some: (-len(some), some[0]))  # most ranks first, then the lowest
    _, value = held.get(first, (0, None))
    # A copy: pickle would include all of the memory that a view refers to.
    sent = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    reference = broadcast_object(sent, groups[0][0], device)
    differences = gather_objects(_describe(reference, value) if first in held else None)
    equal = "equal, " if len(groups[0]) > 1 else ""
    said = [f"{equal}taken as the reference", *(differences[group[0]] for group in groups[1:])]
    lines = (f"{ranks.names(group)}: {how}" for group, how in zip(groups, said, strict=True))
    return first[0], "\n".join(f"  - {line}" for line in lines)


def _describe(reference: Any, value: Any) -> str:
    """The difference in words: "differs in 1 of 64 elements, first at [0, 3]: 1.0 instead of 2.0"."""
    if not isinstance(reference, torch.Tensor) or not isinstance(value, torch.Tensor):
        return f"{show(value, 120)} instead of {show(reference, 120)}"
    if describe_form(value) != describe_form(reference):
        return f"is {describe_form(value)}, not {describe_form(reference)}"
    a, b = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (reference, value))
    unequal = (as_bytes(a) != as_bytes(b)).view(len(a), -1).any(1).nonzero().reshape(-1)
    if not len(unequal):
        return "is the same"
    first = int(unequal[0])
    index = [int(i) for i in torch.unravel_index(unequal[0], value.shape)]
    was, others = f"{b[first].item()!r} instead of {a[first].item()!r}", f"{len(unequal)} of {len(a)} elements"
    return f"differs in {others}, first at {index}: {was}"
