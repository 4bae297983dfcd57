"""halfmesh: a training engine for PyTorch. Any precision mode with any parallel layout, from one config.

The public names are imported when first used, so that `import halfmesh` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "AMP_PLUGINS": "amp.plugin",
    "AMP_TYPE": "amp.plugin",
    "AMPPlugin": "amp.plugin",
    "Composes": "amp.plugin",
    "Config": "config",
    "ConfigError": "errors",
    "CosineAnnealingWarmupLR": "engine.lr_schedulers",
    "DATA_STRATEGIES": "parallel.registries",
    "Engine": "engine.engine",
    "HOOKS": "engine.registries",
    "HalfmeshError": "errors",
    "IncompatibleConfigError": "errors",
    "InputError": "errors",
    "Launch": "launching",
    "LaunchError": "launching",
    "LinearWarmupLR": "engine.lr_schedulers",
    "LossScale": "amp.recipe",
    "MultiStepWarmupLR": "engine.lr_schedulers",
    "NonFiniteError": "errors",
    "Options": "options",
    "PARTITIONERS": "parallel.registries",
    "ParallelContext": "parallel.context",
    "PolynomialWarmupLR": "engine.lr_schedulers",
    "Recipe": "amp.recipe",
    "Registry": "registry",
    "RegistryError": "errors",
    "SCHEDULES": "parallel.registries",
    "StepResult": "amp.result",
    "TENSOR_PLANS": "parallel.registries",
    "TENSOR_STYLES": "parallel.registries",
    "get_dataloader": "engine.dataloader",
    "get_default_parser": "launching",
    "get_logger": "log",
    "initialize": "assembly",
    "launch": "launching",
    "launch_from_openmpi": "launching",
    "launch_from_slurm": "launching",
    "launch_from_torch": "launching",
    "load_config": "config.load",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        from .errors import did_you_mean

        raise AttributeError(f"module 'halfmesh' has no attribute {name!r}{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
