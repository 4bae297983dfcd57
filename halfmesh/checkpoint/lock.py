"""One job saves into a folder: it is locked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from ..errors import CheckpointError, cut
from ..log import get_logger

_log = get_logger(__name__)

LOCK = ".lock"
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


class FolderLocks:
    """The folders that one engine saves into, locked until `release` or the end of the process, however it ends: a
    second job would remove the unfinished saves and the checkpoints of the first.

    POSIX locks belong to a process: several engines of one process share a folder, and forked DataLoader workers that
    outlive it do not keep it locked (with `flock` it would be the other way round).
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[str] | None] = {}

    def take(self, folder: Path) -> None:
        """Lock `folder`, which is made if it is not there. Call this before each save: the lock is lost when another
        engine of this process releases it.

        Raises:
            CheckpointError: another process saves into it.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = self._files[folder] if folder in self._files else open(folder / LOCK, "a+")  # noqa: SIM115
            self._files[folder] = file
            if file is not None:
                _lock(file, folder)
        except OSError as error:
            self._files[folder] = None
            _log.warning("%s cannot be locked (%s); make sure that no other job saves there", folder, error)

    def release(self) -> None:
        """Let other jobs save."""
        for file in self._files.values():
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._files.clear()


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise CheckpointError(
            f"another job saves into {folder} ({cut(file.read(200)) or 'it left no name'}), and each would remove "
            "checkpoints of the other; end that job first, or give this one another folder. (If that job and its "
            f"machine are gone, remove {folder / LOCK}.)"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: locked without a name
        job = next((f"{key} {os.environ[key]}, " for key in _JOB_IDS if key in os.environ), "")
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.truncate(0)
        file.write(f"{job}process {os.getpid()} on {socket.gethostname()}, since {since}")
        file.flush()
