"""The exceptions of halfmesh, and helpers to write their messages.

Every message has the given value, the reason, the allowed values, and what to change.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

EXIT_PREEMPTED = 75
"""Exit status of a preempted process that has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

NO_BATCH = (
    "the dataloader has no batch for this rank; give it at least batch_size x data ranks samples, or set "
    "drop_last=False"
)

_INNER = rf"{re.escape(str(Path(__file__).parent))}{re.escape(os.sep)}|.*site-packages.torch\b|<frozen"
_INNER_FRAMES = re.compile(rf'^  File "(?:{_INNER}).*, in .*\n(?:    .*\n)*', re.MULTILINE)
_NO_FRAMES = re.compile(r"^Traceback .*\n(?=\S)", re.MULTILINE)


class HalfmeshError(Exception):
    """Base class of every error that halfmesh raises on purpose (but not of `Preempted`, a `SystemExit`)."""


class ConfigError(HalfmeshError, ValueError):
    """The config cannot be read, or has keys or values that are not allowed.

    What to do: change the config as each line says. `halfmesh check config.py --world-size N` tries it without running.

    Attributes:
        problems: one line per mistake.
        source: the config's name.
    """

    def __init__(self, problems: Sequence[str], source: str = "the config") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(problem_list(self.problems, source))


class IncompatibleConfigError(ConfigError):
    """Each key is valid alone, but not in this combination, or not with this device or model.

    What to do: each line names what to use instead. Raised before anything is changed, on every rank.
    """


class InputError(HalfmeshError, ValueError):
    """The model, optimizer, criterion, dataloader or a call on the engine does not fit.

    What to do: change the argument or the call as the message says. `initialize` leaves what it rejects untouched.
    """


class RegistryError(HalfmeshError, LookupError):
    """A name is not registered, or is registered already, or its object cannot be imported.

    What to do: use a registered name (the message has the nearest), or install the package that has it.
    """


class LaunchError(HalfmeshError, RuntimeError):
    """The environment does not describe a process group, or the group cannot be created.

    What to do: use the launcher that the message names, or correct the variables that it names.
    """


class CheckpointError(HalfmeshError, RuntimeError):
    """A checkpoint could not be written or read. Raised on all ranks.

    What to do: make room or give another folder (saving); take an older checkpoint (loading). Earlier checkpoints are
    unchanged.
    """


class NonFiniteError(HalfmeshError, RuntimeError):
    """Training hit inf or nan, and `on_nonfinite="raise"` or `max_consecutive_skips` stops it.

    What to do: read `diagnosis`, which names the layer and what to change.

    Attributes:
        diagnosis: a `halfmesh.Diagnosis`, where inf or nan appeared first, if an engine raised it; else None.
    """

    diagnosis: Any = None


class SyncError(HalfmeshError, RuntimeError):
    """The ranks differ in something that should be equal (`debug="sync"`). Raised on all ranks that compared it.

    What to do: find what only some ranks do between the last two steps; the message names what differs first.
    """


class Preempted(SystemExit):
    """A signal or `engine.preempt()` ended the run, and it has saved. Raised on all ranks after the same step.

    Ends the process with status `EXIT_PREEMPTED`, like `sys.exit(75)`; `finally` blocks run.

    Attributes:
        folder: the checkpoint.
    """

    _status = EXIT_PREEMPTED

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(self._status)
        self.folder = folder


class Interrupted(Preempted, KeyboardInterrupt):
    """Ctrl-C, or another SIGINT, ended the run, and it has saved; or it ended `Trainer.fit` at once, and `folder` is
    None. Raised like `Preempted`, but ends the process with status 130, as shells do for Ctrl-C.
    """

    _status = 130


def page(title: str) -> str:
    """A page of the documentation, by its title, for a message: an installed halfmesh does not have the pages."""
    return f"{title!r} in the documentation"


def bullet_list(title: str, lines: Iterable[str]) -> str:
    """`title`, then one indented line per item."""
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def problem_list(problems: Sequence[str], source: str) -> str:
    """The problems that were found in `source`, with their number."""
    return bullet_list(f"{counted(len(problems), 'problem')} in {source}:", problems)


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "8 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def find_near(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name nearest to `name`, or None if nothing is near (difflib ratio below `cutoff`)."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(str(name)[:200].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """`"; did you mean 'x'?"` when a known name is near, else the empty string.

    Args:
        others: names, lower case, and the known one that is meant; "" if none is.
    """
    near = others[str(name).lower()] if str(name).lower() in others else find_near(name, known)
    return f"; did you mean {near!r}?" if near else ""


_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 12
_REPR.maxstring = _REPR.maxother = 300


def show(value: object, most: int = 400) -> str:
    """`repr(value)` for a message, of at most `most` characters."""
    text = _REPR.repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def show_name(name: str, most: int = 120) -> str:
    """A name from the user: unchanged if it can be printed on one line, else as `show` writes it."""
    return name if name.isprintable() and len(name) <= most else show(name, most)


def cut(text: str, most: int = 400) -> str:
    """The text of another library's error: at most `most` characters, the unprintable ones escaped."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in short)


def shorten(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, comma separated, with a count of the rest."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def find_module(model: Any, error: BaseException) -> str:
    """The innermost module of `model` that ran when `error` was raised, for messages: "'blocks.0' (Block)"; "" if none
    did."""
    names = {id(m): f"{name or 'the model'!r} ({type(m).__name__})" for name, m in model.named_modules()}
    owners = [names.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in reversed(owners) if name), "")


def own_frames(text: str) -> str:
    """A traceback without the frames of halfmesh and torch."""
    return _NO_FRAMES.sub("", _INNER_FRAMES.sub("", text)).rstrip()


def reject_below(least: int, **arguments: object) -> None:
    """Raise InputError for an argument that is not an integer of `least` or more; None is allowed."""
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < least):
            raise InputError(f"{name}={show(value)}: expected a whole number, {least} or more")


def reject_closure(call: str, closure: object) -> None:
    """Raise InputError if `call` was given a closure, which torch's `optimizer.step` accepts."""
    if isinstance(closure, bool):
        raise InputError(f"{call}({closure}): name the argument: {call}(last={closure})")
    if closure is not None:
        raise InputError(
            f"{call}({show(closure)}): it takes no closure. Compute the loss in the loop, and call backward(loss) "
            "before each step; optimizers that recompute the loss inside a step, such as LBFGS, cannot be used"
        )


def readable(size: float) -> str:
    """`size` bytes in words: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
