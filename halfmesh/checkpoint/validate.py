"""Whether a state or a checkpoint fits this engine: compared before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ..errors import InputError, find_near, shorten
from ..parallel.context import ParallelContext

UPDATE_KEYS = ("optimizer", "masters", "scalers", "skips")
KEYS = ("model", "update", "lr_scheduler", "global_step", "dataloader", "random", "layout")


def class_name(value: object) -> str:
    """The class of `value`, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


# -- state dicts -------------------------------------------------------------------------------------------------------


def refuse_unfit(state: Mapping[str, Any], scalers: int) -> None:
    """Raise InputError if `state` is not of an engine with so many loss scalers."""
    _refuse_missing(state, KEYS, "engine", "(for a model's own state use engine.model.load_state_dict)")
    _refuse_other_scales(state["update"], scalers, "its weights: engine.model.load_state_dict(state['model'])")


def refuse_unfit_update(state: Mapping[str, Any], scalers: int) -> None:
    """Raise InputError if `state` is not of an optimizer of convert_to_amp with so many loss scalers."""
    _refuse_missing(state, UPDATE_KEYS, "optimizer", "of convert_to_amp")
    _refuse_other_scales(state, scalers, "the model's state dict")


def _refuse_missing(state: Mapping[str, Any], keys: Sequence[str], owner: str, hint: str) -> None:
    missing = [key for key in keys if key not in state]
    if missing:
        raise InputError(
            f"this is not the state of an {owner}: {', '.join(missing)} missing; pass what {owner}.state_dict() gave "
            f"{hint}"
        )


def _refuse_other_scales(update: Mapping[str, Any], scalers: int, weights: str) -> None:
    saved = len(update["scalers"])
    if saved != scalers:
        words = {0: "without a loss scale", 1: "with a loss scale"}
        raise InputError(
            f"the state was saved {words.get(saved, f'with {saved} loss scales')}, but this run trains "
            f"{words.get(scalers, f'with {scalers} (num_losses)')}; take the precision that it was saved with, or "
            f"load only {weights}"
        )


def layout(context: ParallelContext, cuts_updates: bool) -> dict[str, int]:
    """Which part of the model this rank holds; with `cuts_updates` (zero1, fsdp) also which it steps."""
    axes = ("pp", "dp", "tp") if cuts_updates else ("pp", "tp")
    return {f"{axis}_{what}": getattr(context, f"{axis}_{what}") for axis in axes for what in ("size", "rank")}


def refuse_other_part(saved: Mapping[str, int], mine: Mapping[str, int]) -> None:
    """Raise InputError if a state with the layout `saved` is of another part of the model than this rank's."""
    if dict(saved) != dict(mine):
        raise InputError(
            f"the state is of {_words(saved)}, and this rank is {_words(mine)}; load what the same rank of the same "
            "layout has saved. For any layout use engine.save and engine.load, or load whole weights: "
            "engine.model.load_state_dict(weights)"
        )


def _words(layout: Mapping[str, int]) -> str:
    axes = [key.removesuffix("_rank") for key in layout if key.endswith("_rank")]
    return ", ".join(f"{axis} {layout[f'{axis}_rank']} of {layout[f'{axis}_size']}" for axis in axes)


# -- checkpoints and files of weights ----------------------------------------------------------------------------------


def model_problems(model: Mapping[str, Any], saved: Mapping[str, Any], source: str) -> Iterator[str]:
    """How names and shapes of a model's whole tensors differ from those that `source` has."""
    missing, unexpected = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    if missing:
        near = {name: find_near(name, unexpected) for name in missing}
        yield f"{source} has no {shorten([f'{name} (but {n})' if n else name for name, n in near.items()])}"
    if unexpected:
        yield f"the model has no {shorten(unexpected)}"
    other = [
        f"{name} ({saved[name]} in {source}, {model[name]} here)"
        for name in sorted(model.keys() & saved.keys())
        if saved[name] != model[name]
    ]
    if other:
        yield f"other shapes: {shorten(other)}"


def extra_problems(mine: Set[str], saved: Set[str]) -> Iterator[str]:
    """How the names differ of what modules save with `get_extra_state`."""
    if mine - saved:
        yield f"the checkpoint has no {shorten(sorted(mine - saved))} (of get_extra_state)"
    if saved - mine:
        yield f"the model has no {shorten(sorted(saved - mine))} (of get_extra_state)"


def optimizer_problems(
    optimizer: object, scheduler: object | None, groups: list[list[str]], common: Mapping[str, Any]
) -> Iterator[str]:
    """How the optimizer and the scheduler differ from those of a checkpoint.

    Args:
        groups: the names of the parameters of each of the optimizer's groups, in the whole model.
        common: of the checkpoint.
    """
    has_scheduler = scheduler is not None and common["lr_class"] is not None
    if has_scheduler and common["lr_class"] != class_name(scheduler):
        yield (
            f"it was saved with the lr_scheduler {common['lr_class']}, and this is {class_name(scheduler)}; use the "
            "same class, or give initialize none"
        )
    if common["optimizer"] != class_name(optimizer):
        yield (
            f"it was saved with the optimizer {common['optimizer']}, and this is {class_name(optimizer)}; use the same "
            "class, or load the weights alone: engine.load_weights"
        )
        return
    mine, saved = (list(map(sorted, each)) for each in (groups, [group["params"] for group in common["groups"]]))
    if sorted(mine) != sorted(saved):
        here, there = ({name for names in each for name in names} for each in (mine, saved))
        only = {"here": here - there, "in the checkpoint": there - here}
        words = [f"only {where}: {shorten(sorted(names))}" for where, names in only.items() if names]
        yield (
            f"its optimizer has groups of {list(map(len, saved))} parameters, and this one of {list(map(len, mine))} "
            f"({'; '.join(words) or 'the same parameters, in other groups'}); build the groups as they were then"
        )
    elif has_scheduler and mine != saved:
        order = [str(saved.index(group)) for group in mine]
        yield (
            f"its optimizer has the same groups in another order: here are its {shorten(order)}, and the "
            "lr_scheduler's state is by number, so that learning rates would be exchanged; build the groups in the "
            "order of then, or give initialize no lr_scheduler"
        )
