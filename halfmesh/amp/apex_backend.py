"""`backend="apex"`: O0 to O3 by an installed apex.amp.

apex casts, scales, keeps the masters, unscales and decides what is skipped. halfmesh averages the gradients over the
data ranks before apex looks at them, clips, and counts.
"""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..shard import ParamShard, Ranks, set_grad
from .apex_private import Apex
from .backend import Backend
from .collected import Gradients
from .convert import named_tensors, take_back
from .holdings import Holdings
from .loss_scales import LossScales
from .optimizer import MixedPrecisionOptimizer
from .precision import Precision
from .recipe import Recipe
from .result import StepResult
from .rules import UpdateRules
from .state_hooks import watch_state

if TYPE_CHECKING:
    from .apex_options import ApexOptions

DEVICES = frozenset({"cuda"})

_SOURCE = (
    "build it from https://github.com/NVIDIA/apex at tag 25.05 or earlier (the package named apex on PyPI is another "
    "project)"
)
_live: weakref.ref[ApexOptimizer] | None = None


def find_problem(device: torch.device) -> str | None:
    """Why apex.amp cannot train on `device` in this process; None if it can."""
    problems = [_find_apex_problem()]
    if device.type not in DEVICES:
        problems.append(f"apex.amp takes CUDA tensors only, and the device is {device}; train on a GPU")
    if not torch.backends.cudnn.enabled:
        problems.append("apex.amp refuses torch.backends.cudnn.enabled=False; set it to True")
    if _live is not None and _live() is not None:
        gc.collect()  # an engine that was dropped without close() is freed only now
        if _live() is not None:
            problems.append("apex has one state per process, which another engine uses; close that one first")
    found = "; and ".join(filter(None, problems))
    return f"backend='apex': {found}; or use backend='native', which needs no apex" if found else None


def _find_apex_problem() -> str | None:
    try:
        apex = importlib.import_module("apex")
        amp = importlib.import_module("apex.amp")
    except Exception as error:  # whatever a broken build raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing == "apex":
            return f"NVIDIA's apex is not installed; {_SOURCE}"
        if missing != "apex.amp":
            return f"the installed apex cannot be imported ({type(error).__name__}: {error}); {_SOURCE}"
        amp = None
    if not hasattr(amp, "initialize"):
        where = getattr(apex, "__file__", None) or "a folder of that name"
        return f"the installed apex ({where}) has no amp, which NVIDIA removed in May 2025; {_SOURCE}"
    return None


class ApexPrecision(Precision):
    """Casts nothing, because apex does."""

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        update = None if _live is None else _live()
        return nullcontext() if enabled or update is None else update.apex.casts_off()

    def criterion(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        update = None if _live is None else _live()
        return (call if update is None else update.apex.patched(call))(*args, **kwargs)


class ApexOptimizer(MixedPrecisionOptimizer):
    """An update whose gradients apex unscales and judges. Its recipe holds what is left for halfmesh to do."""

    holdings: _ApexHoldings
    waits = True  # apex reads each verdict on the host
    replays = False  # apex keeps what it stashed

    def __init__(
        self,
        apex: Apex,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        ranks: Ranks | None,
        rules: UpdateRules | None,
    ) -> None:
        self.apex = apex
        super().__init__(optimizer, shards, recipe, ranks, rules, apex.masters())
        self.losses = _ApexScale(recipe, self.device, self.rules.wide_gradients)

    def backward(self, loss: torch.Tensor, divisor: float = 1.0, retain_graph: bool = False, loss_id: int = 0) -> None:
        self._begin()
        # Unscaled in `step` only: before the ranks' gradients are averaged, each would come to a verdict of its own.
        with self.apex.amp.scale_loss(loss.float() / divisor, self.optimizer, delay_unscale=True) as scaled:
            scaled.backward(retain_graph=retain_graph)

    def _hold(self, shards: Sequence[ParamShard], masters: Mapping[nn.Parameter, nn.Parameter] | None) -> Holdings:
        return _ApexHoldings(self.apex, self.optimizer, shards, self.recipe, self.rules)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, divisor: float | torch.Tensor = 1.0) -> torch.Tensor:
        with self.apex.casts_off():
            self._put_back()
            return super().clip_grad_norm_(max_norm, divisor)

    @torch.no_grad()
    def step(self, divisor: float | torch.Tensor = 1.0) -> StepResult:
        with self.apex.casts_off():
            self.check_gradients(divisor)  # before apex edits them
            if self.holdings.changed():
                self.holdings.refresh()
            self._put_back()
            max_norm, verdict = self._clip_once or (self.rules.max_norm, None)
            if verdict is None and (max_norm > 0 or self._asks):
                verdict = self._measure(self.gradients())
            raises = self.rules.on_nonfinite == "raise" and verdict is not None and bool(verdict.found_inf)
            skips = raises or self._unscale()
            if verdict is not None:
                if self.recipe.skips:
                    verdict = replace(verdict, found_inf=torch.full_like(verdict.found_inf, skips))
                self._clip_once = (max_norm, verdict)
            try:
                return super().step(divisor)
            finally:
                self._follow()

    def zero_grad(self, after_update: bool = False) -> None:
        super().zero_grad(after_update)
        for master in self.holdings.masters.values():
            master.grad = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # The native backend lowers max_scale for a loss in fp16; apex's stays as configured.
        super().load_state_dict({**state, "scalers": [s | {"max_scale": math.inf} for s in state["scalers"]]})
        if self.scaler is not None and self.recipe.skips:
            now = self.scaler.state_dict()
            scaler = {"loss_scale": now["scale"], "unskipped": now["growth_tracker"]}
            self.apex.amp.load_state_dict({"loss_scaler0": scaler})

    def _put_back(self) -> None:
        """Gradients that were added up or averaged in fp32 become the parameters' own: apex reads no others.

        What the rounding loses goes where apex adds earlier gradients up, unscaled: into the masters' gradients.
        """
        grads = self.gradients()
        self.apex.refuse_unknown(grads.layout.shards)
        for shard, grad in grads:
            half = grad.to(shard.param.dtype)
            set_grad(shard.param, half)
            master = self.holdings.masters.get(shard.param)
            if master is not None and grad.dtype != shard.param.dtype:
                rest = grad - half
                master.grad = rest if self.losses.scale is None else rest / self.losses.scale

    def _unscale(self) -> bool:
        """Let apex judge the gradients, unscale them and move its scale; returns whether it wants to skip."""
        step = self.optimizer.step
        with self.apex.amp.scale_loss(torch.zeros((), device=self.device), self.optimizer):
            pass  # no backward: what is done on leaving is all that is wanted
        skips = bool(self.optimizer.step != step)
        if skips:
            self.optimizer.step()  # apex's stand-in, which drops the masters' gradients and puts the real one back
        return skips

    def _apply(
        self,
        grads: Gradients,
        total: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        shards = grads.layout.shards
        grads.take()
        if found_inf is not None and bool(found_inf):
            return
        if total is not None and self.losses.scale is not None:
            total = total / self.losses.scale  # apex has divided by it
        self.stepper.step_part(shards, self.stepper.folds, None if total is None or total.item() == 1 else total, None)
        self.holdings.note_published()  # by apex

    def _follow(self) -> None:
        """Take over the loss scale that apex has come to."""
        if self.scaler is not None and self.recipe.skips:
            state = self.apex.amp.state_dict()["loss_scaler0"]
            now = {"scale": state["loss_scale"], "growth_tracker": state["unskipped"], "max_scale": math.inf}
            self.scaler.load_state_dict(self.scaler.state_dict() | now)


class _ApexHoldings(Holdings):
    """Its masters are apex's, those that `add_param_group` makes included."""

    streams = False

    def __init__(self, apex: Apex, *args: Any) -> None:
        self._apex = apex
        super().__init__(*args)

    def refresh(self) -> None:
        self.take_over({param: master for param, master in self._apex.masters().items() if param not in self.masters})
        super().refresh()


class _ApexScale(LossScales):
    """A copy of apex's loss scale."""

    def cap(self, loss_id: int, shards: Sequence[ParamShard]) -> None:
        """apex has no cap: a dynamic scale that is too large for a loss in fp16 overflows, and falls by itself."""
        if self.first is not None and not self.first.options.dynamic:
            super().cap(loss_id, shards)


class ApexBackend(Backend):
    """apex.amp, with the options of a config."""

    precision = ApexPrecision

    def __init__(self, options: ApexOptions) -> None:
        self._options = options

    def find_problem(self, device: torch.device) -> str | None:
        return find_problem(device)

    def convert(  # not static: it needs the options
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        ranks: Ranks | None = None,
        rules: UpdateRules | None = None,
        device: torch.device | None = None,
    ) -> ApexOptimizer:
        """Let apex take over `model` and `optimizer`, in place; `close` of what is returned undoes it."""
        global _live
        dtypes = {name: tensor.dtype for name, tensor in named_tensors(model)}
        apex = Apex(self._options, model, optimizer)
        try:
            with apex.casts_off():
                runs = Recipe(loss_scale=recipe.loss_scale, wide_gradients=recipe.wide_gradients)
                update = ApexOptimizer(apex, optimizer, shards, runs, ranks, rules)
        except BaseException:
            apex.restore()
            raise
        changed = {tensor: dtypes[name] for name, tensor in named_tensors(model) if tensor.dtype != dtypes[name]}
        hooks = list(watch_state(model, update.holdings, changed))

        def give_back() -> None:
            global _live
            _live = None
            apex.restore()
            take_back(model, update, dtypes, hooks)

        update.on_close = give_back
        _live = weakref.ref(update)
        return update
