"""What is saved besides tensors, in files that are read without running code: counters, settings, random numbers."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from .forms import refuse_misfits

COMMON = "common.pt"


def rank_file(rank: int) -> str:
    """The name of the file with what only this rank has."""
    return f"rank-{rank:05d}.pt"


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """Plain values and tensors as they stand in a file.

    Raises:
        InputError: something in `content` is an object that only code could make again.
    """
    for key, value in content.items():
        refuse_objects(key, value)
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> None:
    """Write what `as_bytes` made; on disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, form: Mapping[str, Any]) -> dict[str, Any]:
    """What `as_bytes` was given, on the CPU.

    Raises:
        CheckpointError: it is not of that form.
    """
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    refuse_misfits(path.name, content, form)
    return content


def refuse_objects(key: str, value: Any) -> None:
    """Raise InputError if `value`, the state of `key`, could not be read again."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"the state of {key} holds objects that are not plain values or tensors, which are not read back because "
            f"that could run code ({reason}); keep them out of its state_dict, or save them yourself"
        ) from error
