"""`halfmesh env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated, Any

import typer

PACKAGES = (
    *("numpy", "pydantic", "safetensors", "torchmetrics", "tensorboard", "timm", "torchvision", "transformers"),
    *("accelerate", "lightning-fabric", "deepspeed", "apex"),
)
VARIABLES = (
    "CUDA_",
    "GLOO_",
    "HALFMESH_",
    "KMP_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "SLURM_JOB_",
)
"""How the names of variables begin that change what torch does."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, devices and variables, for a bug report."""
    found = describe()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            value = "".join(f"\n  {key} {item}" for key, item in value.items()) or " none"
            print(f"{name}:{value}")
        elif isinstance(value, list):
            print(f"{name}:{''.join(f'{chr(10)}  {item}' for item in value) or ' none'}")
        else:
            print(f"{name}: {value}")


def describe() -> dict[str, Any]:
    """By name: a text, a list of texts, or texts by name."""
    import torch
    import torch.distributed as dist

    from ..amp.plugin import AMP_PLUGINS
    from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS, TENSOR_STYLES
    from ..trainer.named_hooks import HOOKS
    from ..version import __version__

    registries = (AMP_PLUGINS, AXES, DATA_STRATEGIES, TENSOR_STYLES, TENSOR_PLANS, PARTITIONERS, SCHEDULES, HOOKS)
    backends = [name for name in ("nccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    return {
        "halfmesh": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "backends": ", ".join(backends) or "none",
        "devices": _devices(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "plugins": [
            f"{registry.kind} {point.name} = {point.value}"
            for registry in registries
            for point in importlib.metadata.entry_points(group=registry.entry_point_group)
        ],
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES) or name in LAUNCHED
        },
    }


def _devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"compute capability {device.major}.{device.minor}"
        found.append(f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB, {capability}")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
