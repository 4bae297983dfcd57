"""Compares a state dict or a checkpoint with this engine: rejects one that does not fit before anything changes, and
reports settings that a load overwrites."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim import Optimizer

from ..config.text import as_json
from ..errors import InputError, bullet_list, counted, cut, did_you_mean, find_near, shorten, show
from ..utils.log import get_logger
from ..utils.optimizer_state import parts_of

if TYPE_CHECKING:
    from ..engine.lr_scheduler import LRAdvance

_log = get_logger(__name__)


def class_name(value: object) -> str:
    """The class of `value`, with its module; of several optimizers or schedulers those of all."""
    several = parts_of(value) if isinstance(value, Optimizer) else value if isinstance(value, list) else (value,)
    return " and ".join(f"{type(one).__module__}.{type(one).__qualname__}" for one in several)


# -- state dicts -------------------------------------------------------------------------------------------------------


def reject_unfit(update: Mapping[str, Any], scalers: int, owner: str) -> None:
    """Raise InputError if `update` was not saved by an `owner` with this many loss scalers."""
    if "scalers" not in update:
        raise InputError(f"this is not the state of an {owner}: pass what {owner}.state_dict() returned")
    if len(update["scalers"]) != scalers:
        saved = counted(len(update["scalers"]), "loss scale")
        raise InputError(f"the state has {saved}, this run {scalers}; use the precision and num_losses of the state")


def reject_other_shards(saved: Mapping[str, int], own: Mapping[str, int]) -> None:
    """Raise InputError if a state with the coordinates `saved` is of other shards of the model than this rank's."""
    if dict(saved) != dict(own):
        theirs, mine = (", ".join(f"{key} {value}" for key, value in each.items()) for each in (saved, own))
        raise InputError(f"the state is from {theirs}, but this rank is {mine}; use engine.save and engine.load")


# -- checkpoints and files of weights ----------------------------------------------------------------------------------


def model_problems(model: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> Iterator[str]:
    """The differences of names and shapes of a model's full tensors from those in `source`. (The shape is None for
    entries of `get_extra_state`.)"""
    missing, unexpected = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    if missing:
        near = {name: find_near(name, unexpected) for name in missing}
        yield f"{source} has no {shorten([f'{name} (but {n})' if n else name for name, n in near.items()])}"
    if unexpected:
        yield f"the model has no {shorten(unexpected)}"
    other = [name for name in sorted(model.keys() & saved.keys()) if saved[name] != model[name]]
    if other:
        yield f"different shapes: {shorten([f'{n} ({saved[n]} in {source}, {model[n]} here)' for n in other])}"


def optimizer_problems(
    optimizer: object, scheduler: object | None, groups: Sequence[Mapping[str, Any]], common: Mapping[str, Any]
) -> Iterator[str]:
    """The differences of optimizer and scheduler from those of a checkpoint.

    Args:
        groups: the optimizer's groups, with the names of their parameters in the full model.
        common: the checkpoint's state that is equal on all ranks.
    """
    kinds = {"lr_scheduler": (common["lr_class"], scheduler), "optimizer": (common["optimizer"], optimizer)}
    for what, (kind, own) in kinds.items():
        if own is not None and kind not in (None, class_name(own)):
            yield f"it was saved with the {what} {kind}, but this is {class_name(own)}; use the same class"
    if common["optimizer"] != class_name(optimizer):
        return
    mine, saved = ([sorted(group["params"]) for group in each] for each in (groups, common["groups"]))
    if sorted(mine) != sorted(saved):
        other = sorted(set(chain(*mine)) ^ set(chain(*saved)))
        sizes = f"its optimizer has groups of {list(map(len, saved))} parameters, this one of {list(map(len, mine))}"
        yield f"{sizes}{f' (not in both: {shorten(other)})' if other else ''}; build the same groups"
    elif mine != saved and scheduler is not None and common["lr_class"] is not None:
        order = [str(saved.index(group)) for group in mine]
        problem = f"its optimizer's groups are here in the order {shorten(order)}: lr_scheduler would swap the rates"
        yield f"{problem}; build the groups in the saved order"


# -- settings that a load overwrites with those of another run ---------------------------------------------------------

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Group settings that select an implementation, which a load does not change."""
Settings = list[dict[str, Any]]
"""The settings of the scheduler, and of each of the optimizer's groups, in JSON types; {} if they are not known."""
KEPT = ("lr_scheduler", "optimizer_settings")
"""The parts of this run that a load may keep. A scheduler decides the rates, so they are kept with it."""
_RATES = "lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"
_MOMENTA = "momentum", "betas"
"""Moved by OneCycleLR and CyclicLR, which then keep a max_momentum in the groups."""
_FOLLOW = "params", "initial_lr", "base_lrs", "last_epoch", "_step_count", "_last_lr", "_schedule_phases"
"""Entries of groups and schedulers that are not settings, or follow from them. The initial_lr is compared as the lr."""


class GivenSettings:
    """The initial settings of optimizer and scheduler in this run, and in the run that wrote the loaded state.

    Training changes settings, so two runs are compared by their initial ones.
    """

    def __init__(self, lr: LRAdvance, optimizer: Optimizer) -> None:
        self._lr = lr
        self._optimizer = optimizer
        self._given = self.in_force = self._describe()
        self._rates: tuple[str, ...] = _RATES
        self._groups = [_copy_settings(group) for group in optimizer.param_groups]
        self._schedule = copy.deepcopy(lr.state_dict()) if can_go_on(lr.scheduler) else None

    def reject_unkept(self, keep: Sequence[str], saved: Any) -> None:
        """Raise InputError if `keep` is unknown, or this run's schedule cannot go on where the `saved` one was."""
        names = [keep] if isinstance(keep, str) else keep
        if isinstance(keep, str) or not set(keep) <= set(KEPT):
            near = "".join(did_you_mean(name, KEPT) for name in names if name not in KEPT)
            raise InputError(f"keep={show(keep)}: expected a tuple of some of {KEPT}{near}")
        if "lr_scheduler" in keep and self._lr.scheduler is not None and not (self._schedule and can_go_on(saved)):
            problem = "the schedule of this run or the saved one counts no steps (ReduceLROnPlateau); load without it"
            raise InputError(f"keep={show(keep)}: {problem}, and change engine.lr_scheduler after the load")

    def loaded(self, source: object, given: Settings, keep: Sequence[str], saved: Any) -> None:
        """After a load from `source`: put back what `keep` names, and warn of each setting that now differs from this
        run's.

        Args:
            given: the initial settings of the run that saved.
            saved: its scheduler's state.
        """
        moves_momentum = any("max_momentum" in group for group in (*self._groups, *self._optimizer.param_groups))
        self._rates = (*_RATES, *_MOMENTA) if moves_momentum else _RATES
        pairs = list(zip_longest(given, self._given, fillvalue=dict[str, Any]()))
        kept = [{key: value for key, value in own.items() if self._kind(key) in keep} for _, own in pairs]
        self.in_force = [(theirs or own) | own_kept for (theirs, own), own_kept in zip(pairs, kept, strict=True)]
        keeps_schedule = "lr_scheduler" in keep and self._lr.scheduler is not None
        if keeps_schedule:
            self.in_force[0] = self._given[0]
        for group, own, (theirs, mine) in zip(self._optimizer.param_groups, self._groups, pairs[1:], strict=False):
            for key, value in _copy_settings(own).items():
                name = f"optimizer {key}"
                # Not the optimizer's state, such as a count of steps, which began with equal values in both runs.
                is_other = theirs.get(name) != mine.get(name) or self._kind(name) == "lr_scheduler"
                if self._kind(name) in keep and is_other:
                    group[key] = value
            if keeps_schedule:  # what only the saved schedule kept there
                for key in [key for key in group if key in self._rates and key not in own]:
                    del group[key]
        if keeps_schedule and saved is not None:
            self._lr.replay(copy.deepcopy(self._schedule), saved)
        elif keeps_schedule:
            _log.warning("%s has no schedule: the lr_scheduler of this run is not advanced", source)
        lines: dict[str, dict[str, None]] = {}
        for own, theirs, now in zip(self._given, self.in_force, self._describe(), strict=False):
            for key, value in own.items():
                if theirs.get(key, value) != value != now.get(key, value):
                    moved = "" if theirs[key] == now[key] else f" (now {show(now[key])})"
                    lines.setdefault(key, {})[f"{show(theirs[key])}{moved}, not {show(value)}"] = None
        if lines:
            kinds = tuple(sorted({*keep, *map(self._kind, lines)}))
            title = f"{source}: its settings replace this run's; to keep this run's, load with keep={kinds}:"
            _log.warning("%s", bullet_list(title, [f"{key}: {cut('; '.join(of))}" for key, of in lines.items()]))

    def _kind(self, name: str) -> str:
        """The one of `KEPT` to which a setting belongs."""
        is_rate = self._lr.scheduler is not None and name.removeprefix("optimizer ") in self._rates
        return "lr_scheduler" if is_rate or name.startswith("lr_scheduler") else "optimizer_settings"

    def _describe(self) -> Settings:
        scheduler = self._lr.state_dict()
        if isinstance(scheduler, list):
            settings = _flatten("", {"lr_scheduler": scheduler})
        else:
            settings = _flatten("lr_scheduler ", scheduler if isinstance(scheduler, Mapping) else {})
        groups = [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in self._optimizer.param_groups]
        return [dict(settings), *(dict(_flatten("optimizer ", group)) for group in groups)]


def _copy_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", *IMPLEMENTATION)}


def can_go_on(schedule: Any) -> bool:
    """Return True if a scheduler, or the state of one, counts its steps, and can be stepped without a metric. (None can
    stay as it is.)"""
    for one in schedule if isinstance(schedule, list) else [schedule]:
        values = one if isinstance(one, Mapping) else vars(one) if one is not None else {"last_epoch": 0}
        if "patience" in values or not ("last_epoch" in values or "_schedulers" in values):
            return False
    return True


def _flatten(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in (*_FOLLOW, *IMPLEMENTATION):
            continue
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):  # the schedulers of a SequentialLR
                yield from _flatten(f"{prefix}{key}[{number}].", item)
        else:
            yield prefix + key, as_json(_number(value))


def _number(value: Any) -> Any:
    """`value` as a plain number, for numbers of other types such as a float32 tensor."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.dim()):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
