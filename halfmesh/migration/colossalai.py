"""Colossal-AI's legacy names over halfmesh, so that a script of its engine runs with its imports renamed.

    from halfmesh.migration import colossalai
    from halfmesh.migration.colossalai import Trainer, get_dataloader, hooks
    from halfmesh.migration.colossalai import global_context as gpc

A step on the way: Colossal-AI keeps what `launch` found in one global object, and so does this module, and nothing else
of halfmesh. What the names mean is halfmesh's; docs/migration/colossal-ai.md has what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..amp.plugin import AMP_TYPE
from ..assembly import initialize as _initialize
from ..compat import get_layout
from ..conversion import convert_to_amp
from ..data.loader import get_dataloader
from ..engine import Engine
from ..errors import InputError
from ..launching import launch as launching
from ..launching.launch import Launch, get_default_parser
from ..trainer.trainer import Trainer as _Trainer
from . import colossalai_hooks as hooks

__all__ = [
    "AMP_TYPE",
    "Trainer",
    "convert_to_amp",
    "get_current_device",
    "get_dataloader",
    "get_default_parser",
    "global_context",
    "hooks",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]


class _GlobalContext:
    """What the last launch found (`gpc`)."""

    def __init__(self) -> None:
        self._launch: Launch | None = None

    @property
    def config(self) -> Any:
        """The config: settings, and UPPERCASE constants."""
        return self.launch.config

    @property
    def data_parallel_size(self) -> int:
        """The data ranks."""
        return get_layout(self.launch.config, self.launch.world_size).data

    @property
    def launch(self) -> Launch:
        """What the launch function made."""
        if self._launch is None:
            raise InputError("nothing was launched yet: call colossalai.launch_from_torch(config=...) first")
        return self._launch

    def get_global_rank(self) -> int:
        """This process's number."""
        return self.launch.rank

    def destroy(self) -> None:
        """Close the process group, if launch made it."""
        if self._launch is not None:
            self._launch.close()
            self._launch = None

    def _keep(self, made: Launch) -> None:
        self._launch = made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"gpc.{name} is not there: engine.context has ranks and sizes of the mesh (dp_rank, tp_size, is_last_stage)"
        )


global_context = _GlobalContext()


def launch(config: Any, rank: int, world_size: int, host: str, port: int, **options: Any) -> None:
    """`halfmesh.launch`; what it found is kept in `global_context`."""
    global_context._keep(launching.launch(config, rank, world_size, host, port, **options))


def launch_from_torch(config: Any, **options: Any) -> None:
    """`halfmesh.launch_from_torch`; what it found is kept in `global_context`."""
    global_context._keep(launching.launch_from_torch(config, **options))


def launch_from_slurm(config: Any, host: str, port: int, **options: Any) -> None:
    """`halfmesh.launch_from_slurm`; what it found is kept in `global_context`."""
    global_context._keep(launching.launch_from_slurm(config, host, port, **options))


def launch_from_openmpi(config: Any, host: str, port: int, **options: Any) -> None:
    """`halfmesh.launch_from_openmpi`; what it found is kept in `global_context`."""
    global_context._keep(launching.launch_from_openmpi(config, host, port, **options))


def initialize(
    model: Any,
    optimizer: Any,
    criterion: Any = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
) -> tuple[Engine, Any, Any, Any]:
    """`halfmesh.initialize` with the launch's config.

    The scheduler that comes back is for the script to advance, as Colossal-AI's: under gradient accumulation its
    `step()` counts only where an update was made since the last call.

    Returns:
        engine, training and evaluation dataloader, scheduler; None for what was not given.
    """
    if ophooks:
        raise InputError("ophooks are not called here: use torch's module hooks, or a Trainer's hooks")
    made = global_context.launch
    if lr_scheduler is not None:
        config = made.config.replace(lr_interval="manual")
        made = Launch(config, made.device, made.rank, made.world_size, made.local_rank, made.group)
    engine = _initialize(
        model, optimizer, criterion, train_dataloader, made, eval_dataloader=test_dataloader, lr_scheduler=lr_scheduler
    )
    scheduler = engine.lr_scheduler
    if scheduler is not None and made.config.gradient_accumulation > 1:
        scheduler = _AfterUpdates(engine, scheduler)
    return (
        engine,
        engine.dataloader if engine.has_dataloader else None,
        engine.eval_dataloader if engine.has_eval_dataloader else None,
        scheduler,
    )


class _AfterUpdates:
    """A scheduler whose `step()` does nothing inside an accumulation cycle."""

    def __init__(self, engine: Engine, scheduler: Any) -> None:
        self._engine, self._scheduler = engine, scheduler
        self._seen = engine.global_step

    def step(self) -> None:
        """Advance, if an update was made since the last call."""
        if self._engine.global_step != self._seen:
            self._seen = self._engine.global_step
            self._scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def get_current_device() -> torch.device:
    """The device of this rank."""
    return global_context.launch.device


class Trainer:
    """`halfmesh.Trainer` with the argument names of Colossal-AI's.

    Args:
        timer: not needed.
        logger: not needed.
    """

    def __init__(self, engine: Engine, timer: Any = None, logger: Any = None) -> None:
        self.engine = engine
        self.trainer = _Trainer(engine)

    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[Any] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """`halfmesh.Trainer.fit`. Hooks are those of `hooks` here, or halfmesh's own."""
        self.trainer.fit(
            train_dataloader,
            epochs=epochs,
            max_steps=max_steps,
            eval_dataloader=test_dataloader,
            eval_interval=0 if test_dataloader is None else test_interval,
            hooks=[*(hooks or ()), *(["progress"] if display_progress else [])],
        )

    def evaluate(self, test_dataloader: Any, hooks: Sequence[Any] | None = None) -> dict[str, float]:
        """`halfmesh.Trainer.evaluate`."""
        return self.trainer.evaluate(test_dataloader, hooks or ())
