"""An exponential moving average of the weights, in the precision in which they are trained."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from .. import torch_private
from ..amp.master_weights import STREAM_BYTES, by_bytes
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import HALF
from ..errors import InputError, show
from ..log import get_logger
from ..shard import ParamShard
from .cycle import refuse_averaged

if TYPE_CHECKING:
    from .saving import Saving

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
        self._parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # averages, and what they follow
        self._refreshed = -1  # `Holdings.refreshed` when these were made

    @torch.no_grad()
    def begin_anew(self, besides: Container[ParamShard] = ()) -> None:
        """The average is the weights as they are now, but for those of `besides`."""
        holdings = self._update.holdings
        if holdings.masters:
            holdings.take_edits()
        for shard in holdings.trained:
            if shard not in besides:
                self.make(shard).copy_(holdings.target(shard))

    def make(self, shard: ParamShard) -> torch.Tensor:
        """The average of `shard`; memory for it if there is none."""
        if shard not in self.values:
            target = self._update.holdings.target(shard)
            dtype = torch.float32 if target.dtype in HALF else target.dtype
            self.values[shard] = torch.empty_like(target, dtype=dtype, requires_grad=False)
            self._refreshed = -1
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
        if self._refreshed != self._update.holdings.refreshed:
            self._divide()
        weight: float | torch.Tensor = 1 - self.decay
        if self._update.found_inf is not None:
            weight = (1 - self._update.found_inf) * weight
        for averages, weights in self._parts:
            torch_private.foreach_lerp_(averages, weights, weight)

    def _divide(self) -> None:
        """Into parts of one device and dtype, so that the memory for differences is small."""
        holdings = self._update.holdings
        self.begin_anew(besides=self.values)  # parameters that the optimizer was given since
        alike: dict[tuple[torch.device, torch.dtype], list[ParamShard]] = {}
        for shard in holdings.trained:
            target = holdings.target(shard)
            alike.setdefault((target.device, target.dtype), []).append(shard)
        parts = [part for shards in alike.values() for part in by_bytes(shards, STREAM_BYTES)]
        self._parts = [([self.values[s] for s in part], [holdings.target(s) for s in part]) for part in parts]
        self._refreshed = holdings.refreshed

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average by the parameter's name; not copied."""
        return {shard.name: value for shard, value in self.values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `state_dict` gave; what is not in it begins anew with the weights, if anybody has asked for it."""
        found = {shard: state[shard.name] for shard in self._update.holdings.trained if shard.name in state}
        for shard, value in found.items():
            self.make(shard).copy_(value)
        if self.values:
            self.begin_anew(besides=found)


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

    def __init__(self, engine: Saving, average: WeightAverage, decay: float) -> None:
        self._engine = engine
        self._average = average
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
        engine, average = self._engine, self._average
        engine._refuse_if_closed()
        refuse_averaged(engine._cycle, "average.applied()")
        holding = engine._run.holding
        average.begin_anew(besides=average.values)
        written = holding.written()
        kept = [tensor.clone() for tensor in written]
        with torch.no_grad():
            for shard in holding.update.holdings.trained:
                holding.update.holdings.target(shard).copy_(average.values[shard])
        holding.tell()
        engine._cycle.averaged = True
        try:
            yield
        finally:
            engine._cycle.averaged = False
            with torch.no_grad():
                torch_private.foreach_copy_(written, kept)
            holding.tell(others=False)  # they do the same; after an error here they may be elsewhere

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the whole model with the averaged weights, as `Engine.save_weights` does. All ranks together."""
        with self.applied():
            self._engine.save_weights(path, format=format, max_file_gb=max_file_gb)
