"""Loggers that know their rank: by default only rank 0 logs.

A library must not configure logging, yet users who never set it up have to see the plan of their run. So:
- the logger "halfmesh" has level INFO unless the user gave it one, and propagates as usual;
- if the user (or pytest, absl, ...) has installed a handler, on the root or on "halfmesh", the records go only there; a
  `logging.NullHandler` on "halfmesh" with `propagate = False` silences them;
- if there is no handler at all, the text goes to stderr. halfmesh installs no handler, so nothing is printed twice.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass


class Listener(logging.Handler):
    """Base of handlers that only collect records: if there is no other handler, the text still goes to stderr."""


@dataclass(frozen=True)
class RankLogger:
    """The methods of `logging.Logger`, with `ranks`: the ranks that log (default: rank 0), or None for all."""

    logger: logging.Logger

    def debug(self, message: str, *args: object, ranks: Sequence[int] | None = (0,)) -> None:
        self._log(logging.DEBUG, message, args, ranks)

    def info(self, message: str, *args: object, ranks: Sequence[int] | None = (0,)) -> None:
        self._log(logging.INFO, message, args, ranks)

    def warning(self, message: str, *args: object, ranks: Sequence[int] | None = (0,)) -> None:
        self._log(logging.WARNING, message, args, ranks)

    def error(self, message: str, *args: object, ranks: Sequence[int] | None = (0,)) -> None:
        self._log(logging.ERROR, message, args, ranks)

    def _log(self, level: int, message: str, args: tuple[object, ...], ranks: Sequence[int] | None) -> None:
        rank, world_size = rank_and_world_size()
        if (ranks is not None and rank not in ranks) or not self.logger.isEnabledFor(level):
            return
        if world_size > 1:
            message = f"[rank {rank}] {message}"
        if self.logger.hasHandlers():
            self.logger.log(level, message, *args, stacklevel=3)
        if not _is_shown(self.logger):
            _print(self.logger, level, message, args)


def get_logger(name: str = "halfmesh") -> RankLogger:
    """The logger `name`. The top one ("halfmesh") gets level INFO if it has no level yet."""
    top = logging.getLogger(name.partition(".")[0])
    if top.level == logging.NOTSET:
        top.setLevel(logging.INFO)
    return RankLogger(logging.getLogger(name))


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) from the process group, else from torchrun's RANK and WORLD_SIZE, else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")  # if it is not imported, there is no group
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:  # launching.py refuses such values; a message must not fail because of them
        return 0, 1


def _is_shown(logger: logging.Logger) -> bool:
    """Whether the user has installed a handler that shows records."""
    at: logging.Logger | None = logger
    while at is not None:
        if any(not isinstance(handler, Listener) for handler in at.handlers):
            return True
        at = at.parent if at.propagate else None
    return False


def _print(logger: logging.Logger, level: int, message: str, args: tuple[object, ...]) -> None:
    record = logging.LogRecord(logger.name, level, "", 0, message, args, None)
    if logger.filter(record):
        handler = logging.StreamHandler(sys.stderr)  # made here, because sys.stderr may be replaced at any time
        prefix = "" if level <= logging.INFO else f"{logging.getLevelName(level)}: "
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
        handler.handle(record)
        handler.close()
