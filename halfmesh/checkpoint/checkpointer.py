"""Saving and loading what an engine holds: as a checkpoint of any layout, as values, as weights for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InputError
from ..log import get_logger
from . import rng, validate
from .attached import Attached, Stateful
from .lock import FolderLocks

if TYPE_CHECKING:
    from ..engine.parts import EngineParts
    from .automatic import PreemptionHook
    from .background import Background
    from .contents import Holding
    from .run import Run

_log = get_logger(__name__)


class Checkpointer:
    """Saves and loads for one engine.

    Attributes:
        preemption: what saves without being called, with the config key `checkpoint`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.preemption: PreemptionHook | None = None
        self._parts = parts
        self._attached = Attached()
        self.locks = FolderLocks()
        self._background: Background | None = None

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self, directory: Path, keep: int | None, in_background: bool) -> Path:
        """`Engine.save`."""
        # torch.distributed.checkpoint: only when there is something to save.
        from .background import Background
        from .run import save

        parts = self._parts
        parts.statistics.look()
        self.wait()
        if in_background and self._background is None:
            self._background = Background(parts.context)
        background = self._background if in_background else None
        with parts.guard.own_call():
            return save(self._run, directory, parts.global_step, keep, background)

    def wait(self) -> None:
        """Until nothing is being saved in the background; raises CheckpointError if that failed."""
        if self._background is not None:
            self._background.wait()

    def before_step(self) -> None:
        """Raise what a save in the background has failed with."""
        if self._background is not None:
            self._background.before_step()

    def load(self, directory: Path) -> Path:
        """`Engine.load`."""
        from .run import load

        parts = self._parts
        self.wait()
        with parts.guard.own_call():
            place, parts.global_step = load(self._run, directory)
        self._forget()
        return place

    def attach(self, name: str, holder: Stateful) -> None:
        """`Engine.attach`."""
        self._attached.attach(name, holder)

    def detach(self, name: str, keep: bool) -> None:
        """`Engine.detach`."""
        self._attached.detach(name, keep)

    def preempt(self) -> None:
        """`Engine.preempt`."""
        if self.preemption is None:
            raise InputError(
                "engine.preempt(): the config does not say where to save; set checkpoint='checkpoints', or call "
                "engine.save and end the loop yourself"
            )
        self.preemption.ask()

    def close(self) -> None:
        """Others may use the folders."""
        self.locks.release()

    # -- values ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`Engine.state_dict`."""
        parts = self._parts
        parts.lr.settle()
        with parts.guard.own_call():
            model, update = parts.model.state_dict(), parts.update.state_dict()
        return {
            "model": model,
            "update": update,
            "lr_scheduler": parts.lr.state_dict(),
            "global_step": parts.global_step,
            "dataloader": None if parts.dataloader is None else parts.dataloader.state_dict(),
            "random": rng.rank_random(parts.context, parts.division),
            "layout": self._layout,
            "attached": self._attached.state_dict(),
            "average": parts.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Engine.load_state_dict`."""
        parts = self._parts
        validate.refuse_unfit(state, len(parts.update.loss_scales.scalers))
        validate.refuse_other_part(state["layout"], self._layout)
        parts.accumulation.clear()
        parts.model.load_state_dict(state["model"])
        parts.update.load_state_dict(state["update"])
        parts.average.load_state_dict(state.get("average", {}))
        parts.lr.load_state_dict(state["lr_scheduler"])
        parts.global_step = state["global_step"]
        if parts.dataloader is not None and state["dataloader"] is not None:
            same_rank = state["random"]["rank"] == parts.context.rank
            note = parts.dataloader.load_state_dict(state["dataloader"], same_rank)
            if note is not None:
                _log.warning("%s", note)
        if parts.accumulation.reducer is not None:
            parts.accumulation.reducer.note_buffers()
        rng.set_rank_random(state["random"], parts.context, parts.division)
        for note in self._attached.load_state_dict(state.get("attached", {})):
            _log.info("%s", note)
        self._forget()

    def _forget(self) -> None:
        self._parts.results.clear()
        if self.preemption is not None:
            self.preemption.forget()

    @property
    def _layout(self) -> dict[str, int]:
        return validate.layout(self._parts.context, self._parts.division.cuts_updates)

    # -- weights -----------------------------------------------------------------------------------------------

    def save_weights(self, path: str | Path, format: Literal["safetensors", "torch"], max_file_gb: float) -> None:
        """`Engine.save_weights`."""
        from .weights import save_weights

        parts = self._parts
        parts.statistics.look()
        with parts.guard.own_call():
            save_weights(self.holding, parts.context, path, format, max_file_gb)

    def load_weights(self, path: Path) -> None:
        """`Engine.load_weights`."""
        from .weight_loading import load_weights

        parts = self._parts
        with parts.guard.own_call():
            load_weights(self.holding, parts.context, path)
        if parts.average.values:
            parts.average.begin_anew()
            _log.info("the average of the weights begins anew, with those of %s", path)
        if parts.accumulation.reducer is not None:
            parts.accumulation.reducer.note_buffers()

    @property
    def holding(self) -> Holding:
        """This rank's tensors under the whole model's names."""
        return self._run.holding

    @property
    def _run(self) -> Run:
        from .run import Run

        parts = self._parts
        holding = parts.model, parts.update, parts.division
        loop = parts.accumulation, parts.lr, parts.dataloader
        own = self._attached, self.locks, parts.average
        return Run(*holding, parts.context, parts.config, *loop, *own)
