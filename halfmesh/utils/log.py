"""Loggers for distributed runs, in which only rank 0 logs by default.

A library must not configure logging, but users who never set it up should see the plan of their run. So the logger
"halfmesh" has level INFO unless the user sets one. halfmesh installs no handler: if the user has none, the text goes to
stderr. To silence it, add a `logging.NullHandler` to "halfmesh" and set `propagate = False`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any


class Listener(logging.Handler):
    """Base class of handlers that only collect records: without another handler, the text still goes to stderr."""


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take `ranks`: the ranks that log. Default: rank 0; None: all ranks."""

    def log(  # type: ignore[override]  # `ranks` comes through the other methods' **kwargs
        self, level: int, msg: object, *args: object, ranks: Sequence[int] | None = (0,), **kwargs: Any
    ) -> None:
        rank, world_size = rank_and_world_size()
        if (ranks is not None and rank not in ranks) or not self.logger.isEnabledFor(level):
            return
        if world_size > 1:
            msg = f"[rank {rank}] {msg}"
        if self.logger.hasHandlers():
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
        if not _is_shown(self.logger):
            record = logging.LogRecord(self.logger.name, level, "", 0, msg, args, None)
            prefix = "" if level <= logging.INFO else f"{logging.getLevelName(level)}: "
            if self.logger.filter(record):
                print(f"{prefix}{record.getMessage()}", file=sys.stderr)


def get_logger(name: str = "halfmesh") -> RankLogger:
    """Return the logger `name` with methods that take `ranks`, the ranks that log (default: rank 0; None: all ranks).

    The top-level logger of that name ("halfmesh") gets level INFO if it has no level yet. With several ranks each
    message begins with "[rank N]". If no handler is installed, the text goes to stderr.

        get_logger().info("done", ranks=(0, 3))
    """
    top = logging.getLogger(name.partition(".")[0])
    if top.level == logging.NOTSET:
        top.setLevel(logging.INFO)
    return RankLogger(logging.getLogger(name), None)


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) from the process group, else from torchrun's RANK and WORLD_SIZE, else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")  # if it is not imported, there is no group
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:  # launching rejects such values; a message must not fail because of them
        return 0, 1


def _is_shown(logger: logging.Logger) -> bool:
    """Return True if the user has installed a handler that shows records."""
    if any(not isinstance(handler, Listener) for handler in logger.handlers):
        return True
    return logger.propagate and logger.parent is not None and _is_shown(logger.parent)
