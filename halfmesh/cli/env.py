"""`halfmesh env`: the facts for a bug report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

PACKAGES = (
    *("pydantic", "safetensors", "tensorboard", "timm", "transformers"),
    *("accelerate", "lightning-fabric", "deepspeed", "apex"),
)
"""Packages besides those in torch's report."""
VARIABLES = (
    *("CUDA_", "GLOO_", "HALFMESH_", "KMP_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "SLURM_JOB_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
"""Prefixes of the environment variables that change torch's behaviour."""


def env() -> None:
    """Print what a bug report needs.

    That is versions, devices and environment variables. The report of torch.utils.collect_env comes last; it takes some
    seconds.
    """
    from torch.utils.collect_env import get_pretty_env_info

    for name, texts in describe().items():
        print(f"{name}: {', '.join(texts) or 'none'}")
    print(f"\n{get_pretty_env_info()}")


def describe() -> dict[str, list[str]]:
    """The lines of the report: texts by name."""
    import torch.distributed as dist

    from .. import __version__
    from ..amp.plugin import AMP_PLUGINS
    from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS, TENSOR_STYLES
    from ..trainer.hook import HOOKS

    registries = (AMP_PLUGINS, AXES, DATA_STRATEGIES, TENSOR_STYLES, TENSOR_PLANS, PARTITIONERS, SCHEDULES, HOOKS)
    packages = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    return {
        "halfmesh": [__version__],
        "backends": [
            name for name in ("nccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(name)
        ],
        "packages": packages,
        "plugins": [
            f"{registry.kind} {point.name} = {point.value}"
            for registry in registries
            for point in importlib.metadata.entry_points(group=registry.entry_point_group)
        ],
        "variables": [f"{name} {value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)],
    }
