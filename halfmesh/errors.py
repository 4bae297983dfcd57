"""The exceptions of halfmesh and the words they share.

Every message gives the value that was given, the reason, what is allowed, and what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.health.diagnosis import Diagnosis

EXIT_PREEMPTED = 75
"""The status of a process that was told to end, and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""


class HalfmeshError(Exception):
    """Base class of every error that halfmesh raises on purpose."""


class ConfigError(HalfmeshError, ValueError):
    """The config cannot be used. `problems` holds one line per mistake, all of them at once."""

    def __init__(self, problems: Sequence[str], source: str = "the config") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(bullet_list(f"{len(self.problems)} problem(s) in {source}:", problems))


class IncompatibleConfigError(ConfigError):
    """Each key is valid by itself, but the combination (or the device, or the model given) is not."""


class InputError(HalfmeshError, ValueError):
    """The model, optimizer, criterion, dataloader or a call on the engine does not fit."""


class RegistryError(HalfmeshError, LookupError):
    """A name is not registered, or is registered twice."""


class LaunchError(HalfmeshError, RuntimeError):
    """The environment does not describe a process group, or the group cannot be made."""


class CheckpointError(HalfmeshError, RuntimeError):
    """A checkpoint could not be written, or what is there cannot be read."""


class NonFiniteError(HalfmeshError, RuntimeError):
    """Training met inf or nan and was told, or has to, stop. `diagnosis` says where, if an engine raised it."""

    diagnosis: Diagnosis | None = None


class SyncError(HalfmeshError, RuntimeError):
    """The ranks do not have in common what they should (`debug="sync"`); raised on all that compared it."""


class Preempted(SystemExit):
    """The run was told to end, by a signal or `engine.preempt()`, and has saved. Raised on all ranks after the same
    step.

    It ends the process with status `EXIT_PREEMPTED`, like `sys.exit(75)`; `finally` blocks run.

    Attributes:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.folder = folder


def bullet_list(title: str, lines: Iterable[str]) -> str:
    """`title`, then one indented line per item."""
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def find_near(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name nearest to `name`, or None if nothing is near (difflib ratio below `cutoff`)."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a known name is near, else the empty string."""
    near = find_near(name, known)
    return f"; did you mean {near!r}?" if near else ""


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, comma separated, with a count of the rest."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
