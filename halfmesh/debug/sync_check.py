"""`debug="sync"`: after each step, and for each batch, whether the ranks have in common what they should.

For finding mistakes, not for speed: everything is read once more, brought to the host and digested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..amp.step_result import StepResult
from ..checkpoint.state import ShardedState
from ..errors import SyncError
from ..launching.env import RankNames
from ..loop.executor import Executor
from ..loop.parts import EngineHook, EngineParts
from ..parallel.drift import Common, describe, find_drift
from ..tensors import tensors_of
from .common_state import common_state

if TYPE_CHECKING:
    from ..parallel.pipeline.stage import StageModule

_OTHER_BATCH = (
    "These ranks compute one batch together: iterate engine.dataloader, or shard a loader of your own by "
    "engine.context.dp_rank of engine.context.dp_size; and let random augmentation draw the same on all of them"
)
_DRIFTED = (
    "Look for what only some ranks do between two steps: code under `if rank == 0` that writes weights, buffers, "
    "settings or optimizer state, draws random numbers within the model, or steps a scheduler; a loader of your own"
)


class SyncCheck(EngineHook):
    """Compares, and raises the same SyncError on all ranks that compare."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._sharded = ShardedState(parts.model, parts.update, parts.division)
        self._context = context = parts.context
        pp, _, tp = context.shape
        names = RankNames(context.size, pp, tp)
        self._names = [names.name(rank) for rank in range(context.size)]
        self._group = context.batch_group
        self._steps = 0  # the last one after which all was equal

    def compared(self, executor: Executor) -> ComparedExecutor:
        """`executor`, which compares what it is given before it computes."""
        return ComparedExecutor(executor, self, self._sharded.model)

    def after_step(self, result: StepResult) -> None:
        """Compare everything. All ranks together."""
        step = self._parts.global_step
        state = common_state(self._sharded, self._context, step, result, self._parts.dataloader)
        drift = find_drift(state, self._context.device)
        if drift is not None:
            before = f"after step {self._steps} they did not" if self._steps else "this is the first comparison"
            step = self._context.from_first(step)  # it may be what differs
            raise SyncError(
                f"after step {step} the ranks differ in {drift.name} ({before}):\n"
                f"{describe(drift, self._names)}\n{_DRIFTED}"
            )
        self._steps = step

    def compare_batch(self, of: str, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Compare what the ranks that compute one batch were given. These together."""
        if self._group is None:
            return
        forms = [(str(tensor.dtype), tuple(tensor.shape)) for _, tensor in tensors]
        batch = [Common(f"the types and shapes of the tensors in {of}", forms)]
        batch += [Common(f"tensor {number} of {of}", tensor, order=1) for number, tensor in tensors]
        drift = find_drift(batch, self._context.device, self._group)
        if drift is not None:
            names = [self._names[rank] for rank in torch.distributed.get_process_group_ranks(self._group)]
            raise SyncError(
                f"after step {self._steps}, ranks were given different batches; {drift.name}:\n"
                f"{describe(drift, names)}\n{_OTHER_BATCH}"
            )


class ComparedExecutor:
    """`halfmesh.loop.executor.Executor` that compares what it is given in training, before it computes."""

    def __init__(self, executor: Executor, sync: SyncCheck, model: torch.nn.Module) -> None:
        self._sync = sync
        self._model = model
        self._executor = executor
        self.is_single, self.check, self.backward = executor.is_single, executor.check, executor.backward
        self.close = executor.close

    @property
    def stages(self) -> Collection[StageModule]:
        return self._executor.stages

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._compare("the inputs of engine(...)", (args, kwargs))
        return self._executor.forward(*args, **kwargs)

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._compare("the arguments of engine.criterion(...)", (args, kwargs))
        return self._executor.criterion(criterion, *args, **kwargs)

    def _compare(self, of: str, tree: Any) -> None:
        if self._model.training and torch.is_grad_enabled():
            self._sync.compare_batch(of, _given(tree))


def _given(tree: Any) -> list[tuple[int, torch.Tensor]]:
    """The tensors, numbered, without those that come from the model: outputs are equal but for rounding."""
    return [(number, tensor) for number, tensor in enumerate(tensors_of(tree)) if tensor.grad_fn is None]
