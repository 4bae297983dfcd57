"""The engine's half that saves and loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.statistics import StatisticsCheck
from ..amp.step_result import StepResult
from ..checkpoint.attached import Attached, Stateful
from ..checkpoint.lock import FolderLocks
from ..data import rank_random
from ..data.dataloader import EngineDataLoader
from ..errors import InputError
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import checkpoint
from .accumulation import Accumulation
from .average import WeightAverage
from .averaged_model import AveragedModel
from .model_guard import ModelGuard
from .scheduling import LRAdvance

if TYPE_CHECKING:
    from ..checkpoint.automatic import Automatic
    from ..checkpoint.background import Background
    from ..checkpoint.run import Run
    from ..config import Config
    from ..division import Division

_log = get_logger(__name__)


class Saving:
    """State as values (`state_dict`), as a checkpoint of any layout (`save`), and as weights for other programs."""

    model: nn.Module
    context: ParallelContext
    config: Config
    global_step: int
    _update: MixedPrecisionOptimizer
    _accumulation: Accumulation
    _lr: LRAdvance
    _dataloader: EngineDataLoader | None
    _division: Division
    _closed: bool
    _results: deque[StepResult]
    _background: Background | None
    """Since the first save that did not hold up training."""
    _automatic: Automatic | None
    """With the config key `checkpoint`."""
    _attached: Attached
    _locks: FolderLocks
    _statistics: StatisticsCheck
    _average: WeightAverage
    _guard: ModelGuard

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for an exact resume in the same layout: of a divided model this
        rank's parts.

        The model's entry holds the fp32 masters where there are any, and the other weights in the dtype they came
        with; `engine.model.state_dict()` does, too. Tensors are not copied: save or copy them before the next step.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost.
        """
        self._accumulation.refuse_unfinished("engine.state_dict()")
        self._lr.settle()
        with self._guard.own_call():
            model, update = self.model.state_dict(), self._update.state_dict()
        return {
            "model": model,
            "update": update,
            "lr_scheduler": self._lr.state_dict(),
            "global_step": self.global_step,
            "dataloader": None if self._dataloader is None else self._dataloader.state_dict(),
            "random": rank_random.rank_random(self.context, self._division),
            "layout": self._layout,
            "attached": self._attached.state_dict(),
            "average": self._average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the batch after the last one that was trained on."""
        self._accumulation.refuse_averaged("engine.load_state_dict()")
        checkpoint.refuse_unfit(state, len(self._update.loss_scales.scalers))
        checkpoint.refuse_other_part(state["layout"], self._layout)
        self._accumulation.clear()
        self.model.load_state_dict(state["model"])
        self._update.load_state_dict(state["update"])
        self._average.load_state_dict(state.get("average", {}))
        self._lr.load_state_dict(state["lr_scheduler"])
        self.global_step = state["global_step"]
        self._results.clear()
        if self._dataloader is not None and state["dataloader"] is not None:
            note = self._dataloader.load_state_dict(state["dataloader"], state["random"]["rank"] == self.context.rank)
            if note is not None:
                _log.warning("%s", note)
        if self._accumulation.reducer is not None:
            self._accumulation.reducer.note_buffers()
        rank_random.set_rank_random(state["random"], self.context, self._division)
        for note in self._attached.load_state_dict(state.get("attached", {})):
            _log.info("%s", note)
        if self._automatic is not None:
            self._automatic.forget()

    def save(self, directory: str | Path, *, keep: int | None = None, in_background: bool = False) -> Path:
        """Write a checkpoint of everything, `directory/step-00001200`: complete, or not at all. All ranks together.

        It holds the tensors of the whole, undivided model, and can be loaded in any layout and precision.

        Args:
            directory: a folder that all ranks share; it is made if it is not there.
            keep: how many checkpoints to leave there, this one included; the oldest go. None: all.
            in_background: return as soon as the state is copied to the host, and write it while training goes on. The
                copy takes as much memory as what is saved of this rank, and is kept for the next save. The next save,
                `load`, `close`, `wait_for_save` and the end of the process wait until it is written.

        Returns:
            The checkpoint's folder. With `in_background` it is there when it is complete.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost; or state that cannot be saved.
            CheckpointError: some rank could not write; raised on all ranks. Earlier checkpoints are intact. In the
                background it is raised by the next `step` on all ranks, or by what waits before that.
        """
        self._refuse_if_closed()
        self._accumulation.refuse_unfinished("engine.save()")
        self._statistics.look()
        self.context.agree_on_call("engine.save")
        # torch.distributed.checkpoint: only when there is something to save.
        from ..checkpoint.background import Background
        from ..checkpoint.run import save

        self.wait_for_save()
        if in_background and self._background is None:
            self._background = Background(self.context)
        background = self._background if in_background else None
        with self._guard.own_call():
            return save(self._run, Path(directory), self.global_step, keep, background)

    def wait_for_save(self) -> None:
        """Return when what `save(in_background=True)` began is complete, at once if there is nothing.

        Raises:
            CheckpointError: it failed; raised on all ranks, which call this together.
        """
        if self._background is not None:
            self._background.wait()

    def load(self, directory: str | Path) -> Path:
        """Go on from a checkpoint of `save`, in this engine's layout and precision. All ranks together.

        In the layout in which it was saved, training goes on exactly as it would have, with the batch after the last
        one that was trained on.

        Args:
            directory: what was given to `save`, of which the newest complete checkpoint is taken, or a checkpoint.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it was damaged or changed since it was written.
            InputError: it is of another model or optimizer. Nothing has changed then.
        """
        self._refuse_if_closed()
        self._accumulation.refuse_averaged("engine.load()")
        self.context.agree_on_call("engine.load")
        from ..checkpoint.run import load

        self.wait_for_save()
        with self._guard.own_call():
            place, self.global_step = load(self._run, Path(directory))
        self._results.clear()
        if self._automatic is not None:
            self._automatic.forget()
        return place

    def attach(self, name: str, holder: Stateful) -> None:
        """Save the state of `holder` with the engine's, whoever saves: counters of the loop, for example.

        `holder.state_dict()` is called on each rank by every save, and must not talk to other ranks. A load gives each
        rank its own back by `holder.load_state_dict(state)`, in another layout all ranks that of rank 0. What was
        loaded before this call is given at once.

        Args:
            name: by which it is found in a checkpoint.

        Raises:
            InputError: the name is taken, or `holder` lacks one of the two methods.
        """
        self._refuse_if_closed()
        self._attached.attach(name, holder)

    def detach(self, name: str, *, keep: bool = True) -> None:
        """Let go of what `attach` was given.

        Args:
            keep: its last state goes on being saved, and is given to what is attached by that name next.

        Raises:
            InputError: there is nothing of that name.
        """
        self._attached.detach(name, keep)

    def preempt(self) -> None:
        """Tell the run to end, as the config's `checkpoint.signals` do, on any rank: after the current step all ranks
        save, and raise `Preempted`, which ends the process with status 75. May be called by a handler of signals.

        Raises:
            InputError: the config has no `checkpoint`.
        """
        self._refuse_if_closed()
        if self._automatic is None:
            raise InputError(
                "engine.preempt(): the config does not say where to save; set checkpoint='checkpoints', or call "
                "engine.save and end the loop yourself"
            )
        self._automatic.ask()

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the whole model's weights, in full precision, under the names that they have without halfmesh. All
        ranks together; rank 0 writes, and has no more than one file in memory.

        Args:
            path: the file. What is larger than `max_file_gb` goes into several, with an index, as Hugging Face names
                them: model-00001-of-00002.safetensors, model.safetensors.index.json.
            format: "torch" is what `torch.save(model.state_dict(), path)` writes. A path that ends with .safetensors,
                .pt, .pth or .bin has to fit it.

        Raises:
            CheckpointError: it could not be written. InputError: an argument is wrong.
        """
        self._refuse_if_closed()
        self._statistics.look()
        self.context.agree_on_call("engine.save_weights")
        from ..checkpoint.weights import save_weights

        with self._guard.own_call():
            save_weights(self._run.holding, self.context, path, format, max_file_gb)

    def load_weights(self, path: str | Path) -> None:
        """Take the model's weights, and masters, from a file of `save_weights`, or of another program that has the same
        names; each rank reads its part. The optimizer's state stays as it is. All ranks together.

        Raises:
            CheckpointError: it cannot be read. InputError: names, shapes or kinds of numbers differ (floating point,
                complex, integer, bool; formats of one kind are cast). Nothing has changed then.
        """
        self._refuse_if_closed()
        self._accumulation.refuse_unfinished("engine.load_weights()")
        self.context.agree_on_call("engine.load_weights")
        from ..checkpoint.weight_loading import load_weights

        with self._guard.own_call():
            load_weights(self._run.holding, self.context, Path(path))
        if self._average.values:
            self._average.begin_anew()
            _log.info("the average of the weights begins anew, with those of %s", path)
        if self._accumulation.reducer is not None:
            self._accumulation.reducer.note_buffers()

    def averaged_model(self, decay: float) -> AveragedModel:
        """Begin an exponential moving average (EMA) of the weights. All ranks call this.

        It begins with the weights as they are now; after a load of a checkpoint that has an average, with that.
        `load` and `load_weights` of what has none begin it anew, with the loaded weights.

        Args:
            decay: how much of the average each update keeps: 0.999, or 0.9999 for long runs.

        Raises:
            InputError: `decay` is not within 0 <= decay < 1, or this engine has an average.
        """
        self._refuse_if_closed()
        self._accumulation.refuse_averaged("engine.averaged_model()")
        average = self._average
        if average.decay is not None:
            raise InputError(
                f"engine.averaged_model({decay}): this engine averages its weights already, with decay="
                f"{average.decay}; use what the first call returned, and set its decay to change that"
            )
        model = AveragedModel(self, average, decay)
        average.begin_anew(besides=average.values)
        return model

    def _end_automatic_saves(self, failed: bool = False) -> None:
        automatic, self._automatic = self._automatic, None
        if automatic is not None:
            if self._dataloader is not None:
                self._dataloader.before_fetch = None
            automatic.close(failed)

    @property
    def _run(self) -> Run:
        from ..checkpoint.run import Run

        holding = self.model, self._update, self._division
        loop = self._accumulation, self._lr, self._dataloader
        own = self._attached, self._locks, self._average
        return Run(*holding, self.context, self.config, *loop, *own)

    @property
    def _layout(self) -> dict[str, int]:
        return checkpoint.layout(self.context, self._division.cuts_updates)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InputError("this engine is closed; call the model itself, or make a new engine with initialize")
