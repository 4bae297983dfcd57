"""Where and with what something was measured, and the page that tells it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halfmesh

PACKAGES = ("torch", "timm", "accelerate", "lightning-fabric", "deepspeed")


def describe() -> dict[str, str]:
    """Processor, versions, commit and date."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "halfmesh": _find_commit(),
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}, one a process",
        "date": f"{datetime.date.today()}, load average at the start {load}",
    }


def in_one_line(machine: dict[str, str]) -> str:
    """Of `describe`, what a short page needs."""
    return f"{machine['halfmesh']}, torch {machine['torch']}, {machine['processor']}, {machine['date'][:10]}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def publish(out: Path | None, *paragraphs: str) -> None:
    """Write the page, or print it."""
    text = "\n\n".join(paragraphs) + "\n"
    if out is None:
        print(text)
    else:
        out.write_text(text)


def _find_commit() -> str:
    """The last commit that changed the imported halfmesh, and whether it has changed since."""
    package = Path(halfmesh.__file__).parent
    try:
        commit = _git(package, "log", "-1", "--format=%h", "--", ".")
        return f"commit {commit}" + (", changed since" if _git(package, "status", "--short", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"version {_version('halfmesh')}"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
