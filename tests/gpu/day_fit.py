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

from halfmesh.amp.float8 import Float8Product, has_float8

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
        "versions": versions,
        "packages": packages,
        "memory and disk": partial(memory, page),
        "a product in bf16": partial(product, page.device),
        "products in float8": partial(float8_products, page.device),
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


def versions() -> Sequence[Any]:
    found = {"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    if torch.cuda.is_available() and hasattr(torch.cuda, "nccl"):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11) or sys.version_info < (3, 11):
        raise RuntimeError(f"{found}: too old")
    return [", ".join(f"{name} {text}" for name, text in found.items())]


def packages() -> Sequence[Any]:
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RuntimeError(f"{name} cannot be imported: {error}; carry its wheel") from error
    missing = [name for name in OPTIONAL if find_spec(name) is None]
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "cc", "clang"))):
        missing.append("a C++ compiler")
    return [f"pydantic {version('pydantic')}; not here: {', '.join(missing) or 'nothing'}"]


def memory(page: Page) -> Sequence[Any]:
    disk = shutil.disk_usage(tempfile.gettempdir()).free / GIB
    if page.rehearses:
        return [f"{disk:.0f} GiB of disk"]
    free, total = (value / GIB for value in torch.cuda.mem_get_info(page.device))
    text = f"{free:.0f} of {total:.0f} GiB of the device, {disk:.0f} GiB of disk"
    if free < min(FREE, 0.9 * total) or disk < DISK:
        raise RuntimeError(f"{text} are free: is something else running here?")
    return [text]


def product(device: torch.device) -> Sequence[Any]:
    a, b = (torch.randn(512, 512, device=device).bfloat16() for _ in range(2))
    return [_difference(torch.matmul(a, b), torch.matmul(a.cpu().double(), b.cpu().double()), 0.01)]


def float8_products(device: torch.device) -> Sequence[Any]:
    if find_spec("torchao") is None or (device.type == "cuda" and not has_float8(device)):
        return ["left out: it needs torchao, and a GPU that has float8"]
    found = {scaling: float8_product(device, scaling, 24) for scaling in ("tensorwise", "rowwise")}
    return ["; ".join(f"{scaling} {', '.join(differences)}" for scaling, differences in found.items())]


def float8_product(device: torch.device, scaling: Any, rows: int) -> list[str]:
    """The differences of a layer's output and gradients from the same product in fp32. Raises RuntimeError if one is
    more than rounding."""
    x, weight = (torch.randn(size, 64, device=device).bfloat16().requires_grad_() for size in (rows, 128))
    results = []
    for emulate in ("auto", True):
        output = Float8Product(scaling, emulate)(x, weight)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), [x, weight])])
    return [_difference(mine, other, 0.02) for mine, other in zip(*results, strict=True)]


def _difference(found: torch.Tensor, expected: torch.Tensor, most: float) -> str:
    """Relative, in norm. Raises RuntimeError if it is more than `most`, or no number."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    difference = ((found - expected).norm() / expected.norm()).item()
    if not difference <= most:
        raise RuntimeError(f"a relative difference of {difference:.2g}, and at most {most:g} by rounding")
    return f"{difference:.1e}"
