"""Settings of the optimizer and the scheduler that a load overwrites with those of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config.text import as_json
from ..errors import bullet_list, cut, show
from ..utils.log import get_logger
from ..utils.torch_private import has_no_memory
from .state import IMPLEMENTATION

if TYPE_CHECKING:
    from ..engine.parts import EngineParts

_log = get_logger(__name__)

Settings = list[dict[str, Any]]
"""The settings of the scheduler, and of each of the optimizer's groups, in JSON types; {} if they are not known."""
_FOLLOW = "params", "initial_lr", "base_lrs", "last_epoch", "_step_count", "_last_lr", "_schedule_phases"
"""Entries of groups and schedulers that are no settings, or follow from them. The initial_lr is compared as the lr."""


class GivenSettings:
    """The initial settings of optimizer and scheduler in this run, and in the run that wrote the loaded state.

    Training changes settings, so two runs are compared by their initial ones.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._given = self.in_force = self._describe()

    def loaded(self, source: object, given: Settings) -> None:
        """Warn, after a load from `source`, whose run had the initial settings `given`, of each setting that now
        differs from this run's."""
        self.in_force = [theirs or own for theirs, own in zip_longest(given, self._given, fillvalue=dict[str, Any]())]
        lines: dict[str, dict[str, None]] = {}
        for own, theirs, now in zip(self._given, self.in_force, self._describe(), strict=False):
            for key, value in own.items():
                if theirs.get(key, value) != value != now.get(key, value):
                    moved = "" if theirs[key] == now[key] else f" (now {show(now[key])})"
                    lines.setdefault(key, {})[f"{show(theirs[key])}{moved}, not {show(value)}"] = None
        if lines:
            title = (
                f"{source} was saved by a run with other settings, which are in force now in place of those that this "
                "run gave; to change one, set it after the load (engine.optimizer.param_groups, engine.lr_scheduler):"
            )
            _log.warning("%s", bullet_list(title, [f"{key}: {cut('; '.join(of))}" for key, of in lines.items()]))

    def _describe(self) -> Settings:
        scheduler = self._parts.lr.state_dict()
        groups = self._parts.update.optimizer.param_groups
        return [
            dict(_flat("lr_scheduler ", scheduler if isinstance(scheduler, Mapping) else {})),
            *(dict(_flat("optimizer ", {**group, "lr": group.get("initial_lr", group.get("lr"))})) for group in groups),
        ]


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in _FOLLOW or key in IMPLEMENTATION:
            continue
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):  # the schedulers of a SequentialLR
                yield from _flat(f"{prefix}{key}[{number}].", item)
        else:
            yield prefix + key, as_json(_number(value))


def _number(value: Any) -> Any:
    """`value` as a plain number, for numbers of other types such as a float32 tensor."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not (value.dim() or has_no_memory(value))):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
