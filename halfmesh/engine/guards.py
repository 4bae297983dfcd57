"""Mistakes in a loop or on one rank that would train silently otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from ..amp.recipe import Recipe
from ..amp.step_result import StepResult
from ..errors import InputError, shorten
from ..parallel.mesh import ParallelContext
from ..parallel.objects import gather_objects, is_simulated
from ..parallel.replica_checks import ADVICE, are_same, differ, is_checked, norms, refuse_unlike
from ..utils.engine_hook import EngineHook
from ..utils.log import get_logger
from ..utils.tensors import dtype_name
from .parallelize import ParallelModel

if TYPE_CHECKING:
    from .parts import EngineParts


class SameTrained:
    """Compares `requires_grad` over the ranks of a pipeline stage, which hold the same parameters or shards of them.

    All ranks of `context` make this together.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._is_alone = len(context.stage_ranks) == 1 or is_simulated()
        if len(context.stage_ranks) < context.size and not self._is_alone:
            _ = context.stage_group  # now: later each stage compares when something has changed there

    def compare(self, names: Sequence[str], trained: bytes) -> None:
        """Compare, after the trained parameters of this rank have changed. All ranks of the stage together.

        Args:
            names, trained: as for `refuse_unlike`.

        Raises:
            InputError: they changed differently on another rank; or not at all there, which is found when the time
                limit of collectives has passed.
        """
        if self._is_alone:
            return
        context = self._context
        names_of = context.rank_names
        try:
            everyone = gather_objects(trained, context.stage_group)
        except RuntimeError as error:
            raise InputError(
                f"requires_grad was changed on {names_of.name(context.rank)}, but not on all ranks that hold the same "
                f"parameters: some did not come to compare it ({error}); {ADVICE}"
            ) from error
        refuse_unlike(names, everyone, [names_of.name(rank) for rank in context.stage_ranks])


_log = get_logger(__name__)

_PARTS = (
    "%s.state_dict() has this rank's part of the %s only, which is sharded over the ranks; to save all of it call "
    "engine.save(path) on every rank, or engine.save_weights(path) for the model's weights alone, before the engine is "
    "closed; engine.close(restore=True) gives all of it back on every rank"
)


class ModelGuard:
    """Hooks on `model`, which is on `device`, and `optimizer`, until `remove`. Copies of the model have none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        recipe: Recipe,
        device: torch.device,
        division: ParallelModel,
    ) -> None:
        self.own_calls = 0
        """Above 0 while the engine itself calls the model or the optimizer."""
        self._removers: list[Callable[[], Any]] = []
        self._warnings: list[RemovableHandle] = []  # of state dicts that hold only this rank's shards
        if division.plans.partition is None and (recipe.autocast or recipe.param_dtype or recipe.output_dtype):
            warn = _DirectCall(self, recipe, device)  # stages refuse it themselves
            self._removers.append(model.register_forward_pre_hook(warn).remove)
        if division.divides_model:
            self._warnings.append(model.register_state_dict_pre_hook(_PartialState(self, "model")))
        if division.divides:
            self._warnings.append(optimizer.register_state_dict_pre_hook(_PartialState(self, "optimizer")))

    def own_call(self) -> ModelGuard:
        """A scope in which the engine calls model and optimizer."""
        return self

    def __enter__(self) -> None:
        self.own_calls += 1

    def __exit__(self, *_: object) -> None:
        self.own_calls -= 1

    def remove(self, warnings: bool) -> None:
        """Remove the hooks; those that warn of sharded state dicts only with `warnings`."""
        for remove in self._removers:
            remove()
        for hook in self._warnings if warnings else ():
            hook.remove()
        self._removers, self._warnings = [], []


class _Warning:
    """A hook that warns once of a call that the engine did not make."""

    def __init__(self, guard: ModelGuard) -> None:
        self._guard = guard
        self._has_warned = False

    def __reduce__(self) -> Any:  # a copy of the model has a hook that does nothing
        return functools.partial, (_do_nothing,)


class _DirectCall(_Warning):
    """Before a forward: warns of `model(x)` in training. (Compiled code leaves it out.)"""

    def __init__(self, guard: ModelGuard, recipe: Recipe, device: torch.device) -> None:
        super().__init__(guard)
        self._autocast_on = device.type if recipe.autocast else None
        dtype = dtype_name(recipe.compute_dtype)
        if recipe.param_dtype is not None:
            does, or_else = f"its inputs are not cast to {dtype}, which its weights are in, nor its outputs back", ""
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

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._is_new_forward = False
        self._batches = self._late_steps = 0

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_new_forward |= self._parts.model.training

    def after_backward(self, loss: Any) -> None:
        loader = self._parts.dataloader
        self._batches += loader.is_untouched if loader is not None and loader.runs else self._is_new_forward
        self._is_new_forward = False

    def before_step(self) -> None:
        batches, self._batches = self._batches, 0
        self._late_steps += batches > 1
        if batches > 1 and self._late_steps == 2:
            length = self._parts.accumulation.length
            _log.warning(
                "engine.step() came after %d batches, twice by now, but with gradient_accumulation=%d it counts them "
                "itself: each call stands for one batch, so that updates are made of more batches than they are "
                "divided by. Delete the `if` around engine.step() and call it for each batch; or set "
                "gradient_accumulation=1 and divide the loss by %d yourself",
                *(batches, length, batches),
            )


class SameInputs(EngineHook):
    """Warns after the first update if the user's own loader gives all data ranks the same batches."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._inputs: Any = None
        self._is_over = False

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_over and self._parts.model.training:
            self._inputs = args, kwargs

    def after_step(self, result: StepResult) -> None:
        if self._is_over:
            return
        context = self._parts.context
        if are_same(self._inputs, context.dp_group):
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

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._steps = 0
        self._evaluated = -1  # at which of the steps

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._parts.model.training and self._evaluated != self._steps:
            self._evaluated = self._steps
            self._parts.update.master_weights.tell_uncounted()

    def before_step(self) -> None:
        self._steps += 1
        data = self._parts.division.data
        if is_checked(self._steps):
            uncounted = self._parts.update.master_weights.uncounted()
            found = data.find_lost_writes(False), uncounted, self._find_unlike()
            everyone = zip(*self._parts.context.everyone(found), strict=True)
            _refuse(*(sorted({name for names in theirs for name in names}) for theirs in everyone))
        if is_checked(self._steps + 1):
            data.find_lost_writes(True)

    def _find_unlike(self) -> set[str]:
        """Those that differ between ranks that should have the same."""
        context, division = self._parts.context, self._parts.division
        held, found = dict(self._parts.model.named_parameters()), set[str]()
        apart = [axis for axis in division.axes.values() if axis.dim in division.own_rng_axes]
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
