"""What does the work of a precision mode: halfmesh itself, unless a plugin names another library."""

from __future__ import annotations

import torch

from .convert import convert
from .precision import Precision


class Backend:
    """halfmesh's own machinery: it does what a recipe says. A plugin with another one overrides what differs."""

    convert = staticmethod(convert)
    """Applies a recipe to model and optimizer. The `recipe` of what is returned is what halfmesh runs."""
    precision = Precision
    """Runs model and criterion, by that recipe."""

    def find_problem(self, device: torch.device) -> str | None:
        """What keeps it from working on `device` in this process, asked before anything is changed; None if nothing."""
        return None
