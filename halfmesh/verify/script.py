"""`halfmesh verify --script`: model, optimizer, criterion and batches of the user's own script, unchanged."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import Config, load
from ..config import config as building
from ..engine import initialize as assembly
from ..engine.deferred import materialize, named_tensors
from ..engine.engine import Engine
from ..errors import InputError
from ..report.folder import RunFolder
from ..utils.tensors import count_rows, map_tensors, parameter_names, position_names, tensors_of
from . import layout
from .subject import Batch, Case, Subject


@dataclass(frozen=True)
class Script:
    """The script that is trained, in place of `Given`.

    Attributes:
        config: path or keys of the config that is verified; `overrides` change them, and the script's own.
    """

    path: Path
    args: Sequence[str]
    config: Any
    overrides: Sequence[str]
    preload = "halfmesh.verify.script"

    def survey(self, case: Case) -> tuple[Config, nn.Module, dict[str, torch.Tensor], list[Batch], list[str]]:
        """See `Given`. The script trains in one process, until there are batches for all ranks, or it ends."""
        run = ScriptRun(case, trains=True)
        end = run.run()
        if not run.batches:
            raise InputError(f"{self.path} ends without an update of an engine: {end}")
        (run.config.model_extra or {}).clear()  # which may be anything, and cannot be sent
        notes = ["its loss is not that of engine.criterion(engine(...), ...): another one took its place"]
        return run.config, run.given.model, run.weights, run.batches, notes if run.has_own_loss else []

    def make(self, case: Case) -> Subject:
        """See `Given`. The script runs until it has a model and an optimizer."""
        run = ScriptRun(case, trains=False)
        run.run()
        return Subject(run.given.model, [], run.given.criterion, run.given.optimizer)


class _Done(BaseException):
    """The script has given what was asked for."""


class ScriptRun:
    """Replaces halfmesh's own functions in this process while the script runs.

    Args:
        trains: let it train, and keep the batches; else end it once it has an engine's parts.

    Attributes:
        given: what it gives to `initialize`.
        config: its config, below the one that is verified.
        weights: as the script made them.
        has_own_loss: its loss is not the criterion's, of the engine's output.
    """

    config: Config
    weights: dict[str, torch.Tensor]

    def __init__(self, case: Case, trains: bool) -> None:
        self.case, self.script, self._trains = case, case.given, trains
        self.given: Any = None
        self.batches: list[Batch] = []
        self.has_own_loss = False
        self._initialize, self._build = assembly._initialize, building.build
        self._outputs: list[Any] = []  # of this microbatch
        self._inputs: Any = None
        self._targets: tuple[Any, ...] = ()

    def run(self) -> str:
        """Run it. Returns why it ended by itself."""
        path, end = self.script.path, "it has no more to do"
        sys.argv, sys.path[:0] = [str(path), *self.script.args], [str(path.resolve().parent)]
        multiprocessing.set_start_method(None, force=True)  # else loaders' workers would come from the fork server
        places = ((assembly, "_initialize"), (building, "build"), (load, "build"), (RunFolder, "_begin"))
        own = (self.initialize, self.build, self.build, lambda *_: None)
        with ExitStack() as undo, tempfile.TemporaryFile("w+") as written, redirect_stderr(written):
            undo.callback(os.environ.update, dict(os.environ))
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as torchrun does for one, too
            os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if self.case.device == "cpu" else {}
            for (where, name), function in zip(places, own, strict=True):
                undo.callback(setattr, where, name, getattr(where, name))
                setattr(where, name, function)
            try:
                runpy.run_path(str(path), run_name="__main__")
            except _Done:
                pass
            except SystemExit as error:
                written.seek(0)
                end = f"it calls sys.exit({error.code!r})\n{written.read()[-1000:]}".rstrip()
            gc.collect()  # ends the workers of its loaders
        return end

    # -- in place of halfmesh's own ----------------------------------------------------------------------------

    def build(self, raw: Any, source: str = "the config", hint: str = building.OWN_NAMES) -> Config:
        """The script's config, below the one that is verified, which alone decides precision and layout. The script
        gets that of one process."""
        if source == "config.replace()":
            return self._build(raw, source, hint)
        others = {key: value for key, value in raw.items() if key not in ("fp16", "bf16", "fp8", "parallel")}
        merged = load.override({**others, **load.read_raw(self.script.config)[0]}, self.script.overrides)
        parallel = self.case.config.to_dict().get("parallel", {})
        self.config = self._build({**merged, "parallel": parallel}, source, hint)
        return layout.reference(layout.structure(self.config.model_copy(update=layout.QUIET)), 1)

    def initialize(self, given: Any, config: Any, device: Any) -> Engine:
        """An engine that keeps the batches."""
        if self.given is not None:
            raise InputError(f"{self.script.path} creates a second engine; verify supports one")
        self.given, given.model = given, given.model if isinstance(given.model, nn.Module) else given.model()
        materialize(given.model, given.optimizer)
        if not self._trains:
            raise _Done
        self.weights = {name: value.detach().clone() for name, value in named_tensors(given.model)}
        self._names = parameter_names(given.model)
        engine: Any = self._initialize(given, config, device)
        engine.__class__, engine.run = _Engine, self
        return engine

    # -- what the engine is asked for --------------------------------------------------------------------------

    def called(self, args: Any, kwargs: Any, output: Any) -> None:
        """The engine was; the last call before a step counts."""
        self._outputs.append(output)
        self._inputs = (
            {**dict(zip(position_names(self._names, len(args)), args, strict=True)), **kwargs} if kwargs else args
        )
        self._targets = ()

    def compared(self, output: Any, *targets: Any) -> None:
        """The criterion was."""
        known = {id(tensor) for tensor in tensors_of(self._outputs)}
        is_last = any(output is one for one in self._outputs[-1:])
        if is_last and not any(id(tensor) in known for tensor in tensors_of(targets)):
            self._targets = targets

    def stepped(self) -> None:
        """A microbatch has ended."""
        has_loss = self._targets or any(tensor.dim() == 0 for tensor in tensors_of(self._outputs[-1:]))
        self.has_own_loss |= not has_loss
        batch = map_tensors(lambda tensor: tensor.detach().cpu().clone(), (self._inputs, self._targets))
        if not self.batches or count_rows(batch) == count_rows(self.batches[0]):
            self.batches.append(batch)
        self._outputs = []
        if len(self.batches) == 2 * self.case.data_ranks * self.case.updates:  # with accumulation
            raise _Done


class _Engine(Engine):
    """An engine that tells a `ScriptRun` what it is given, and which overwrites no checkpoints."""

    run: ScriptRun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        if self.training:
            self.run.called(args, kwargs, output)
        return output

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and not kwargs:
            self.run.compared(*args)
        return super().criterion(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        self.run.stepped()
        return result

    def save(self, directory: str | Path, **_: Any) -> Path:
        return Path(directory)

    def save_weights(self, *_: Any, **__: Any) -> None:
        return None
