"""halfmesh: a training engine for PyTorch. Precision modes and parallel layouts from one config.

The public names are imported when first used, so that `import halfmesh` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` finds the same names
    from .amp.o1 import float_function, half_function, promote_function
    from .amp.plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin, Composes
    from .amp.recipe import LossScale, Recipe
    from .amp.step_result import StepResult
    from .config import Config
    from .config.load import load_config
    from .data.loader import get_dataloader
    from .debug.nonfinite import Diagnosis
    from .debug.precision import PrecisionReport
    from .engine.convert_to_amp import convert_to_amp
    from .engine.deferred import deferred_init, model_creation
    from .engine.engine import Engine
    from .engine.initialize import initialize
    from .engine.launch import (
        Launch,
        get_default_parser,
        launch,
        launch_from_openmpi,
        launch_from_slurm,
        launch_from_torch,
    )
    from .engine.lr_scheduler import (
        CosineAnnealingWarmupLR,
        LinearWarmupLR,
        MultiStepWarmupLR,
        PolynomialWarmupLR,
    )
    from .errors import (
        EXIT_PREEMPTED,
        CheckpointError,
        ConfigError,
        HalfmeshError,
        IncompatibleConfigError,
        InputError,
        LaunchError,
        NonFiniteError,
        Preempted,
        RegistryError,
        SyncError,
    )
    from .options import Options
    from .parallel.mesh import ParallelContext
    from .parallel.pipeline.pieces import BlockPartition, Call, Piece
    from .parallel.registries import AXES, DATA_STRATEGIES, PARTITIONERS, SCHEDULES, TENSOR_PLANS, TENSOR_STYLES
    from .parallel.tensor.plans import LayerPlan
    from .report.folder import RunFolder
    from .report.page import write_report
    from .trainer.batch import Outcome, compute_batch
    from .trainer.evaluation import shard_dataloader
    from .trainer.hook import HOOKS, Hook
    from .trainer.trainer import Trainer
    from .utils.log import get_logger
    from .utils.registry import Registry
    from .verify import VerifyReport, verify

__version__ = "0.1.0"

_NAMES = {
    "amp.o1": "float_function half_function promote_function",
    "amp.plugin": "AMP_PLUGINS AMP_TYPE AMPPlugin Composes",
    "amp.recipe": "LossScale Recipe",
    "amp.step_result": "StepResult",
    "engine.initialize": "initialize",
    "config": "Config",
    "config.load": "load_config",
    "engine.convert_to_amp": "convert_to_amp",
    "engine.deferred": "deferred_init model_creation",
    "data.loader": "get_dataloader",
    "engine.engine": "Engine",
    "debug.nonfinite": "Diagnosis",
    "debug.precision": "PrecisionReport",
    "engine.lr_scheduler": "CosineAnnealingWarmupLR LinearWarmupLR MultiStepWarmupLR PolynomialWarmupLR",
    "errors": (
        "EXIT_PREEMPTED CheckpointError ConfigError HalfmeshError IncompatibleConfigError InputError "
        "LaunchError NonFiniteError Preempted RegistryError SyncError"
    ),
    "engine.launch": "Launch get_default_parser launch launch_from_openmpi launch_from_slurm launch_from_torch",
    "utils.log": "get_logger",
    "options": "Options",
    "parallel.mesh": "ParallelContext",
    "parallel.pipeline.pieces": "BlockPartition Call Piece",
    "parallel.registries": "AXES DATA_STRATEGIES PARTITIONERS SCHEDULES TENSOR_PLANS TENSOR_STYLES",
    "parallel.tensor.plans": "LayerPlan",
    "utils.registry": "Registry",
    "report.folder": "RunFolder",
    "report.page": "write_report",
    "trainer.hook": "HOOKS Hook",
    "trainer.evaluation": "shard_dataloader",
    "trainer.batch": "Outcome compute_batch",
    "trainer.trainer": "Trainer",
    "verify": "VerifyReport verify",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in ("compat", "hooks", "nn", "verify"):  # modules that are used by their names, without a separate import
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        did_you_mean = importlib.import_module(".errors", __name__).did_you_mean
        raise AttributeError(f"module 'halfmesh' has no attribute {name!r}{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
