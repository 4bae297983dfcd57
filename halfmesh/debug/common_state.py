"""What ranks should have in common after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..amp.step_result import StepResult
from ..checkpoint.state import ShardedState
from ..data.loader import EngineDataLoader
from ..division import Division
from ..parallel.context import ParallelContext, is_plain, plain_settings
from ..parallel.drift import Common
from ..parallel.reducer import STATISTICS
from ..parallel.regions import Placement
from ..shard import ParamShard

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, which a rank may choose by what it holds."""
_AVERAGED = (*STATISTICS, "num_batches_tracked")


def common_state(
    sharded: ShardedState, context: ParallelContext, step: int, result: StepResult, dataloader: EngineDataLoader | None
) -> Iterator[Common]:
    """All of it that this rank has, causes before what follows from them. It reads the device.

    Of a tensor, those ranks have to agree that hold the same part of it: over the data axis where it is replicated,
    over the tensor axis where it is not cut, over the pipeline where stages share it, over the copies of hybrid
    sharding.
    """
    parts = (
        _progress(step, dataloader),
        _random(sharded.division, context),
        _verdict(sharded, result),
        _settings(sharded),
        _weights(sharded),
        _buffers(sharded, context),
        _optimizer_state(sharded),
    )
    for order, part in enumerate(parts):
        for common in part:
            yield Common(common.name, common.value, common.among, order)


def _progress(step: int, dataloader: EngineDataLoader | None) -> Iterator[Common]:
    yield Common("engine.global_step", step)
    if dataloader is not None:
        yield Common("the place in engine.dataloader (epoch, batches trained on)", dataloader.place)


def _verdict(sharded: ShardedState, result: StepResult) -> Iterator[Common]:
    yield Common("whether the step was skipped", result.skipped)
    for number, state in enumerate(sharded.update.loss_scales.state_dict()):
        of = f" of loss {number}" if number else ""
        yield from (Common(f"{key} of the loss scaler{of}", value) for key, value in state.items())
    yield from (Common(f"{key} of the skip counter", v) for key, v in sharded.update.skip_counter.state_dict().items())
    yield Common("the gradient norm", result.grad_norm)  # it is divided by the scale


def _settings(sharded: ShardedState) -> Iterator[Common]:
    """Of the optimizer's groups, learning rates first."""
    groups = [dict(plain_settings(group)) for group in sharded.update.optimizer.param_groups]
    for number, group in enumerate(groups):
        if "lr" in group:
            yield Common(f"lr of parameter group {number}", group["lr"])
    for number, group in enumerate(groups):
        for key, value in group.items():
            if key != "lr" and key not in _IMPLEMENTATION:
                yield Common(f"{key} of parameter group {number}", value)


def _weights(sharded: ShardedState) -> Iterator[Common]:
    """What the model computes with, then the masters."""
    division, masters = sharded.division, sharded.update.master_weights.masters
    for shard, name in sharded.names():
        whole = _gathered(shard, division)
        yield Common(f"the weight {name}", whole.param.detach(), division.placement(whole))
    for shard, name in sharded.names():
        if shard.param in masters:
            yield Common(f"the fp32 master of {name}", masters[shard.param].detach(), division.placement(shard))


def _gathered(shard: ParamShard, division: Division) -> ParamShard:
    """What the model computes with: under zero1 all of a parameter, of which `shard` is the part that is stepped."""
    return shard if division.slices is None or shard.source is None else shard.source


def _buffers(sharded: ShardedState, context: ParallelContext) -> Iterator[Common]:
    """Those that halfmesh averages are equal on all data ranks, others on the ranks that compute one batch."""
    first = sharded.division.first_names(sharded.model)
    for name, buffer in sharded.model.named_buffers():
        among = None if name.rpartition(".")[2] in _AVERAGED else context.dp_rank
        yield Common(f"the buffer {first.get(name, name)}", buffer.detach(), among)


def _optimizer_state(sharded: ShardedState) -> Iterator[Common]:
    optimizer = sharded.update.optimizer
    for shard, name in sharded.trained():
        placement = sharded.division.placement(shard)
        if not placement.regions:  # nothing of it is here
            continue
        state = optimizer.state.get(sharded.update.master_weights.target(shard), {})
        yield Common(f"which optimizer state there is of {name}", sorted(map(str, state)), placement)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) or is_plain(value):
                yield Common(f"the optimizer's {key} of {name}", value, _holders(key, placement))


def _holders(key: Any, placement: Placement) -> Placement | None:
    return None if key == "step" else placement


def _random(division: Division, context: ParallelContext) -> Iterator[Common]:
    """The model's own random numbers, where a tensor group draws alike."""
    if division.random is None:
        return
    stage = context.pp_rank, context.dp_rank
    yield Common("the model's random numbers (torch)", division.random.state, stage)
    host = division.host_random.state
    if host is not None:
        name, keys, *rest = host["numpy"]
        yield Common("the model's random numbers (python)", host["python"], stage)
        yield Common("the model's random numbers (numpy)", (name, keys.tolist(), *rest), stage)
