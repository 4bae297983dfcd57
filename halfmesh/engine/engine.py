"""The engine: the user's loop of forward, backward and step, in any precision and layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..amp.cast import Precision
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.result import StepResult
from ..errors import InputError
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import checkpoint, rank_random
from .cycle import GradientCycle, refuse_inside
from .dataloader import EngineDataLoader
from .passes import Passes
from .readings import Readings
from .scheduling import LRAdvance

if TYPE_CHECKING:
    from ..config import Config
    from ..division import Division
    from .checkpointing.run import Run

_log = get_logger(__name__)


class Engine(Readings):
    """What `halfmesh.initialize` returns. The loop is the same for every config:

        for images, labels in engine.dataloader:
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()

    Attributes:
        model: what this rank holds of the model, under the whole model's parameter names.
        optimizer: the user's optimizer. It steps through the engine only.
        dataloader, eval_dataloader: the loaders given, sharded over the data ranks, their batches on the device.
        lr_scheduler: the scheduler given; who advances it is `config.lr_interval`.
        context: the parallel layout.
        config: the config, as loaded.
        global_step: optimizer steps attempted so far, skipped ones included.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        update: MixedPrecisionOptimizer,
        precision: Precision,
        context: ParallelContext,
        passes: Passes,
        division: Division,
        cycle: GradientCycle,
        lr: LRAdvance,
        config: Config,
        dataloader: EngineDataLoader | None = None,
        eval_dataloader: EngineDataLoader | None = None,
    ) -> None:
        self.model = model
        self.context = context
        self.config = config
        self._dataloader = dataloader
        self._eval_dataloader = eval_dataloader
        self.global_step = 0
        self._criterion = criterion
        self._update = update
        self._precision = precision
        self._cycle = cycle
        self._lr = lr
        self._passes = passes
        self._division = division
        self._last: StepResult | None = None
        self._closed = False
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own would miss the model's gradients

    # -- the loop ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the config's precision.

        Under a pipeline, in training and with gradients, it is a handle: for `criterion`, and after `backward`, with
        `keep_outputs`, to be used like the output. All ranks of a pipeline call this with the same inputs.
        """
        if self._closed:
            self._refuse_if_closed()
        return self._passes.forward(*args, **kwargs)

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value for these arguments, in the config's precision.

        Of a handle it is one, too, to be used like the loss of the whole batch after `backward`, on every rank.
        """
        if self._criterion is None:
            raise InputError("no criterion was given to initialize; pass one, or compute the loss in the loop")
        return self._passes.criterion(self._criterion, *args, **kwargs)

    def backward(self, loss: Any, loss_id: int = 0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, a scalar tensor (or (sum, weight) with `loss_reduction="weighted"`).

        `step` frees the gradients that it uses, so a forgotten `zero_grad` does no harm. On the last microbatch of a
        cycle the gradients are reduced over the data ranks while backward runs. Under a pipeline all microbatches go
        forward and backward here.

        Args:
            loss_id: which of the `num_losses` losses this is (mode APEX); each has a loss scale of its own.

        Raises:
            InputError: not a scalar with a graph, or an unknown `loss_id`.
        """
        if self._closed:
            self._refuse_if_closed()
        self._cycle.add(loss, self._at_end, retain_graph, loss_id)
        if self._dataloader is not None:
            self._dataloader.note_training()

    def step(self, last: bool = False) -> StepResult | None:
        """Count one microbatch, and at the end of a cycle take one optimizer step.

        Args:
            last: end the cycle here, also without a new backward (leftover batches of a loader of your own, or an
                epoch that was left early; `engine.dataloader` knows its end).

        Returns:
            The step's result, or None inside an accumulation cycle.

        Raises:
            InputError: no backward since the last step.
            NonFiniteError: inf or nan, as `on_nonfinite` and `max_consecutive_skips` say.
        """
        if self._closed:
            self._refuse_if_closed()
        cycle = self._cycle
        if not cycle.fresh and not (last and cycle.begun):
            raise InputError("engine.step() was called before engine.backward(loss): there is nothing to step with")
        closes = last or cycle.is_last(self._at_end)
        cycle.count()
        if not closes:
            return None
        try:
            if self._lr.scheduler is not None:
                self._lr.settle()
            result = self._update.step(cycle.divisor())
        finally:
            cycle.end()
            if self._dataloader is not None:
                self._dataloader.at_end = False
        self._last = result
        self.global_step += 1
        if self._lr.scheduler is not None:
            self._lr.after(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing inside an accumulation cycle (`step(last=True)` ends one early).

        `set_to_none` is accepted because this stands in for `optimizer.zero_grad`; gradients are always freed.
        """
        if not self._cycle.begun:
            self._cycle.clear()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the config's `clip_grad_norm`.

        Returns:
            The norm of the unscaled gradients over all ranks before clipping (0-dim).

        Raises:
            InputError: inside an accumulation cycle, or before backward.
        """
        if not self._cycle.fresh:
            raise InputError("engine.clip_grad_norm_ was called before engine.backward(loss): there are no gradients")
        if not self._cycle.is_last(self._at_end):
            raise InputError(
                f"engine.clip_grad_norm_ was called on microbatch {self._cycle.position}, where gradients are "
                "incomplete; call it on the last one only, or set clip_grad_norm in the config"
            )
        return self._update.clip_grad_norm_(max_norm, self._cycle.divisor())

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode. No communication: the ranks' BatchNorm statistics are already equal."""
        return self.train(False)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in, for computations of your own; `enabled=False` leaves it again.

        Within a model `torch.autocast(device_type, enabled=False)` does the same.
        """
        return self._precision.autocast(enabled)

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for an exact resume in the same layout: of a divided model this
        rank's parts.

        The model's entry holds the fp32 masters where there are any, and the other weights in the dtype they came
        with; `engine.model.state_dict()` does, too. Tensors are not copied: save or copy them before the next step.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost.
        """
        refuse_inside(self._cycle, "engine.state_dict()")
        self._lr.settle()
        return {
            "model": self.model.state_dict(),
            "update": self._update.state_dict(),
            "lr_scheduler": self._lr.state_dict(),
            "global_step": self.global_step,
            "dataloader": None if self._dataloader is None else self._dataloader.state_dict(),
            "random": rank_random.rank_random(self.context, self._division),
            "layout": self._layout,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the batch after the last one that was trained on."""
        checkpoint.refuse_unfit(state, len(self._update.losses.scalers))
        checkpoint.refuse_other_part(state["layout"], self._layout)
        self._cycle.clear()
        self.model.load_state_dict(state["model"])
        self._update.load_state_dict(state["update"])
        self._lr.load_state_dict(state["lr_scheduler"])
        self.global_step = state["global_step"]
        if self._dataloader is not None and state["dataloader"] is not None:
            note = self._dataloader.load_state_dict(state["dataloader"], state["random"]["rank"] == self.context.rank)
            if note is not None:
                _log.warning("%s", note)
        if self._cycle.reducer is not None:
            self._cycle.reducer.note_buffers()
        rank_random.set_rank_random(state["random"], self.context, self._division)

    def save(self, directory: str | Path, *, keep: int | None = None) -> Path:
        """Write a checkpoint of everything, `directory/step-00001200`: complete, or not at all. All ranks together.

        It holds the tensors of the whole, undivided model, and can be loaded in any layout and precision.

        Args:
            directory: a folder that all ranks share; it is made if it is not there.
            keep: how many checkpoints to leave there, this one included; the oldest go. None: all.

        Returns:
            The checkpoint's folder.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost; or state that cannot be saved.
            CheckpointError: some rank could not write; raised on all ranks. Earlier checkpoints are intact.
        """
        if self._closed:
            self._refuse_if_closed()
        refuse_inside(self._cycle, "engine.save()")
        from .checkpointing.run import save  # torch.distributed.checkpoint: only when there is something to save

        return save(self._run, Path(directory), self.global_step, keep)

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
        if self._closed:
            self._refuse_if_closed()
        from .checkpointing.run import load

        place, self.global_step = load(self._run, Path(directory))
        return place

    def close(self) -> None:
        """Give model and optimizer back as they came, with the trained weights, and free what this engine made.

        A model that was fp32 is fp32 again, with the masters' values, and whole on every rank where its layers were
        divided (all ranks call this together); the optimizer holds its parameters again.
        """
        self._give_back()
        self.context.close()

    def _give_back(self, whole: bool = True) -> None:
        """Without `whole`, divided layers stay so: other ranks may be gone."""
        if self._closed:
            return
        if whole:
            self._division.follow()
        self._cycle.clear()
        self._closed = True
        self.optimizer.__dict__.pop("zero_grad", None)
        self._update.close()
        if self._cycle.reducer is not None:
            self._cycle.reducer.close()
        if whole:
            self._passes.close()
        self._division.close(whole)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # With an error in flight the process group stays: what reports the error to the other ranks goes with it.
        if kind is None:
            self.close()
        else:
            self._give_back(whole=False)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "initialize returns one Engine, not Colossal-AI's tuple: write `engine = initialize(...)` and use "
            "engine.dataloader, engine.eval_dataloader and engine.lr_scheduler"
        )

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def _at_end(self) -> bool:
        return self._dataloader is not None and self._dataloader.at_end

    @property
    def _run(self) -> Run:
        from .checkpointing.run import Run

        holding = self.model, self._update, self._division
        return Run(*holding, self.context, self.config, self._cycle, self._lr, self._dataloader)

    @property
    def _layout(self) -> dict[str, int]:
        return checkpoint.layout(self.context, self._division.cuts_updates)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InputError("this engine is closed; call the model itself, or make a new engine with initialize")
