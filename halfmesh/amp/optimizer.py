"""The one path from complete local gradients to new weights, for every mode and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from .. import torch_private
from ..errors import InputError
from ..shard import OneRank, ParamShard, Ranks, clear_grads
from .collected import Gradients
from .gradient_watch import IN_PARTS, UNDIVIDED, GradientWatch
from .holdings import Holdings
from .loss_scaler import LossScaler
from .loss_scales import LossScales
from .recipe import HALF, Recipe
from .result import StepResult
from .rules import UpdateRules
from .skips import SkipWatch
from .stepper import Stepper
from .verdict import Verdict, measure


class MixedPrecisionOptimizer:
    """Steps the user's optimizer from scaled gradients.

    The user's optimizer stays the one that steps: its groups are re-pointed in place to fp32 masters where the
    recipe keeps them, so schedulers built on it keep working. It refuses to step outside `step` below.

    One `step`: gradients -> one pass for norm and verdict -> one all-reduce of it -> unscale and clip as one divisor
    -> step or skip -> masters published to the model -> loss scale updated. With a fused SGD, Adam, AdamW or Adagrad
    nothing in it is read on the host; another optimizer under a loss scale reads one number.

    Args:
        optimizer: over parameters of `shards` only.
        shards: every parameter that this rank holds, cast to the recipe's dtype.
        recipe: the precision mode.
        ranks: the ranks that take this update together.
        rules: clipping and what to do about inf and nan.
        masters: fp32 masters made before the cast; others are made from the parameters as they are.
        device: where updates are decided: by default that of the parameters, of which there may be none, or some
            elsewhere.

    Raises:
        InputError: the optimizer holds parameters that are not in `shards`.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        ranks: Ranks | None = None,
        rules: UpdateRules | None = None,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.recipe = recipe
        self.rules = rules or UpdateRules()
        self.holdings = Holdings(optimizer, shards, recipe, self.rules, masters)
        self.stepper = Stepper(self.holdings)
        self.device = shards[0].param.device if device is None else device
        self.losses = LossScales(recipe, self.device, self.rules.wide_gradients, self.rules.name)
        self.watch = SkipWatch(self.rules.max_consecutive_skips, self.device)
        self.skips = recipe.skips if self.rules.on_nonfinite == "auto" else self.rules.on_nonfinite == "skip"
        """Whether an update with inf or nan is skipped."""
        self.found_inf: torch.Tensor | None = None
        """1.0 if the last update was skipped, else 0.0 (0-dim fp32, unread by the host); None: it could not be."""
        self._asks = _asks(recipe, self.rules)
        self._ranks = ranks or OneRank()
        self._clip_once: tuple[float, Verdict | None] | None = None
        self._begun = False  # an update has gradients
        self._used: list[torch.Tensor] = []
        self._gradient_watch = GradientWatch(self.losses.scale is not None)
        self.on_close: Callable[[], None] | None = None
        """Undoes what was done to make this, in `close`."""

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of loss 0, if gradients are scaled."""
        return self.losses.first

    def backward(self, loss: torch.Tensor, divisor: float = 1.0, retain_graph: bool = False, loss_id: int = 0) -> None:
        """Run backward from a scalar `loss`, with its loss scale / `divisor` as the seed."""
        self._begin()
        if loss.dtype in HALF:
            loss = loss.float()  # a scaled seed does not fit into half precision
        seed = self.losses.seed(loss, loss_id, divisor)
        torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        self._collected(loss_id)

    def scaled(self, loss: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        """`loss` (of loss_id 0) x its loss scale / `divisor`, for a backward that others run, within `collecting`."""
        loss = loss.float() if loss.dtype in HALF else loss
        seed = self.losses.seed(loss.detach(), 0, divisor)
        return loss if seed is None else loss * seed

    @contextmanager
    def collecting(self, loss_id: int = 0) -> Iterator[None]:
        """A scope in which backward runs; what it leaves in the parameters are gradients of `loss_id`."""
        self._begin()
        yield
        self._collected(loss_id)

    def tell_of_parts(self) -> None:
        """The gradients of this rank are a part of the model's."""
        self._gradient_watch.why = IN_PARTS

    def tell_of_divisors(self) -> None:
        """Some updates have a divisor of their own."""
        self._gradient_watch.why = self._gradient_watch.why or UNDIVIDED

    def begin_backward(self) -> None:
        """Before all that a backward does: take in new parameters, and look at gradients that others made or changed.

        Raises:
            InputError: others left gradients, which the update would divide by the loss scale.
        """
        if self.holdings.regrouped:
            self.take_in_new()
        if self._begun:
            self._gradient_watch.check(None)
        else:
            self._gradient_watch.check_empty(self.holdings.receivers)

    def note_gradients(self) -> None:
        """A backward is over. What others change of the gradients from now on is told, if it is a mistake."""
        self._gradient_watch.note(self.holdings.trained, self.holdings.receivers)

    def check_gradients(self, divisor: float | torch.Tensor) -> None:
        """Before the gradients are completed or used: tell what others changed of them."""
        self._gradient_watch.check(divisor)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, divisor: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the rules' own. Returns the norm before clipping (0-dim)."""
        if not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise InputError(f"max_norm must be greater than 0, but {max_norm!r} was given; omit the call to not clip")
        verdict = self._measure(self.gradients())
        self._clip_once = (float(max_norm), verdict)
        _, total = self._scale(divisor)
        return verdict.norm if total is None else verdict.norm / total

    def step(self, divisor: float | torch.Tensor = 1.0) -> StepResult:
        """Take one update from the gradients collected since the last one.

        Nothing in it depends on what the host knows of device values, and all state moves in place: on a GPU it can
        be captured in a CUDA graph (after a first update; with a fused optimizer whose lr is a tensor if it changes).

        Args:
            divisor: the gradients are divided by it (and by the loss scale).

        Raises:
            NonFiniteError: inf or nan, as `rules` say.
        """
        had_gradients = torch.is_grad_enabled()
        torch_private.set_grad_enabled(False)  # `torch.no_grad()` takes four times the calls
        try:
            return self._step(divisor)
        finally:
            torch_private.set_grad_enabled(had_gradients)

    def _step(self, divisor: float | torch.Tensor) -> StepResult:
        holdings, rules = self.holdings, self.rules
        self._gradient_watch.check(divisor)
        if holdings.changed():
            self.take_in_new()
            holdings.refresh()
        if holdings.masters:
            holdings.take_edits()
        grads = holdings.collect()
        used = grads.tensors  # this list is emptied where they are freed as it goes
        if grads.layout.is_sparse:
            holdings.unfuse_for_sparse()
        if holdings.seeded:
            holdings.note_used(grads.layout.shards)
        max_norm, verdict = self._clip_once or (rules.max_norm, None)
        self._clip_once = None
        asked_for = max_norm > 0 or self._asks
        if verdict is None and (asked_for or (not holdings.sparse and self.watch.wants_a_look())):
            grads = grads if grads.layout.fits else self.stepper.convert(grads)
            verdict = self._measure(grads)
        if verdict is not None:
            self.watch.judge(verdict, grads, self.skips, rules.on_nonfinite == "raise", self.losses.scalers)
        scale, total = self._scale(divisor)
        found_inf = verdict.found_inf if verdict is not None and self.skips else None
        self.found_inf = found_inf
        result = StepResult(
            _first_lr(self.optimizer),
            self.device,
            skipped=found_inf,
            norm=verdict.norm if verdict is not None and asked_for else None,
            total=total,
            scale=scale,
            num_zeros=None if verdict is None else verdict.num_zeros,
        )
        if verdict is not None and max_norm > 0:
            total = _clipped(total, verdict.norm, max_norm)
        try:
            self._apply(grads, None if total is None else total.float(), found_inf)
        finally:  # all ranks move the scale alike, also one on which a hook fails
            if verdict is not None:
                self.losses.update(verdict)
            self._begun = False
        self._used = used if self.device.type == "cpu" else []
        return result

    def zero_grad(self, after_update: bool = False) -> None:
        """Forget the gradients of all parameters that the optimizer holds; of those that were put into it since the
        last update or backward, the next backward does.

        On the CPU the memory of those that an update has used is kept beyond `after_update`, until the next call or
        backward, as in a loop by hand: given back now, malloc hands it to the system, and takes it again page by page
        (a tenth of the step of a small ViT).
        """
        if not after_update:
            self._used = []
        self._clip_once = None
        if self.losses.several:
            self.losses.forget()
        self._begun = False
        self._gradient_watch.forget()
        clear_grads(self.holdings.with_grads)

    def take_in_new(self) -> None:
        """Take in parameters that were put into the optimizer. What earlier backwards left in them does not count.

        Raises:
            InputError: gradients of this update are there already; theirs would be scaled otherwise, or not reduced.
        """
        if not self.holdings.regrouped:
            return
        if self._begun:
            raise InputError(
                "parameters were added to the optimizer, or exchanged, between backward and step, where gradients are "
                "only half done; do that before the first backward of an update, or after its step"
            )
        known = {id(shard) for shard in self.holdings.trained}
        self.holdings.refresh()
        clear_grads([shard.param for shard in self.holdings.trained if id(shard) not in known])

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state, masters by parameter name, loss scalers and counters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": self.holdings.masters_by_name(),
            "scalers": self.losses.state_dict(),
            "skips": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Copies masters into the model's parameters too."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.holdings.adopt(state["masters"])
        self.losses.load_state_dict(state["scalers"])
        self.watch.load_state_dict(state["skips"])

    def close(self) -> None:
        """Give model and optimizer back: the optimizer may step by itself again."""
        if self.on_close is not None:
            self.on_close()
        self.stepper.close()
        self.holdings.close()

    # -- parts of a step ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Before a backward."""
        if self._clip_once is not None:
            self._clip_once = (self._clip_once[0], None)  # what was measured is no longer all
        self._used = []
        if self.losses.several or self.losses.wide_sums:
            self.losses.prepare(self.holdings.receivers)
        self._begun = True

    def _collected(self, loss_id: int) -> None:
        """After a backward."""
        if self.losses.several:
            self.losses.collect(loss_id, self.holdings.receivers)

    def gradients(self) -> Gradients:
        """What a step would use now: the shards that have gradients on this rank, with these."""
        return self.holdings.collect()

    def _measure(self, grads: Gradients) -> Verdict:
        by_loss = self.losses.by_loss() if self.losses.several else None
        return measure(grads, self._ranks, self.device, self.rules.norm_type, self.recipe.count_zeros, by_loss)

    def _scale(self, divisor: float | torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss scale now, and what the gradients are too large by; None where that is 1. 0-dim float64."""
        losses = self.losses
        scale = None if losses.first is None else losses.first.scale.double()  # a copy: the scale moves in place
        kept = None if losses.scale is None else scale
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(self.device, torch.float64)
            return scale, divisor if kept is None else kept * divisor
        if divisor == 1:
            return scale, kept
        if kept is not None:
            return scale, kept * divisor
        return scale, torch.full((), divisor, dtype=torch.float64, device=self.device)

    def _apply(self, grads: Gradients, total: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Divide by `total` (fp32) and step, unless `found_inf` is set. Empties `grads`, to free them as it goes."""
        self.stepper.take(grads, total, found_inf)


def _asks(recipe: Recipe, rules: UpdateRules) -> bool:
    """Whether every update needs a verdict, also one that is not clipped."""
    return recipe.skips or rules.track_grad_norm or rules.on_nonfinite != "auto" or recipe.count_zeros


def _clipped(total: torch.Tensor | None, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of norm `norm`, too large by `total`, have to be divided by to have `max_norm` at most.

    That is `total` / min(1, max_norm / (norm / total + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it.
    """
    if total is None:
        return ((norm + 1e-6) / max_norm).clamp_(min=1)
    return torch.maximum(total, norm.add(total, alpha=1e-6).div_(max_norm))


def _first_lr(optimizer: optim.Optimizer) -> float | torch.Tensor:
    lr = optimizer.param_groups[0].get("lr", math.nan)  # a third party's optimizer may have none
    return lr.clone() if isinstance(lr, torch.Tensor) else lr
