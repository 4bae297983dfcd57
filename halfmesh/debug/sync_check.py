"""`debug="sync"`: compares after each step all state that should be equal on several ranks.

It finds mistakes, and is slow: all tensors are copied to the host and digested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..amp.step_result import StepResult
from ..checkpoint.state import IMPLEMENTATION, ShardedState
from ..errors import SyncError
from ..parallel.initial_state import is_plain, plain_settings
from ..parallel.reducer import STATISTICS
from ..parallel.replica_checks import ReplicatedValue, find_difference
from ..utils.engine_hook import EngineHook

if TYPE_CHECKING:
    from ..engine.parts import EngineParts

_AVERAGED = (*STATISTICS, "num_batches_tracked")
_DRIFTED = (
    "Look for what only some ranks do between two steps: code under `if rank == 0` that writes weights, buffers, "
    "settings or optimizer state, draws random numbers within the model, or steps a scheduler; a loader of your own"
)


class SyncCheck(EngineHook):
    """Compares, and raises the same SyncError on all ranks."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._sharded = ShardedState(parts.model, parts.update, parts.division)
        self._context = context = parts.context
        self._names = [context.rank_names.name(rank) for rank in range(context.size)]
        self._step = 0  # the last step after which all was equal

    def after_step(self, result: StepResult) -> None:
        step = self._parts.global_step
        found = find_difference(self._state(result), self._names, self._context.device)
        if found is not None:
            name, lines = found
            before = f"after step {self._step} they did not" if self._step else "this is the first comparison"
            step = self._context.from_first(step)  # the step itself may differ
            raise SyncError(f"after step {step} the ranks differ in {name} ({before}):\n{lines}\n{_DRIFTED}")
        self._step = step

    # -- state that should be equal ----------------------------------------------------------------------------

    def _state(self, result: StepResult) -> list[Iterator[ReplicatedValue]]:
        """All state of this rank after a step, causes before consequences. It reads the device.

        Ranks that hold the same shard of a tensor must have equal values: data ranks if it is replicated, tensor ranks
        if it is not split, stages that share it, replicas of hybrid sharding.
        """
        parts = self._progress(), self._random(), self._verdict(result), self._settings(), self._weights()
        return [*parts, self._buffers(), self._optimizer_state()]

    def _progress(self) -> Iterator[ReplicatedValue]:
        yield ReplicatedValue("engine.global_step", self._parts.global_step)
        if self._parts.dataloader is not None:
            yield ReplicatedValue(
                "the place in engine.dataloader (epoch, batches trained on)", self._parts.dataloader.place
            )

    def _random(self) -> Iterator[ReplicatedValue]:
        """The model's random numbers, if the ranks of a tensor group draw the same."""
        division, stage = self._parts.division, (self._context.place("pp"), *self._batch())
        if division.random is not None:
            yield ReplicatedValue("the model's random numbers (torch)", division.random.state, stage)
            host = division.host_random.state
            if host is not None:
                name, keys, *rest = host["numpy"]
                drawn = host["python"], name, keys.tolist(), *rest
                yield ReplicatedValue("the model's random numbers (python, numpy)", drawn, stage)

    def _batch(self) -> tuple[int, ...]:
        """The coordinates that determine this rank's shard of a batch."""
        return self._context.dp_rank, *map(self._context.place, self._parts.division.own_rng_axes)

    def _verdict(self, result: StepResult) -> Iterator[ReplicatedValue]:
        update = self._parts.update
        yield ReplicatedValue("whether the step was skipped", result.skipped)
        for number, state in enumerate(update.loss_scales.state_dict()):
            of = f" of loss {number}" if number else ""
            yield from (ReplicatedValue(f"{key} of the loss scaler{of}", value) for key, value in state.items())
        yield from (
            ReplicatedValue(f"{key} of the skip counter", v) for key, v in update.skip_counter.state_dict().items()
        )
        yield ReplicatedValue("the gradient norm", result.grad_norm)  # it is divided by the scale

    def _settings(self) -> Iterator[ReplicatedValue]:
        """The settings of the optimizer's groups, learning rates first."""
        groups = [dict(plain_settings(group)) for group in self._parts.update.optimizer.param_groups]
        settings = [(key, number, value) for number, group in enumerate(groups) for key, value in group.items()]
        for key, number, value in sorted(settings, key=lambda setting: setting[0] != "lr"):
            if key not in IMPLEMENTATION:  # a rank may choose these by its shards
                yield ReplicatedValue(f"{key} of parameter group {number}", value)

    def _weights(self) -> Iterator[ReplicatedValue]:
        """The weights that the model computes with, then the masters."""
        division, masters = self._parts.division, self._parts.update.master_weights.masters
        for shard, name in self._sharded.names():
            whole = division.data.compared(shard)
            yield ReplicatedValue(f"the weight {name}", whole.param.detach(), division.placement(whole))
        for shard, name in self._sharded.names():
            if shard.param in masters:
                yield ReplicatedValue(
                    f"the fp32 master of {name}", masters[shard.param].detach(), division.placement(shard)
                )

    def _buffers(self) -> Iterator[ReplicatedValue]:
        """Buffers that halfmesh averages are equal on all data ranks, others on the ranks that compute one batch."""
        first = self._parts.division.first_names(self._parts.model)
        for name, buffer in self._parts.model.named_buffers():
            among = None if name.rpartition(".")[2] in _AVERAGED else self._batch()
            yield ReplicatedValue(f"the buffer {first.get(name, name)}", buffer.detach(), among)

    def _optimizer_state(self) -> Iterator[ReplicatedValue]:
        update = self._parts.update
        for shard, name in self._sharded.trained():
            placement = self._parts.division.placement(shard)
            if placement.regions:  # else this rank holds nothing of it
                state = update.optimizer.state.get(update.master_weights.target(shard), {})
                yield ReplicatedValue(f"which optimizer state there is of {name}", sorted(map(str, state)), placement)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) or is_plain(value):
                        among = None if key == "step" else placement
                        yield ReplicatedValue(f"the optimizer's {key} of {name}", value, among)
