"""`halfmesh env`: what a bug report needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterable
from typing import Annotated, Any

import typer

PACKAGES = (
    *("pydantic", "safetensors", "tensorboard", "timm", "transformers"),
    *("accelerate", "lightning-fabric", "deepspeed", "apex"),
)
"""Beside those that torch's report lists."""
VARIABLES = (
    *("CUDA_", "GLOO_", "HALFMESH_", "KMP_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "SLURM_JOB_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
"""How the names of variables begin that change what torch does."""


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, devices and variables, for a bug report.

    After halfmesh's own lines follows the report of torch.utils.collect_env, which takes some seconds.
    """
    from torch.utils.collect_env import get_env_info, pretty_str

    found = describe()
    if as_json:
        print(json.dumps(found | {"torch": get_env_info()._asdict()}, indent=2))
        return
    for name, value in found.items():
        print(f"{name}: {value if isinstance(value, str) else ', '.join(_words(value)) or 'none'}")
    print(f"\n{pretty_str(get_env_info())}")


def _words(value: Any) -> Iterable[str]:
    return [f"{key} {item}" for key, item in value.items()] if isinstance(value, dict) else value


def describe() -> dict[str, Any]:
    """By name: a text, a list of texts, or texts by name."""
    import torch.distributed as dist

    from ..amp.plugin import AMP_PLUGINS
    from ..parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS, TENSOR_STYLES
    from ..trainer.hook import HOOKS
    from ..version import __version__

    registries = (AMP_PLUGINS, AXES, DATA_STRATEGIES, TENSOR_STYLES, TENSOR_PLANS, PARTITIONERS, SCHEDULES, HOOKS)
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "halfmesh": __version__,
        "backends": [
            name for name in ("nccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(name)
        ],
        "packages": packages,
        "plugins": [
            f"{registry.kind} {point.name} = {point.value}"
            for registry in registries
            for point in importlib.metadata.entry_points(group=registry.entry_point_group)
        ],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }
