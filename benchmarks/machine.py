"""Where and with what something was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("torch", "timm", "accelerate", "lightning-fabric", "deepspeed")


def describe(quick: bool = False) -> dict[str, str]:
    """One line for each thing that a reader would ask for."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "halfmesh": _commit(),
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}, one a process",
        "date": f"{datetime.date.today()}, load average at the start {load}",
    }
    return lines | ({"rounds": "A QUICK RUN: three short rounds each, to see that it works"} if quick else {})


def stamp(lines: Mapping[str, str]) -> str:
    """Of what `describe` gave: which commit was measured, and when."""
    return ", ".join(lines[name] for name in ("halfmesh", "date") if name in lines)


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


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--tags"]
    try:
        return f"commit {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        return f"version {_version('halfmesh')}"
