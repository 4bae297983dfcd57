"""Where a rank is: which call of the engine, after which update, at which line of the user's code, and whether it waits
for another rank there. Looked up only when somebody asks; a step pays nothing for it."""

from __future__ import annotations

import inspect
import json
import linecache
import os
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch

WAITS = "waiting"
IN_BACKWARD = "waiting or computing"
"""In C++: Python does not see which."""
RUNS = "not waiting"
ENDED = "ended"
SAVE_THREAD = "halfmesh save"
"""The name of the thread that writes a checkpoint beside training."""

_LONGEST = 100
"""Characters of a source line."""
_COMMUNICATES = re.compile(
    r"\bdist\.|\.wait\(|time\.sleep|all_reduce|all_gather|reduce_scatter|broadcast|gather_objects"
)
_WAITS_FOR_WORK = re.compile(r"\.wait\(")
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep
_INSTALLED = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_IN_ENGINE = tuple(os.path.join(_OURS, "engine", name) for name in ("engine.py", "saving.py"))
_LOADER = os.path.join(_OURS, "engine", "dataloader.py")
_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")

Frames = Sequence[tuple[FrameType, int]]
"""Frames, the innermost last, with the number of the line that each is at."""


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Attributes:
        state: one of `WAITS`, `IN_BACKWARD`, `RUNS`, `ENDED`.
        call: what of halfmesh it is in ("engine.step()"); empty outside.
        updates: `global_step` of the engine that was called, or of all that are known.
        line: of the user's code ("train.py:41 in main: engine.step()").
        beside: the same of a save in the background, while there is one.
    """

    state: str
    call: str = ""
    updates: tuple[int, ...] = ()
    line: str = ""
    beside: str = ""

    def __str__(self) -> str:
        words = ["" if self.state == RUNS else self.state, f"in {self.call}" if self.call else ""]
        if self.updates:
            words.append(f"after update{'s' * (len(self.updates) > 1)} {', '.join(map(str, self.updates))}")
        where = " - ".join(filter(None, (", ".join(filter(None, words)), self.line)))
        return where + (f"; its save in the background is at {self.beside}" if self.beside else "")

    def dump(self) -> str:
        """As text, for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Position:
        """Undo `dump`."""
        fields = json.loads(text)
        return cls(**fields | {"updates": tuple(fields["updates"])})


class Whereabouts:
    """Where this process's rank is. Asked from another thread than the main one, which trains."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: Position | None = None

    def watch(self, engine: Any) -> None:
        """Count the updates of `engine` (its `global_step`), as long as it lives."""
        self._engines.add(engine)

    def here(self) -> Position:
        """Where it is now, or was when it stopped."""
        return self._last or self._find(_of_thread(threading.main_thread()))

    def stop_at(self, error: BaseException) -> None:
        """It stays where `error` was raised, for which it has waited."""
        found = self._find(_of_error(error))
        self._last = replace(found, state=WAITS)

    def ended(self) -> Position:
        """What there is to say once it has ended without an error."""
        return Position(ENDED, updates=self._updates())

    def _find(self, frames: Frames) -> Position:
        if not frames:
            return Position(RUNS, updates=self._updates())
        ours = next((frame for frame, _ in frames if _is_ours(frame)), None)
        called = None if ours is None else ours.f_locals.get("self")
        step = getattr(called, "global_step", None)
        updates = (step,) if isinstance(step, int) else self._updates()
        return Position(_state(*frames[-1]), _name(ours), updates, _describe(*_of_user(frames)), _beside())

    def _updates(self) -> tuple[int, ...]:
        return tuple(sorted((engine.global_step for engine in list(self._engines)), reverse=True))


def _beside() -> str:
    for thread in threading.enumerate():
        if thread.name == SAVE_THREAD and (frames := _of_thread(thread)):
            return _describe(*_of_user(frames))
    return ""


def _of_thread(thread: threading.Thread) -> Frames:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _of_error(error: BaseException) -> Frames:
    trace, frames = error.__traceback__, []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _of_user(frames: Frames) -> tuple[FrameType, int]:
    """The innermost frame of the user's own code; failing that, of what is neither torch's nor ours."""

    def innermost(excluded: Iterable[str]) -> Iterator[tuple[FrameType, int]]:
        hidden = (*excluded, "<frozen")
        return (pair for pair in reversed(frames) if not pair[0].f_code.co_filename.startswith(hidden))

    for excluded in ((_OURS, _TORCH, *_INSTALLED), (_OURS, _TORCH)):
        found = next(innermost(excluded), None)
        if found is not None:
            return found
    return frames[-1]


def _state(frame: FrameType, number: int) -> str:
    file = frame.f_code.co_filename
    if file.startswith(os.path.join(_TORCH, "distributed")):
        return WAITS
    if file == _BACKWARD:
        return IN_BACKWARD
    words = _COMMUNICATES if _is_ours(frame) else _WAITS_FOR_WORK
    return WAITS if words.search(linecache.getline(file, number)) else RUNS


def _name(frame: FrameType | None) -> str:
    """What the user called."""
    if frame is None:
        return ""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if file == _LOADER:
        return "engine.dataloader"
    if file in _IN_ENGINE:
        return "engine(...)" if function == "__call__" else f"engine.{function}()"
    return f"halfmesh ({function})"


def _describe(frame: FrameType, number: int) -> str:
    file = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    text = linecache.getline(file, number).strip()
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return f"{file.removeprefix(here)}:{number} in {frame.f_code.co_name}{f': {text}' if text else ''}"
