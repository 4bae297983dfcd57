"""Parts of an engine's state that are neither the update's nor the loop's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..parallel.context import ParallelContext

UPDATE_KEYS = ("optimizer", "masters", "scalers", "skips")
KEYS = ("model", "update", "lr_scheduler", "global_step", "dataloader", "random", "layout")


def refuse_unfit(state: Mapping[str, Any], scalers: int) -> None:
    """Raise InputError if `state` is not one of an engine with so many loss scalers."""
    _refuse_missing(state, KEYS, "engine", "(for a model's own state use engine.model.load_state_dict)")
    _refuse_other_scales(state["update"], scalers, "its weights: engine.model.load_state_dict(state['model'])")


def refuse_unfit_update(state: Mapping[str, Any], scalers: int) -> None:
    """Raise InputError if `state` is not one of an update, as of convert_to_amp, with so many loss scalers."""
    _refuse_missing(state, UPDATE_KEYS, "optimizer", "of convert_to_amp")
    _refuse_other_scales(state, scalers, "the model's state dict")


def _refuse_missing(state: Mapping[str, Any], keys: Sequence[str], owner: str, hint: str) -> None:
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise InputError(f"{owner}.load_state_dict takes what {owner}.state_dict() gave, but a {kind} came")
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


def layout(context: ParallelContext, cuts_updates: bool = False) -> dict[str, int]:
    """Which part of the model this rank holds; with `cuts_updates` (zero1, fsdp) also which this rank steps."""
    axes = ("pp", "dp", "tp") if cuts_updates else ("pp", "tp")
    return {f"{axis}_{what}": getattr(context, f"{axis}_{what}") for axis in axes for what in ("size", "rank")}


def refuse_other_part(saved: Mapping[str, int], mine: Mapping[str, int]) -> None:
    """Raise InputError if a state with the layout `saved` is of another part of the model than this rank's, `mine`."""
    if dict(saved) != dict(mine):
        raise InputError(
            f"the state holds {_words(saved)}, and this rank {_words(mine)}; load what was saved by the rank at "
            "the same place of the same layout. Whole weights go into any layout: "
            "engine.model.load_state_dict(weights)"
        )


def _words(layout: Mapping[str, int]) -> str:
    words = f"part {layout['tp_rank']} of {layout['tp_size']} (tensor) of stage {layout['pp_rank']} of "
    words += f"{layout['pp_size']} of the model"
    return words + (
        f", and part {layout['dp_rank']} of {layout['dp_size']} of it (zero1 or fsdp)" if "dp_rank" in layout else ""
    )
