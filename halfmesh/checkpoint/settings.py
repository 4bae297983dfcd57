"""Settings of the optimizer and the scheduler that a load overwrites with those of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch import has_no_memory
from ..config.text import as_json
from ..errors import bullet_list, shorten, show
from ..log import get_logger
from .state import IMPLEMENTATION

_log = get_logger(__name__)

Settings = dict[str, list[dict[str, Any]]]
"""In JSON types, of each of the optimizer's groups and of the scheduler."""
_NONE = (*IMPLEMENTATION, "params", "initial_lr", "last_epoch", "_step_count", "_last_lr", "_schedule_phases")
"""Entries of groups and schedulers that are no settings, or follow from others. The initial_lr stands as the lr."""


class GivenSettings:
    """What this run gave its optimizer and scheduler, and what the run gave that the loaded state began with.

    Training moves settings, so two runs are compared by what they were given.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], scheduler: Any) -> None:
        self._given = _describe(groups, scheduler)
        self.in_force = self._given

    def loaded(self, source: object, groups: Sequence[Mapping[str, Any]], scheduler: Any, given: Settings) -> None:
        """Groups and scheduler state of `source`, whose run was given `given`, are in force now: warn of each setting
        in which they differ from what this run gave. The groups are in this run's order."""
        self.in_force = given or self.in_force  # older checkpoints do not say
        lines = list(
            _overruled(self._given, given, _describe(groups, scheduler if self._given["lr_scheduler"] else None))
        )
        if lines:
            title = (
                f"{source} was saved by a run with other settings, which are in force now in place of those that this "
                "run gave; to change one, set it after the load (engine.optimizer.param_groups, engine.lr_scheduler):"
            )
            _log.warning("%s", bullet_list(title, lines))


def _describe(groups: Sequence[Mapping[str, Any]], scheduler: Any) -> Settings:
    rates = [{**group, "lr": group.get("initial_lr", group.get("lr"))} for group in groups]
    return {
        "optimizer": [_flat(group) for group in rates],
        "lr_scheduler": [_flat(scheduler)] if isinstance(scheduler, Mapping) else [],
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _NONE:
            continue
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):  # the schedulers of a SequentialLR
                found |= _flat(item, f"{prefix}{key}[{number}].")
        else:
            is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and not has_no_memory(value)
            found[prefix + key] = value.item() if is_number else as_json(value)
    return found


def _overruled(given: Settings, before: Settings, now: Settings) -> Iterator[str]:
    for part, mine in given.items():
        rows = list(zip(mine, before.get(part, ()), now[part], strict=False))
        for key in dict.fromkeys(key for own, *_ in rows for key in own):
            known = [[row[key] for row in each] for each in rows if all(key in row for row in each)]
            differ = [
                (f"{show(old)} (now {show(new)})" if old != new else show(new), show(own))
                for own, old, new in known
                if old != own != new
            ]
            if differ:
                new, own = (shorten(list(dict.fromkeys(values))) for values in zip(*differ, strict=True))
                yield f"{part} {key}: {new}, not {own}"
