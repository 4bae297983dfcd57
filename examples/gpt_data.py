"""The text of train_gpt.py: bytes of files in a fixed order, the last of them held out, and windows of them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset

HELD_OUT_SHARE = 10  # one byte in ten, at the end
NO_TEXT = "--data names a text file, or a folder of text files; without it Python's standard library is read"

Sample = tuple[torch.Tensor, torch.Tensor]


class MissingTextError(Exception):
    """There is no text, or too little; the message says where it was looked for and what to change."""


class Windows(Dataset[Sample]):
    """All windows of a text: (bytes, the byte after each of them), both int64 [context].

    Args:
        text: uint8 [bytes].
        context: bytes in a window.
    """

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(0, len(self.text) - self.context)

    def __getitem__(self, begin: int) -> Sample:
        if not 0 <= begin < len(self):  # what ends a `for` over them; slices never fail
            raise IndexError(f"window {begin} of {len(self)}")
        window = self.text[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


@dataclass(frozen=True)
class GPTData:
    """Windows to draw from in training, and the same few ones for each validation."""

    train: Windows
    validation: Dataset[Sample]
    files: int
    size: int
    """Bytes in all."""


def load_text(path: Path | None, context: int, max_bytes: int, validation_windows: int) -> GPTData:
    """The text at `path`, at most `max_bytes` of it; its last tenth is held out for validation.

    Args:
        path: a file, or a folder: all files below it, in order of their names, but no hidden and no binary ones. None:
            the modules at the top of Python's standard library.

    Raises:
        MissingTextError: there is none, or too little for windows of `context` bytes.
    """
    texts = list(_read_files(path, max_bytes))
    joined = b"".join(texts)
    held_out = len(joined) // HELD_OUT_SHARE
    if held_out <= context:
        needed = (context + 1) * HELD_OUT_SHARE
        raise MissingTextError(
            f"{len(joined):,} bytes of text in {path or 'the standard library'} are too few for windows of {context} "
            f"bytes, also in the tenth that is held out: {needed:,} are needed.\nGive a longer text with --data, raise "
            f"--max-bytes (now {max_bytes:,}), or lower --context"
        )
    text = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    validation = Windows(text[-held_out:], context)
    count = min(validation_windows, len(validation))
    return GPTData(
        train=Windows(text[:-held_out], context),
        validation=Subset(validation, [i * len(validation) // count for i in range(count)]),  # evenly spread
        files=len(texts),
        size=len(text),
    )


def _read_files(path: Path | None, max_bytes: int) -> Iterator[bytes]:
    """What is in the files, until `max_bytes` have been read."""
    for file in _standard_library() if path is None else _files_at(path):
        read = _read(file, max_bytes)
        if b"\0" in read and file != path:
            continue  # no text has a zero byte, most other files do; a file that was named is taken as it is
        yield read
        max_bytes -= len(read)
        if max_bytes <= 0:
            return


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _sorted(folder, folder.glob("*.py"))
    if not files:
        raise MissingTextError(
            f"Python's standard library is not there as text: no .py file in {folder} (some systems pack it into an "
            "archive).\nGive any other text: --data names a file, or a folder of text files"
        )
    return files


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise MissingTextError(f"no file or folder {path}.\n{NO_TEXT}")
    files = _sorted(path, path.rglob("*"))
    if not files:
        raise MissingTextError(f"no file in {path}.\n{NO_TEXT}")
    return files


def _sorted(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files, without hidden ones, in an order that is the same on every machine."""
    named = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    return [named[name] for name in sorted(named) if not any(part.startswith(".") for part in name.split("/"))]


def _read(file: Path, most: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(most)
    except OSError as error:
        raise MissingTextError(f"{file} cannot be read: {error.strerror}.\n{NO_TEXT}") from error
