"""Step 0 of `day.py`: in seconds, what would spoil every other step; then what `halfmesh verify --quick` says."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .day import Page

FIT_FAILURE = "something that every other step needs, and a mode that does not compute what it should."
NEEDED = ("pydantic", "typer", "rich", "yaml", "jinja2", "numpy", "pytest", "pytest_timeout")
OPTIONAL = ("timm", "torchao", "triton", "transformers", "torchmetrics", "safetensors")
GIB = 2**30
FREE, DISK = 64, 8
"""GiB that the largest cases take of the device, and of the disk."""


def find_what_is_unfit(page: Page) -> None:
    page.columns = ["check", "result"]
    checks: dict[str, Callable[[], Sequence[Any]]] = {
        "versions and packages": packages,
        "memory and disk": partial(memory, page),
    }
    for name, check in checks.items():
        page.case(name, check)
    if page.failures:
        return
    from halfmesh.verify.machine import verify_machine

    for cell, report, seconds in verify_machine(page.device.type, quick=True).results:
        if not report.equal:
            page.fail(f"{cell.row}, {cell}: {report.first or report.problems}")
        result = "equal" if report.equal else "differs, or rejected"
        page.add(f"verify: {cell.row}, {cell}", f"{result}, {seconds:.1f} s")


def packages() -> Sequence[Any]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "-"
    found = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11) or sys.version_info < (3, 11):
        raise RuntimeError(f"{found}: too old")
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RuntimeError(f"{name} cannot be imported: {error}; carry its wheel") from error
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "cc", "clang"))):
        missing.append("a C++ compiler")
    return [f"{found}, pydantic {version('pydantic')}; not here: {', '.join(missing) or 'nothing'}"]


def memory(page: Page) -> Sequence[Any]:
    disk = shutil.disk_usage(tempfile.gettempdir()).free / GIB
    if page.rehearses:
        return [f"{disk:.0f} GiB of disk"]
    free, total = (value / GIB for value in torch.cuda.mem_get_info(page.device))
    text = f"{free:.0f} of {total:.0f} GiB of the device, {disk:.0f} GiB of disk"
    if free < min(FREE, 0.9 * total) or disk < DISK:
        raise RuntimeError(f"{text} are free: is something else running here?")
    return [text]
