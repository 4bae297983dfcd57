"""Compile device.cpp: `python -m tests.simulated_gpu.build FOLDER`, with a build of torch without CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import load


def build(folder: str) -> None:
    """Make FOLDER/simulated_gpu.so, unless it is newer than its source."""
    if torch.backends.cuda.is_built():
        sys.exit(f"torch {torch.__version__} is built for CUDA; install one that is not, 2.13.0+cpu say")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja
    Path(folder).mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("device.cpp")
    load("simulated_gpu", [str(source)], build_directory=folder, extra_cflags=["-O1"], is_python_module=False)


if __name__ == "__main__":
    build(sys.argv[1])
