"""An exponential moving average of the weights, in the precision of training, and the model with these weights."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import HALF
from ..errors import InputError, reject_below
from ..utils.log import get_logger
from ..utils.param_shard import ParamShard
from ..utils.tensors import bucket_bytes, by_bytes
from ..utils.torch_private import foreach_copy_, foreach_mul_

if TYPE_CHECKING:
    from .engine import Engine

_log = get_logger(__name__)


@dataclass(eq=False, repr=False)
class WeightAverage:
    """The average of the weights that this rank steps: masters, or parameters where there are no masters.

    Attributes:
        values: the average of each trained shard and, by name, of each buffer of `buffers`, in fp32 (fp64 of fp64);
            empty until it is started or loaded.
        decay: None until it is started.
        every: the number of updates after which it follows the weights.
        buffers: names of the buffers that are averaged, too.
    """

    _update: MixedPrecisionOptimizer
    _model: nn.Module
    values: dict[ParamShard | str, torch.Tensor] = field(default_factory=dict)
    decay: float | None = None
    every: int = 1
    buffers: Collection[str] = ()

    def sources(self) -> dict[ParamShard | str, torch.Tensor]:
        """The tensors that are averaged."""
        masters = self._update.master_weights
        found: dict[ParamShard | str, torch.Tensor] = {shard: masters.target(shard) for shard in masters.trained}
        if self.buffers:
            held = dict(self._model.named_buffers(remove_duplicate=False))
            found |= {name: held[name] for name in self.buffers}
        return found

    @torch.no_grad()
    def restart(self, besides: Container[ParamShard | str] = ()) -> None:
        """Restart the average from the current weights, except for the shards and buffers in `besides`."""
        self._update.sync_writes(adopt=True)
        masters = self._update.master_weights
        for key, source in self.sources().items():
            if key not in besides:
                average = self.make(key, source)
                average.copy_(source if isinstance(key, str) else masters.value(key))

    def make(self, key: ParamShard | str, source: torch.Tensor) -> torch.Tensor:
        """The average of `source`, allocated if there is none."""
        if key not in self.values:
            dtype = torch.float32 if source.dtype in HALF else source.dtype
            layout = self._update.master_weights.layouts.get(source, source)
            self.values[key] = torch.empty_like(layout, dtype=dtype, requires_grad=False)
        return self.values[key]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Include the last update, of this number, unless it was skipped. No host read."""
        if self.decay is None:
            self.values.clear()
            _log.warning("the checkpoint has an average of the weights that this run has not resumed; it is dropped")
            return
        if step % self.every:
            return
        sources = self.sources()
        if any(key not in self.values for key in sources):  # parameters that the optimizer was given since
            self.restart(besides=self.values)
        weight: float | torch.Tensor = 1 - self.decay
        if self._update.found_inf is not None and self.every == 1:  # else updates before it were taken
            weight = (1 - self._update.found_inf) * weight
        limit = bucket_bytes(self._update.device)
        for keys in by_bytes(sources, limit, lambda key: 4 * sources[key].numel()):  # bounds the memory of differences
            shards = [key for key in keys if not isinstance(key, str)]
            with self._update.master_weights.joined(shards, writes=False):
                _lerp_([self.values[key] for key in keys], [sources[key] for key in keys], weight)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The average by the name of the parameter or buffer; not copied."""
        return {key if isinstance(key, str) else key.name: value for key, value in self.values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state_dict`; the average of other shards restarts from their weights."""
        if self.decay is None:
            self.buffers = [name for name, _ in self._model.named_buffers(remove_duplicate=False) if name in state]
        sources = {key if isinstance(key, str) else key.name: (key, x) for key, x in self.sources().items()}
        found = {key: self.make(key, x).copy_(state[name]) for name, (key, x) in sources.items() if name in state}
        if self.values:
            self.restart(besides=found)


class AveragedModel:
    """The model with an exponential moving average of its weights, as `Engine.averaged_model` gives it:

        average = engine.averaged_model(decay=0.999)
        ...  # train
        with average.applied():
            evaluate(engine)
        average.save_weights("average.safetensors")

    After each update that was taken, average = decay * average + (1 - decay) * weights, of the fp32 masters where there
    are any: 4 bytes for each weight that this rank steps. Checkpoints hold the average.

    A teacher in training computes before the student's forward, because torch rejects a backward after the weights have
    changed: `with torch.no_grad(), average.applied(): target = engine(x)`.
    """

    def __init__(self, engine: Engine, decay: float, every: int, buffers: bool) -> None:
        reject_below(1, every=every)
        self._engine = engine
        self._average = average = engine._state.average
        self.decay = decay
        average.every, average.buffers = every, engine._state.float_buffers() if buffers else ()
        for key in average.values.keys() - average.sources().keys():  # of a checkpoint, and not wanted here
            del average.values[key]
        average.restart(besides=average.values)

    @property
    def decay(self) -> float:
        """0 <= decay <= 1; may be set at any time, as for a warmup: `min(0.999, (1 + step) / (10 + step))`, or that of
        timm's ModelEmaV3, `min(0.999, 1 - (engine.global_step + 1) ** (-2 / 3))`."""
        assert self._average.decay is not None
        return self._average.decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise InputError(f"decay={decay} must be between 0 and 1: the part of the average that each update keeps")
        self._average.decay = float(decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A scope in which the model computes with the averaged weights, for evaluation. All ranks together.

        The weights are saved and restored bit for bit, at 4 bytes for each that this rank steps. In the scope
        `backward`, `step` and calls that save or load training raise InputError.
        """
        state, average, accumulation = self._engine._state, self._average, self._engine._accumulation
        self._engine._reject_if_closed()
        accumulation.reject_averaged("average.applied()")
        average.restart(besides=average.values)
        written = state.written()
        kept = [tensor.clone() for tensor in written]
        try:
            with torch.no_grad(), state.update.master_weights.joined():
                for key, source in average.sources().items():
                    source.copy_(average.values[key])
                state.publish()
            accumulation.averaged = True
            yield
        finally:
            accumulation.averaged = False
            with torch.no_grad():
                foreach_copy_(written, kept)
            state.publish(others=False)  # each rank restores its weights; after an error others may not call this

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the full model with the averaged weights, as `Engine.save_weights` does. All ranks together."""
        with self.applied():
            self._engine.save_weights(path, format=format, max_file_gb=max_file_gb)


def _lerp_(targets: list[torch.Tensor], sources: Sequence[torch.Tensor], weight: float | torch.Tensor) -> None:
    """targets += weight * (sources - targets), in the targets' dtype. A `weight` on a device is not read."""
    wide = [source.to(target.dtype) for source, target in zip(sources, targets, strict=True)]
    if isinstance(weight, float):
        torch._foreach_lerp_(targets, wide, weight)
        return
    differences = torch._foreach_sub(wide, targets)
    foreach_mul_(differences, weight)
    torch._foreach_add_(targets, differences)
