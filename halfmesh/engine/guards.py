"""Mistakes in a loop or on one rank that would train silently otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import Recipe
from ..amp.step_result import StepResult, is_captured
from ..errors import InputError, shorten
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import ADVICE, differ, is_checked, norms, same_on_ranks, same_trained
from ..parallel.reducer import Reduction
from ..utils.engine_hook import EngineHook
from ..utils.log import get_logger
from ..utils.tensors import dtype_name, tensors_of
from ..utils.torch_private import grad_hooks, versions
from .parallelize import ParallelModel

if TYPE_CHECKING:
    from ..checkpoint.state import ShardedState
    from ..data.loader import EngineDataLoader


_log = get_logger(__name__)

_SCALED = "where they are still multiplied by the loss scale"
_UNDIVIDED = (
    "where they still have to be divided: a cycle of fewer batches than gradient_accumulation, or weighted losses, get "
    "their own divisor in the step"
)
_SHARDED = "where each rank has its shards of them only, so that a norm over them is not the model's"

_STRAY = (
    "%s already have gradients before the first engine.backward of an update. A direct loss.backward(), or another "
    "engine, left them there. %s. Call engine.zero_grad() first; and for every loss that trains these parameters call "
    "engine.backward(loss)"
)
_CHANGED = (
    "gradients were changed between engine.backward and engine.step (of %s), %s; to clip them use clip_grad_norm in "
    "the config, or engine.clip_grad_norm_(max_norm), and in place of loss.backward() call engine.backward(loss)"
)
_VANISHED = (
    "the gradients that engine.backward left for this update are gone: zero_grad() of the model or the optimizer was "
    "called before the step. Call engine.zero_grad() (or that of the optimizer which convert_to_amp returned): within "
    "an accumulation cycle it does nothing, and outside it drops the batch"
)
_HOOKED = (
    "hooks on %s run in backward, where gradients are multiplied by the loss scale: a clamp, clip or noise in a "
    "hook has another effect than in fp32, and a norm is too large by the scale. Use bf16, which has no loss scale; "
    "clip with clip_grad_norm in the config; or multiply the bounds (or the noise) in the hook by engine.loss_scale"
)
_LOOKS = 3
"""The first updates with finite gradients, in which writes through `grad.data` are seen, too, which torch does not
count."""


class GradientGuard:
    """Gradients that somebody else than `engine.backward` made, changed or dropped: refused, or told once, where the
    update would use them wrongly. (Where nothing scales, divides or shards them they may be changed.)

    Args:
        sharded: this rank has shards of the gradients.
        has_divisor: the step may divide gradients by something else than the loss scale.
    """

    def __init__(
        self, update: MixedPrecisionOptimizer, model: nn.Module, sharded: bool = False, has_divisor: bool = False
    ) -> None:
        self._masters = update.master_weights
        self._update = update
        scales = update.loss_scales
        self._is_scaled = scales.scales and scales.multi is None
        self._why = _SHARDED if sharded else _SCALED if self._is_scaled else _UNDIVIDED if has_divisor else None
        self._searched = model if scales.scales else None  # for hooks, once
        self._looks = _LOOKS
        self._told: set[str] = set()
        self._noted: list[tuple[torch.Tensor | None, tuple[int, int]]] = []  # what the last backward left, with stamps

    def before_backward(self) -> None:
        """Look for hooks on scaled gradients, for gradients of another backward, and for changes since the last one.

        Raises:
            InputError: there are gradients of another backward, which the update would divide by the loss scale; or
                those of this cycle are gone.
        """
        if (model := self._searched) is not None:
            self._searched = None
            modules = ((name or "the model", module) for name, module in model.named_modules())
            names = [name for name, x in (*model.named_parameters(), *modules) if any(map(_is_users, grad_hooks(x)))]
            if names:
                self._tell(_HOOKED, shorten(names))
        if self._update.has_gradients:
            self.check()
        elif strays := [shard.name for shard in self._masters.receivers if shard.param.grad is not None]:
            if self._is_scaled:
                raise InputError(_STRAY % (shorten(strays), "The update would divide them by the loss scale"))
            self._tell(_STRAY, shorten(strays), "They count in this update as they are")

    def after_backward(self) -> None:
        """Note the gradients, after the reduction if this was the last backward."""
        grads = [shard.param.grad for shard in self._masters.receivers]
        self._noted = list(zip(grads, self._stamps(grads), strict=True))

    def forget(self) -> None:
        """Forget the gradients: they were used or cleared."""
        self._noted = []

    def check(self, divisor: float | torch.Tensor | None = None) -> None:
        """Tell of gradients that were changed since `after_backward`, and take shards of them again.

        Args:
            divisor: the step that follows divides them by it, besides the loss scale; None: a backward follows.

        Raises:
            InputError: all of them are gone.
        """
        noted = self._noted
        if not noted:
            return
        shards, now = self._masters.trained, [shard.param.grad for shard in self._masters.receivers]
        if all(grad is None for grad in now) and any(grad is not None for grad, _ in noted):
            raise InputError(_VANISHED)
        names, self._noted = [], []
        for shard, (old, old_stamp), new, stamp in zip(shards, noted, now, self._stamps(now), strict=True):
            if new is old and stamp == old_stamp:
                continue
            if new is not None:
                names.append(shard.name)
            is_reduced = shard.param.grad is not None or old is None  # else the written gradient is still to be summed
            if shard.source is not None and is_reduced and (new is not old or stamp[0] != old_stamp[0]):
                shard.rebind_grad()
        if divisor is not None and self._looks and self._watches_bits:
            self._looks -= all(bool(own.isfinite().all()) for own in _elements(now) if own is not None)
        is_divided = isinstance(divisor, torch.Tensor) or divisor not in (None, 1)
        if names and self._why is not None and (self._why is not _UNDIVIDED or is_divided):
            self._tell(_CHANGED, shorten(names), self._why)

    def _stamps(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[int, int]]:
        """The versions of `grads` and, in the first updates, sums of their bits (for which the host waits)."""
        looks = self._looks > 0 and self._watches_bits
        return list(zip(versions(grads), _sum_bits(grads) if looks else [0] * len(grads), strict=True))

    @property
    def _watches_bits(self) -> bool:
        return self._why is not None and not is_captured(self._update.device)

    def _tell(self, text: str, *details: str) -> None:
        if text not in self._told:
            self._told.add(text)
            ranks = None if self._why is _SHARDED else (0,)  # shards of different parameters
            _log.warning(text, *details, ranks=ranks)


def _elements(grads: Sequence[Any]) -> list[torch.Tensor | None]:
    """This rank's elements of each gradient; None for placeholders and tensors without memory."""
    own = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return [
        x.detach() if type(x) is torch.Tensor and x.layout is torch.strided and x.is_floating_point() else None
        for x in own
    ]


def _sum_bits(grads: Sequence[Any]) -> list[int]:
    """The sum of each gradient's elements, each taken for an integer: of inf and nan, too, and without rounding."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [
        0 if own is None else int(own.view(integers[own.itemsize]).sum(dtype=torch.int64)) for own in _elements(grads)
    ]


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith(("halfmesh.", "torch.distributed."))


class SameTrained:
    """Follows which parameters are trained, and refuses changes of `requires_grad` that are not the same on the ranks
    of a pipeline stage, which hold the same parameters or shards of them. All ranks of `context` make this together.
    """

    def __init__(self, update: MixedPrecisionOptimizer, context: ParallelContext) -> None:
        self._update = update
        self._context = context
        self._trained: list[tuple[int, bool]] | None = self._find()
        self._is_alone = len(context.stage_ranks) == 1
        if len(context.stage_ranks) < context.size and not self._is_alone:
            _ = context.stage_group  # now: later each stage compares when something has changed there

    def _find(self) -> list[tuple[int, bool]]:
        """The id of each trained shard, and True if its parameter requires gradients now."""
        masters = self._update.master_weights
        return [(id(s), r.param.requires_grad) for s, r in zip(masters.trained, masters.receivers, strict=True)]

    def follow(self, reducer: Reduction) -> None:
        """Before a backward: pass the trained parameters to `reducer`, if some were added, frozen or unfrozen.

        Raises:
            InputError: they changed differently on another rank; or not at all there, which is found when the time
                limit of collectives has passed.
        """
        trained, masters = self._find(), self._update.master_weights
        if trained == self._trained:
            return
        taking = {shard for shard, takes in trained if takes}
        self._compare([s.name for s in masters.shards], bytes(id(s) in taking for s in masters.shards))
        reducer.set_params(masters.trained)
        # A parameter that is frozen within a cycle takes part until its end: the next backward covers again.
        self._trained = None if self._update.has_gradients else trained

    def _compare(self, names: Sequence[str], trained: bytes) -> None:
        if self._is_alone:
            return
        context = self._context
        names_of = context.rank_names
        try:
            same_trained(names, trained, context.stage_group, names_of)
        except RuntimeError as error:
            raise InputError(
                f"requires_grad was changed on {names_of.name(context.rank)}, but not on all ranks that hold the same "
                f"parameters: some did not come to compare it ({error}); {ADVICE}"
            ) from error


_PARTS = (
    "%s.state_dict() has this rank's part of the %s only, which is sharded over the ranks; to save all of it call "
    "engine.save(path) on every rank, or engine.save_weights(path) for the model's weights alone; "
    "engine.full_state_dict() returns it; all of them before the engine is closed"
)


class ModelGuard:
    """Hooks on `model`, which is on `device`, and `optimizer`, until `remove`. Copies of the model have none.

    It is a scope, in which the engine itself calls model or optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        parallel_model: ParallelModel,
    ) -> None:
        self.own_calls = 0
        """Above 0 while the engine itself calls the model or the optimizer."""
        self._removers: list[Callable[[], Any]] = []
        casts = bool(recipe.autocast or recipe.param_dtype or recipe.output_dtype)
        if parallel_model.plans.partition is None and (casts or parallel_model.axes):  # stages refuse it themselves
            warn = _DirectCall(self, recipe, device, bool(parallel_model.axes))
            self._removers.append(model.register_forward_pre_hook(warn).remove)
        if parallel_model.divides_model:
            model.register_state_dict_pre_hook(_PartialState(self, "model"))  # these stay: after `close`, too
        if parallel_model.divides:
            optimizer.register_state_dict_pre_hook(_PartialState(self, "optimizer"))

    def __enter__(self) -> None:
        self.own_calls += 1

    def __exit__(self, *_: object) -> None:
        self.own_calls -= 1

    def remove(self) -> None:
        """Remove the hooks, but for those that warn of sharded state dicts."""
        for remove in self._removers:
            remove()
        self._removers = []


class _Warning:
    """A hook that warns once of a call that the engine did not make."""

    def __init__(self, guard: ModelGuard) -> None:
        self._guard = guard
        self._has_warned = False

    def __reduce__(self) -> Any:  # a copy of the model has a hook that does nothing
        return functools.partial, (_do_nothing,)


class _DirectCall(_Warning):
    """Before a forward: warns of `model(x)` in training. (Compiled code leaves it out.)"""

    def __init__(self, guard: ModelGuard, recipe: Recipe, device: torch.device, shares_batch: bool) -> None:
        super().__init__(guard)
        self._autocast_on = device.type if recipe.autocast and not shares_batch else None
        dtype, or_else = dtype_name(recipe.compute_dtype), ""
        if shares_batch:
            does = (
                "the ranks that compute a batch together do not compare its inputs, and draw its dropout from each "
                "rank's own generators"
            )
        elif recipe.param_dtype is not None:
            does = f"its inputs are not cast to {dtype}, which its weights are in, nor its outputs back"
        else:
            does = f"it computes in float32, and not in {dtype} as the config says"
            or_else = ", or call it within `with engine.autocast():`"
        self._text = f"{does}. Write engine(x) in place of model(x){or_else}"

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or self._has_warned or self._guard.own_calls:
            return
        if torch.jit.is_tracing() or not (module.training and torch.is_grad_enabled()):
            return
        if self._autocast_on is None or not torch.is_autocast_enabled(self._autocast_on):
            self._has_warned = True
            _log.warning("the model itself was called in training, in place of the engine: %s", self._text, ranks=None)


class _PartialState(_Warning):
    """Before `state_dict`: warns of what is missing in it."""

    def __init__(self, guard: ModelGuard, what: str) -> None:
        super().__init__(guard)
        self._what = what

    def __call__(self, *_: Any) -> None:
        if not self._has_warned and not self._guard.own_calls:
            self._has_warned = True
            _log.warning(_PARTS, self._what, self._what)


def _do_nothing(*_: Any) -> None:
    """Replaces a hook in a copy of the model."""


class CountedBatches(EngineHook):
    """Warns of a loop that accumulates by itself: `step` came after several batches, for the second time.

    Several losses of one batch are no batches: one is counted for each that `engine.dataloader` gave or, where that is
    not iterated, for each training forward with a backward.
    """

    def __init__(self, model: nn.Module, loader: EngineDataLoader | None, length: int) -> None:
        self._model = model
        self._loader = loader
        self._length = length
        self._is_new_forward = False
        self._batches = self._late_steps = 0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_new_forward |= self._model.training

    def after_backward(self, loss: Any) -> None:
        loader = self._loader
        self._batches += loader.is_untouched if loader is not None and loader.runs else self._is_new_forward
        self._is_new_forward = False

    def before_step(self) -> None:
        batches, self._batches = self._batches, 0
        self._late_steps += batches > 1
        if batches > 1 and self._late_steps == 2:
            _log.warning(
                "engine.step() came after %d batches, twice by now, but with gradient_accumulation=%d it counts them "
                "itself: each call stands for one batch, so that updates are made of more batches than they are "
                "divided by. Delete the `if` around engine.step() and call it for each batch; or set "
                "gradient_accumulation=1 and divide the loss by %d yourself",
                *(batches, self._length, batches),
            )


class SameInputs(EngineHook):
    """Warns after the first update if the user's own loader gives all data ranks the same batches."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._model = model
        self._context = context
        self._inputs: Any = None
        self._is_over = False

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_over and self._model.training:
            self._inputs = args, kwargs

    def after_step(self, result: StepResult) -> None:
        if self._is_over:
            return
        context = self._context
        inputs = tensors_of(self._inputs)
        if same_on_ranks(inputs, context.dp_group) and inputs:
            _log.warning(
                "all %d data ranks were given the same inputs in the first update: they seem to train on the same "
                "batches. Shard the data by engine.context.dp_rank of dp_size (batches[dp_rank::dp_size]), or seed "
                "what draws them by rank (torch.manual_seed(seed + dp_rank)); a DataLoader that is given to initialize "
                "is sharded",
                context.dp_size,
            )
        self._is_over, self._inputs = True, None


class ForwardWrites(EngineHook):
    """Refuses a model whose forward, or loop, writes into its weights what is lost, or what differs between ranks that
    hold the same weights and see other data. Looks before the first `engine.step`, the tenth, the hundredth and so on;
    before an evaluation, which may be meant to be of other weights, it warns of what is lost."""

    def __init__(self, state: ShardedState, context: ParallelContext) -> None:
        self._state = state
        self._context = context
        self._steps = 0
        self._evaluated = -1  # at which of the steps

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._state.model.training and self._evaluated != self._steps:
            self._evaluated = self._steps
            self._state.update.master_weights.tell_uncounted()

    def before_step(self) -> None:
        self._steps += 1
        data = self._state.parallel_model.data
        if is_checked(self._steps):
            uncounted = self._state.update.master_weights.uncounted()
            found = data.find_lost_writes(False), uncounted, self._find_unlike()
            everyone = zip(*self._context.everyone(found), strict=True)
            _refuse(*(sorted({name for names in theirs for name in names}) for theirs in everyone))
        if is_checked(self._steps + 1):
            data.find_lost_writes(True)

    def _find_unlike(self) -> set[str]:
        """Those that differ between ranks that should have the same."""
        context, parallel_model = self._context, self._state.parallel_model
        held, found = dict(self._state.model.named_parameters()), set[str]()
        apart = [axis for axis in parallel_model.axes.values() if axis.dim in parallel_model.own_rng_axes]
        groups: list[Any] = [(context.dp_group, set(held))] if context.dp_size > 1 else []
        groups += [(context.group(a.dim), {n for n, p in held.items() if a.replicas(p) == a.size}) for a in apart]
        values = norms(held.values() if groups else (), context.device)
        for group, same in groups:
            flags = zip(held, differ(values, group).tolist(), strict=True)
            found.update(name for name, is_other in flags if is_other and name in same)
        return found


def _refuse(lost: Sequence[str], uncounted: Sequence[str], unlike: Sequence[str]) -> None:
    """Raise InputError if there are such parameters."""
    instead = (
        "Compute with a changed copy, as in weight = torch.renorm(self.weight, ...), which needs no write; or write "
        "after engine.step(), under torch.no_grad(), as in param.copy_(...)"
    )
    if lost:
        raise InputError(
            f"the model's forward writes into {shorten(lost)}, but under parallel.data='fsdp' it has gathered copies "
            f"of the weights, which are freed after it: what is written is lost. {instead}. Other data strategies keep "
            "what is written, if it is the same on all ranks"
        )
    if uncounted:
        raise InputError(
            f"forward, or the loop, has written into {shorten(uncounted)} through .data, which torch does not count: "
            "model and fp32 masters differ, and the update overwrites what was written. Write under torch.no_grad(), "
            "as in self.weight.copy_(...)"
        )
    if unlike:
        raise InputError(
            f"the weights {shorten(unlike)} differ between ranks that should hold the same: forward, or the loop, has "
            "written into them what depends on a rank's own batch or random numbers, so that the ranks' gradients are "
            f"not those of one model. {instead}, the same on all ranks: what depends on the weights alone, or on "
            "values that engine.context.all_reduce has averaged"
        )
