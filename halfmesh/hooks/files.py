"""Files of a run that goes on."""

from __future__ import annotations

import os
from pathlib import Path

from ..log import get_logger

_log = get_logger(__name__)


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`: the whole of it, or what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.tmp")
    new.write_text(text)
    os.replace(new, path)


def set_aside(path: Path) -> None:
    """Rename `path`, which is another run's, if it is there and not empty."""
    if not path.exists() or not path.stat().st_size:
        return
    number = 1
    while (old := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(old)
    _log.info("%s was there already, and is %s now", path, old.name)
