"""The model with an average of its weights, for evaluation and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Literal

import torch

from ..utils.torch_private import foreach_copy_
from ..errors import InputError, show
from ..engine.parts import EngineParts
from .checkpointer import Checkpointer


class AveragedModel:
    """The model with an exponential moving average of its weights, as `Engine.averaged_model` gives it:

        average = engine.averaged_model(decay=0.999)
        ...  # train
        with average.applied():
            evaluate(engine)
        average.save_weights("average.safetensors")

    After each update that was taken, average = decay * average + (1 - decay) * weights, of the fp32 masters where there
    are any: 4 bytes for each weight that this rank steps. Buffers are not averaged. Checkpoints hold the average.
    """

    def __init__(self, parts: EngineParts, checkpointer: Checkpointer, decay: float) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._average = parts.average
        self.decay = decay

    @property
    def decay(self) -> float:
        """0 <= decay < 1; may be set at any time, as for a warmup: `min(0.999, (1 + step) / (10 + step))`."""
        assert self._average.decay is not None
        return self._average.decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if not isinstance(decay, Real) or isinstance(decay, bool) or not 0 <= decay < 1:
            raise InputError(
                f"decay={show(decay)} is not the share of the average that each update keeps; give 0 <= decay < 1"
            )
        self._average.decay = float(decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A scope in which the model computes with the averaged weights, for evaluation. All ranks together.

        The weights are saved and restored bit for bit, at 4 bytes for each that this rank steps. In the scope
        `backward`, `step` and what saves or loads training raise InputError.
        """
        parts, average = self._parts, self._average
        parts.refuse_if_closed()
        parts.accumulation.refuse_averaged("average.applied()")
        state = self._checkpointer.sharded_state
        average.begin_anew(besides=average.values)
        written = state.written()
        kept = [tensor.clone() for tensor in written]
        try:
            with torch.no_grad():
                for shard in state.update.master_weights.trained:
                    state.update.master_weights.target(shard).copy_(average.values[shard])
            state.publish()
            parts.accumulation.averaged = True
            yield
        finally:
            parts.accumulation.averaged = False
            with torch.no_grad():
                foreach_copy_(written, kept)
            state.publish(others=False)  # each rank restores its own; after an error others may not be here

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the whole model with the averaged weights, as `Engine.save_weights` does. All ranks together."""
        with self.applied():
            self._parts.context.agree_on_call("engine.save_weights")
            self._checkpointer.save_weights(path, format, max_file_gb)
