"""A layout proven on the user's own model: runs of a reference and of the layout, compared tensor by tensor."""

import sys
from inspect import getdoc, signature
from types import ModuleType
from typing import Any

from .phases import verify
from .report import Difference, Phase, VerifyReport

__all__ = ["Difference", "Phase", "VerifyReport", "verify"]


class _Room(ModuleType):
    """A package of the name of its function: importing any of its modules makes it the attribute `halfmesh.verify`."""

    def __call__(self, *args: Any, **kwargs: Any) -> VerifyReport:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
__signature__ = signature(verify, eval_str=True)
__doc__ = f"halfmesh.verify{__signature__}\n\n{getdoc(verify)}"  # so that help() is about the function
