"""An exponential moving average of the weights, in the precision in which they are trained."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from .._torch import foreach_copy_, foreach_mul_
from ..amp.master_weights import bucket_bytes, by_bytes
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import HALF
from ..errors import InputError, show
from ..log import get_logger
from ..shard import ParamShard

if TYPE_CHECKING:
    from ..checkpoint.checkpointer import Checkpointer
    from .parts import EngineParts

_log = get_logger(__name__)


class WeightAverage:
    """The average of what this rank steps: masters, or parameters where there are none. Empty until it is asked for.

    Attributes:
        values: by shard, of those that the optimizer holds; fp32 (fp64 of fp64). A load may put them there before
            anybody has asked for them.
        decay: None until somebody has.
    """

    def __init__(self, update: MixedPrecisionOptimizer) -> None:
        self.values: dict[ParamShard, torch.Tensor] = {}
        self.decay: float | None = None
        self._update = update

    @torch.no_grad()
    def begin_anew(self, besides: Container[ParamShard] = ()) -> None:
        """The average is the weights as they are now, but for those of `besides`."""
        masters = self._update.master_weights
        if masters.masters:
            masters.adopt_external_writes()
        for shard in masters.trained:
            if shard not in besides:
                self.make(shard).copy_(masters.target(shard))

    def make(self, shard: ParamShard) -> torch.Tensor:
        """The average of `shard`; memory for it if there is none."""
        if shard not in self.values:
            target = self._update.master_weights.target(shard)
            dtype = torch.float32 if target.dtype in HALF else target.dtype
            self.values[shard] = torch.empty_like(target, dtype=dtype, requires_grad=False)
        return self.values[shard]

    @torch.no_grad()
    def after_step(self) -> None:
        """Follow an update, unless it was skipped. Nothing is read on the host."""
        if self.decay is None:
            _log.warning(
                "the checkpoint has an average of the weights, with which this run does not go on; call "
                "engine.averaged_model(decay) before the first step"
            )
            self.values.clear()
            return
        masters = self._update.master_weights
        if any(shard not in self.values for shard in masters.trained):  # parameters that the optimizer was given since
            self.begin_anew(besides=self.values)
        weight: float | torch.Tensor = 1 - self.decay
        if self._update.found_inf is not None:
            weight = (1 - self._update.found_inf) * weight
        alike: dict[tuple[torch.device, torch.dtype], list[ParamShard]] = {}
        for shard in masters.trained:
            target = masters.target(shard)
            alike.setdefault((target.device, target.dtype), []).append(shard)
        for (device, _), shards in alike.items():
            limit = bucket_bytes(device, sum(map(_numel, shards)))
            for part in by_bytes(shards, limit, _numel):  # so that the memory for differences is small
                averages, weights = [self.values[s] for s in part], [masters.target(s) for s in part]
                _lerp_(averages, weights, weight)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average by the parameter's name; not copied."""
        return {shard.name: value for shard, value in self.values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state_dict` gave; what is not in it begins anew with the weights, if anybody has asked for it."""
        found = {shard: state[shard.name] for shard in self._update.master_weights.trained if shard.name in state}
        for shard, value in found.items():
            self.make(shard).copy_(value)
        if self.values:
            self.begin_anew(besides=found)


def _numel(shard: ParamShard) -> int:
    return shard.param.numel()


def _lerp_(targets: list[torch.Tensor], sources: Sequence[torch.Tensor], weight: float | torch.Tensor) -> None:
    """targets + weight x (sources - targets), in place and in the targets' dtype, which is the same for all.

    Args:
        weight: a number, or 0-dim fp32 on a device, which is not read on the host.
    """
    wide = [source.to(target.dtype) for source, target in zip(sources, targets, strict=True)]
    if isinstance(weight, float):
        torch._foreach_lerp_(targets, wide, weight)
        return
    differences = torch._foreach_sub(wide, targets)
    foreach_mul_(differences, weight)
    torch._foreach_add_(targets, differences)


class AveragedModel:
    """The model with an exponential moving average of its weights, as `Engine.averaged_model` gives it:

        average = engine.averaged_model(decay=0.999)
        ...  # train
        with average.applied():
            evaluate(engine)
        average.save_weights("average.safetensors")

    After each update that was taken, average = decay x average + (1 - decay) x weights. Each rank averages what it
    steps, the fp32 masters where there are any; that takes 4 bytes for each of these. Buffers are the model's own.
    Checkpoints hold the average, in every layout and precision.
    """

    def __init__(self, parts: EngineParts, checkpointer: Checkpointer, decay: float) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._average = parts.average
        self.decay = decay

    @property
    def decay(self) -> float:
        """How much of the average each update keeps: 0 <= decay < 1. May be set at any time, as for a warmup:
        `average.decay = min(0.999, (1 + step) / (10 + step))`."""
        assert self._average.decay is not None
        return self._average.decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if type(decay) not in (int, float) or not 0 <= decay < 1:
            raise InputError(
                f"decay={show(decay)} is not a share of the average that each update keeps; give 0 <= decay < 1, such "
                "as 0.999"
            )
        self._average.decay = decay

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A scope in which the model computes with the averaged weights, for evaluation. All ranks together.

        Afterwards the weights are those of before, bit for bit. In between they are held aside: 4 bytes for each that
        this rank steps, under zero1 also the model's.

        Raises:
            InputError: within itself. In the scope: of `step`, and of what saves or loads training.
        """
        parts, average = self._parts, self._average
        parts.refuse_if_closed()
        parts.accumulation.refuse_averaged("average.applied()")
        state = self._checkpointer.sharded_state
        average.begin_anew(besides=average.values)
        written = state.written()
        kept = [tensor.clone() for tensor in written]
        with torch.no_grad():
            for shard in state.update.master_weights.trained:
                state.update.master_weights.target(shard).copy_(average.values[shard])
        state.tell()
        parts.accumulation.averaged = True
        try:
            yield
        finally:
            parts.accumulation.averaged = False
            with torch.no_grad():
                foreach_copy_(written, kept)
            state.tell(others=False)  # they do the same; after an error here they may be elsewhere

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the whole model with the averaged weights, as `Engine.save_weights` does. All ranks together."""
        with self.applied():
            self._parts.context.agree_on_call("engine.save_weights")
            self._checkpointer.save_weights(path, format, max_file_gb)
