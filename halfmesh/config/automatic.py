"""The key `checkpoint`: automatic checkpoints, periodic and on preemption."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from ..errors import did_you_mean, show
from ..options import Names, Options, PositiveInt


def _check_signals(names: tuple[str, ...]) -> tuple[str, ...]:
    known = [one.name for one in signal.Signals]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not the name of a signal here{did_you_mean(name, known)}")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} ends or stops a run at once; leave it out ('SIGTERM' and 'SIGUSR1' are usual)")
    return names


def _as_text(value: Any) -> Any:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return path if isinstance(path, str) else value  # one of bytes is refused as such


Folder = Annotated[str, BeforeValidator(_as_text)]
"""A string, or a path, which becomes one."""


class CheckpointConfig(Options):
    """`checkpoint`. The shorthand is the directory."""

    directory: Annotated[Folder, Field(min_length=1)]
    """A folder that all ranks share; created if needed."""
    every: PositiveInt | None = None
    """Updates between two saves; None: save only when the run is told to end."""
    keep: PositiveInt | None = 3
    """How many checkpoints to keep; None: all."""
    in_background: bool = True
    """Whether training continues during a save. A run that is told to end waits for its last save."""
    signals: Annotated[Names, AfterValidator(_check_signals)] = ("SIGTERM", "SIGUSR1")
    """Signals that tell a run to end: it saves after the current step, and exits with status 75."""


def expand_automatic(value: Any) -> Any:
    """The shorthand form as the long one."""
    if value is None or isinstance(value, (Mapping, CheckpointConfig)):
        return dict(value) if isinstance(value, Mapping) else value
    value = _as_text(value)
    if isinstance(value, str) and value:
        return {"directory": value}
    recomputes = "; to compute activations again in backward, set activation_checkpoint" if value is True else ""
    raise ValueError(f"{show(value)} is not a folder; write 'checkpoints' or dict(directory='checkpoints'){recomputes}")
