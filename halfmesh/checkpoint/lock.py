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
    second job would remove the unfinished saves of the first, and its checkpoints.

    These are POSIX locks, which belong to a process: several engines of one process share a folder, and forked workers
    of a DataLoader that outlive it do not keep it locked (with `flock` it would be the other way round).
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[str] | None] = {}

    def take(self, folder: Path) -> None:
        """Lock `folder`, which is made if it is not there. To be called again before each save: the lock is lost when
        another engine of this process lets go of it.

        Raises:
            CheckpointError: another process saves into it.
        """
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK
        file = self._files.get(folder)
        if folder in self._files and file is None:
            return
        try:
            while True:
                if file is None or not _is_at(file, path):
                    file = self._files[folder] = open(path, "a+")  # noqa: SIM115 - open as long as it is locked
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    del self._files[folder]
                    raise CheckpointError(_refusal(folder, file)) from None
                if _is_at(file, path):  # else its last owner has removed it meanwhile
                    break
        except OSError as error:
            self._files[folder] = None
            _log.warning("%s cannot be locked (%s); see to it that no other job saves there", folder, error)
            return
        with contextlib.suppress(OSError):  # on a full disk it is locked without a name
            file.truncate(0)
            job = next((f"{key} {os.environ[key]}, " for key in _JOB_IDS if key in os.environ), "")
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"{job}process {os.getpid()} on {socket.gethostname()}, since {since}")
            file.flush()

    def release(self) -> None:
        """Let go of all folders."""
        for folder, file in self._files.items():
            if file is not None:
                with contextlib.suppress(OSError), file:
                    if _is_at(file, folder / LOCK):
                        (folder / LOCK).unlink()
        self._files.clear()


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _refusal(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    return (
        f"another job saves into {folder} ({cut(file.read(200)) or 'its name is not there'}), and each would remove "
        "checkpoints of the other; end that job first, or give this one another folder. (If that job is gone, and its "
        f"machine with it, remove {folder / LOCK}.)"
    )
