"""Detects writes into gathered weights, which FSDP2 frees after forward: they never reach its shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...utils.torch_private import write_stamps
from ..rank_checks import norms


class WriteWatch:
    """Compares the gathered weights of each unit before and after its forward, in training.

    Args:
        names: of the parameters, by module and attribute.

    Attributes:
        is_on: True while it compares.
    """

    def __init__(self, names: Mapping[tuple[nn.Module, str], str], device: torch.device) -> None:
        self.is_on = True
        self._names, self._device = names, device
        self._taken: set[nn.Module] = set()
        self._open: dict[nn.Module, tuple[dict[str, torch.Tensor], list[Any], torch.Tensor]] = {}
        self._edited: set[str] = set()
        self._changed: list[tuple[list[str], torch.Tensor]] = []

    def add(self, unit: nn.Module) -> None:
        """Watch `unit`, whose inner units are watched. Call it before FSDP2 adds its hooks: they are outside."""
        own = {(m, name): text for (m, name), text in self._names.items() if m in {*unit.modules()} - self._taken}
        self._taken.update(unit.modules())

        @torch.compiler.disable
        def before(*_: Any) -> None:
            if self.is_on and unit.training and torch.is_grad_enabled():
                held = {text: getattr(module, name) for (module, name), text in own.items()}
                held = {text: param for text, param in held.items() if not isinstance(param, DTensor)}
                self._open[unit] = held, write_stamps(list(held.values())), norms(held.values(), self._device)

        @torch.compiler.disable
        def after(*_: Any) -> None:
            if unit in self._open:
                held, stamps, values = self._open.pop(unit)
                now = write_stamps(list(held.values()))
                self._edited.update(text for text, a, b in zip(held, stamps, now, strict=True) if a != b)
                self._changed.append((list(held), norms(held.values(), self._device) != values))

        unit.register_forward_pre_hook(before, prepend=True)
        unit.register_forward_hook(after)

    def take(self) -> Collection[str]:
        """The names of the parameters that were written since the last call. Reads the device."""
        for held, changed in self._changed:
            self._edited.update(text for text, is_other in zip(held, changed.tolist(), strict=True) if is_other)
        edited, self._edited, self._changed = self._edited, set(), []
        return sorted(edited)
