"""A training engine for PyTorch: one config chooses precision and parallel layout, and your loop stays.

    engine = halfmesh.initialize(model, optimizer, criterion, dataloader, config="config.py")
    for x, y in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()

Public names are imported when first used, so `import halfmesh` costs little more than `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors, which take `X as X` for public; at run time `__getattr__` finds them
    from . import compat as compat
    from . import hooks as hooks
    from . import nn as nn
    from .amp.o1 import float_function as float_function
    from .amp.o1 import half_function as half_function
    from .amp.o1 import promote_function as promote_function
    from .amp.plugin import AMP_PLUGINS as AMP_PLUGINS
    from .amp.plugin import AMP_TYPE as AMP_TYPE
    from .amp.plugin import AMPPlugin as AMPPlugin
    from .amp.plugin import Composes as Composes
    from .amp.recipe import LossScale as LossScale
    from .amp.recipe import Recipe as Recipe
    from .amp.step_result import StepResult as StepResult
    from .config import Config as Config
    from .config.load import load_config as load_config
    from .data.loader import get_dataloader as get_dataloader
    from .debug.nonfinite import Diagnosis as Diagnosis
    from .debug.precision import PrecisionReport as PrecisionReport
    from .engine.convert_to_amp import convert_to_amp as convert_to_amp
    from .engine.deferred import deferred_init as deferred_init
    from .engine.deferred import model_creation as model_creation
    from .engine.engine import Engine as Engine
    from .engine.initialize import initialize as initialize
    from .engine.launch import Launch as Launch
    from .engine.launch import get_default_parser as get_default_parser
    from .engine.launch import launch as launch
    from .engine.launch import launch_from_openmpi as launch_from_openmpi
    from .engine.launch import launch_from_slurm as launch_from_slurm
    from .engine.launch import launch_from_torch as launch_from_torch
    from .engine.lr_scheduler import CosineAnnealingWarmupLR as CosineAnnealingWarmupLR
    from .engine.lr_scheduler import LinearWarmupLR as LinearWarmupLR
    from .engine.lr_scheduler import MultiStepWarmupLR as MultiStepWarmupLR
    from .engine.lr_scheduler import PolynomialWarmupLR as PolynomialWarmupLR
    from .errors import EXIT_PREEMPTED as EXIT_PREEMPTED
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import HalfmeshError as HalfmeshError
    from .errors import IncompatibleConfigError as IncompatibleConfigError
    from .errors import InputError as InputError
    from .errors import LaunchError as LaunchError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import Preempted as Preempted
    from .errors import RegistryError as RegistryError
    from .errors import SyncError as SyncError
    from .options import Options as Options
    from .parallel.mesh import ParallelContext as ParallelContext
    from .parallel.pipeline.partition import BlockPartition as BlockPartition
    from .parallel.pipeline.partition import Call as Call
    from .parallel.pipeline.partition import Piece as Piece
    from .parallel.registries import AXES as AXES
    from .parallel.registries import DATA_STRATEGIES as DATA_STRATEGIES
    from .parallel.registries import PARTITIONERS as PARTITIONERS
    from .parallel.registries import SCHEDULES as SCHEDULES
    from .parallel.registries import TENSOR_PLANS as TENSOR_PLANS
    from .parallel.registries import TENSOR_STYLES as TENSOR_STYLES
    from .parallel.tensor.plans import LayerPlan as LayerPlan
    from .report.folder import RunFolder as RunFolder
    from .report.page import write_report as write_report
    from .trainer.batch import Outcome as Outcome
    from .trainer.batch import compute_batch as compute_batch
    from .trainer.evaluation import shard_dataloader as shard_dataloader
    from .trainer.hook import HOOKS as HOOKS
    from .trainer.hook import Hook as Hook
    from .trainer.trainer import Trainer as Trainer
    from .utils.log import get_logger as get_logger
    from .utils.registry import Registry as Registry
    from .verify import VerifyReport as VerifyReport
    from .verify import verify as verify

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
    "parallel.pipeline.partition": "BlockPartition Call Piece",
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


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in (
            "compat",
            "hooks",
            "nn",
            "verify",
        ):  # modules that are used by their names, without a separate import
            return importlib.import_module(f".{name}", __name__)
        if name not in _MODULE_OF:
            did_you_mean = importlib.import_module(".errors", __name__).did_you_mean
            raise AttributeError(f"module 'halfmesh' has no attribute {name!r}{did_you_mean(name, __all__)}")
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
