"""`halfmesh verify --script`: runs of the user's own script, unchanged, with other config, engine
and batches."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from ..config import Config, load
from ..config import config as building
from ..engine import initialize as assembly
from ..engine.deferred import materialize, named_tensors
from ..engine.engine import Engine
from ..engine.launch import Launch
from ..errors import InputError
from ..report.folder import RunFolder
from ..utils.optimizer_state import plain_settings
from ..utils.tensors import map_tensors, tensors_of
from . import layout
from .record import EngineRecorder, Sink
from .subject import Case, Undropped, cast, find_batch_norms, join, prepare, split_rows

_EXCHANGES = (
    "in one process the model gets the batches of all data ranks, and verify can exchange only the batches of "
    "engine.dataloader and the arguments of engine(...) and engine.criterion(...): compute the loss with "
    "engine.criterion(output, target), or give the DataLoader to initialize"
)


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
    is_script = True
    preload = "halfmesh.verify.script"

    def survey(self, case: Case) -> tuple[Config, dict[str, str]]:
        """The first run, which keeps what the others use. Returns the script's config, without constants, then as that
        of `Given`."""
        run = ScriptRun(case)
        run.run()
        (run.config.model_extra or {}).clear()  # which may be anything, and cannot be sent
        return run.config, find_batch_norms(run.engine.model)


@dataclass
class Kept:
    """The batches, arguments and settings that a data rank used in the first run.

    Attributes:
        weights: of rank 0, as the script made them.
        batches: what `engine.dataloader` gave, and whether it was the last of its epoch; numbered.
        calls: what each call of engine and criterion was given, without outputs; numbered by microbatch.
        groups: the settings of the optimizer's groups at each update.
    """

    weights: dict[str, torch.Tensor]
    batches: list[tuple[int, Any]] = field(default_factory=list)
    calls: list[tuple[int, Any]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)


class _Done(BaseException):
    """The updates that were asked for are done."""


class ScriptRun:
    """Replaces halfmesh's own functions in this process, which ends after it.

    Args:
        sink: takes the engine's tensors; None: this is the first run, which keeps what the script uses.
        calls: of the model, for each update, if this is a reference: it uses what all data ranks used, together; or, if
            there are as many calls as batches, or more, one after another. Else what this data rank used.

    Attributes:
        engine: the script's, once it has made one.
        config: which it gives its engine, with the cycle that follows from its batches.
    """

    config: Config

    def __init__(self, case: Case, sink: Sink | None = None, calls: int | None = None) -> None:
        self.case, self.sink, self.calls = case, sink, calls
        self.script: Script = case.given
        self.engine: Any = None
        self._keeps = sink is None
        self._initialize, self._build = assembly._initialize, building.build
        self._recorder: EngineRecorder | None = None
        self._updates = self._microbatches = 0
        self._mode, self._loop = Undropped(lifts=case.dtype is not None), ExitStack()
        self._outputs: list[torch.Tensor] = []  # of this microbatch, as are these
        self._in_loop = self._has_loss = self._exchanged = False

    def run(self) -> None:
        """Run it until the last update. Raises InputError if the script ends before."""
        path, end = self.script.path, "it has no more to do"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **os.environ}  # as torchrun does for one, too
        os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if self.case.device == "cpu" else {}
        sys.argv, sys.path[:0] = [str(path), *self.script.args], [str(path.resolve().parent)]
        multiprocessing.set_start_method(None, force=True)  # else loaders' workers would come from the fork server
        vars(assembly)["_initialize"] = self.initialize
        vars(building)["build"] = vars(load)["build"] = self.build
        RunFolder._begin = lambda *_: None  # type: ignore[method-assign]
        with tempfile.TemporaryFile("w+") as written, redirect_stderr(written):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except _Done:
                pass
            except SystemExit as error:
                written.seek(0)
                end = f"it calls sys.exit({error.code!r})\n{written.read()[-1000:]}".rstrip()
            except Exception as error:
                if self._exchanged:
                    error.add_note(_EXCHANGES)
                raise
            gc.collect()  # ends the workers of its loaders
            atexit._run_exitfuncs()  # which processes of multiprocessing do not call
        if self._updates < self.case.updates:
            when = (
                f"after {self._updates} of {self.case.updates} updates" if self.engine else "without creating an engine"
            )
            raise InputError(f"{path} ends {when}: {end}\nGive fewer --updates, or the script's arguments after --")

    # -- in place of halfmesh's own ----------------------------------------------------------------------------

    def build(self, raw: Any, source: str = "the config", hint: str = building.OWN_NAMES) -> Config:
        """The script's config, below the one that is verified, which alone decides precision and layout."""
        if source == "config.replace()":
            return self._build(raw, source, hint)
        others = {key: value for key, value in raw.items() if key not in ("fp16", "bf16", "fp8", "parallel")}
        merged = load.override({**others, **load.read_raw(self.script.config)[0]}, self.script.overrides)
        config = self._build({**merged, "parallel": self.case.config.to_dict().get("parallel", {})}, source, hint)
        config = config.model_copy(update=layout.QUIET)
        return layout.reference(config, config.gradient_accumulation) if self.calls else config

    def initialize(self, given: Any, config: Any, device: Any) -> Engine:
        """An engine that begins with the kept weights, and is given the kept batches."""
        if self.engine is not None:
            raise InputError(f"{self.script.path} creates a second engine; verify supports one")
        launch, case, kept = config if isinstance(config, Launch) else None, self.case, list[Kept]()
        self.config = load.load_config(config) if launch is None else launch.config
        settings = layout.structure(self.config)
        if not self._keeps:
            settings = case.config.model_copy(update=self.config.user)
            files = [case.start / f"{rank}.kept" for rank in range(case.data_ranks)]
            kept = [torch.load(file, "cpu", weights_only=False) for file in files]
        settings = layout.reference(settings, self.calls) if self.calls else settings
        weights = self._prepare(given, kept)
        engine: Any = self._initialize(given, settings if launch is None else replace(launch, config=settings), device)
        self.engine, engine.__class__, engine.run = engine, _Engine, self
        cycle = {"gradient_accumulation": engine.config.gradient_accumulation, "global_batch_size": None}
        self.config = self.config.model_copy(update=cycle)
        dp_rank, loader = engine.context.dp_rank, engine._dataloader
        kept = kept if self.calls else kept[dp_rank : dp_rank + 1]
        self._kept = kept[0] if kept else Kept(weights)
        pieces = (self.calls or case.chunks) // case.chunks
        self._tapes = {kind: _merge([getattr(one, kind) for one in kept], pieces) for kind in ("batches", "calls")}
        engine._update.step = partial(self._update, engine._update.step)
        if loader is not None:
            loader._on_device = partial(self._feed, loader._on_device)
        if self.sink is not None:
            self._recorder = EngineRecorder(engine, self.sink)
            engine._hooks.add(self._recorder)
            self._recorder.attach()
        return engine

    def _prepare(self, given: Any, kept: Sequence[Kept]) -> dict[str, torch.Tensor]:
        """Bring the model to the kept weights, and to the dtype. Returns the weights."""
        model = given.model = given.model if isinstance(given.model, nn.Module) else given.model()
        materialize(model, given.optimizer)
        if any(value.is_meta for _, value in named_tensors(model)):
            raise InputError(
                f"{self.script.path}: its model is on the meta device and has no values; initialize them first"
            )
        weights = kept[0].weights if kept else dict(named_tensors(model))
        prepare(self.case, model, given.criterion, weights)
        if isinstance(given.optimizer, optim.Optimizer):
            for state in given.optimizer.state.values():
                state.update(cast(dict(state), self.case.dtype))
        return {name: value.detach().clone() for name, value in named_tensors(model)}

    # -- what the engine asks for ------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], is_loss: bool, args: Any, kwargs: Any) -> Any:
        """Return `function` of the arguments that were kept in place of these."""
        args, kwargs = self._give((args, kwargs))
        if self.engine.training and not self._in_loop:  # until the step: also the script's own loss
            self._loop.enter_context(self._mode)
            self._in_loop = True
        made = function(*args, **kwargs)
        self._outputs += tensors_of(made)
        self._has_loss |= is_loss or any(tensor.dim() == 0 for tensor in tensors_of(made))
        return made

    def check(self) -> None:
        """Before backward. Raises InputError if the loss may be of tensors that could not be exchanged."""
        if self._exchanged and not self._has_loss:
            raise InputError(f"{self.script.path} computes its loss itself, but {_EXCHANGES}")

    def step(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A step, which ends a microbatch, and may end the run."""
        self._loop.close()
        result = function(*args, **kwargs)
        self._microbatches += 1
        self._updates += result is not None
        self._outputs, self._in_loop, self._has_loss, self._exchanged = [], False, False, False
        if self._updates < self.case.updates:
            return result
        context = self.engine.context
        if self._keeps and not any(context.coordinate(axis) for axis in context.sizes if axis != "dp"):
            torch.save(self._kept, self.case.start / f"{context.dp_rank}.kept")
        if self._recorder is not None:
            self._recorder.finish(self._mode.bends)
        raise _Done

    def _give(self, own: Any) -> Any:
        if self.engine.training and torch.is_grad_enabled():
            mine = [tensor for tensor in tensors_of(own) if self._is_input(tensor)]
            kept = self._exchange("calls", mine, self._microbatches)
            if len(kept) != len(mine):
                raise InputError(
                    f"{self.script.path} passes other arguments to engine or criterion than in its first run"
                )
            if any(a.dtype != b.dtype or not torch.equal(a, b.to(a.device)) for a, b in zip(mine, kept, strict=True)):
                self._exchanged, values = True, iter(kept)
                own = map_tensors(lambda t: next(values).to(t.device) if self._is_input(t) else t, own)
                if self.calls is None:
                    self._note("batches", "its batches differ from run to run: all runs used those of the first")
        return cast(own, self.case.dtype)

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return not tensor.requires_grad and not any(tensor is output for output in self._outputs)

    def _exchange(self, kind: str, own: Any, number: int) -> Any:
        """`own`, which is kept; or what was kept in its place."""
        if self._keeps:
            getattr(self._kept, kind).append((number, map_tensors(torch.clone, own)))
            return own
        for kept in self._tapes[kind]:
            return kept
        raise InputError(
            f"{self.script.path} reads more batches, or calls its engine more often, than in its first run"
        )

    def _feed(self, original: Callable[..., Any], state: Any, batches: Any) -> Iterator[tuple[Any, bool]]:
        """The batches of `engine.dataloader`, each with True if it is the last of its epoch."""
        if self._keeps:
            for number, pair in enumerate(original(state, batches), len(self._kept.batches)):
                yield self._exchange("batches", pair, number)
            return
        last = False
        while not last:
            batch, last = self._exchange("batches", None, 0)
            yield map_tensors(lambda tensor: tensor.to(self.engine.device), batch), last

    def _update(self, original: Callable[..., Any], divisor: Any = 1.0) -> Any:
        """An update, with the settings of the first run: a schedule may count the updates of an epoch."""
        groups = self.engine.optimizer.param_groups
        own = [dict(plain_settings(group)) for group in groups]
        if self._keeps:
            self._kept.groups.append(own)
        elif own != self._kept.groups[self._updates]:
            self._note("settings", "its optimizer's settings depend on the number of ranks: all runs used the layout's")
            for group, settings in zip(groups, self._kept.groups[self._updates], strict=True):
                for name, value in settings.items():
                    is_tensor = isinstance(group[name], torch.Tensor)
                    group[name] = group[name].fill_(value) if is_tensor else value
        return original(divisor)

    def _note(self, about: str, text: str) -> None:
        (self.case.start / f"{about}.note").write_text(f"{self.script.path.name}: {text}")


class _Engine(Engine):
    """An engine whose calls go through a `ScriptRun`, and which overwrites no checkpoints."""

    run: ScriptRun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.call(super().__call__, False, args, kwargs)

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.call(super().criterion, True, args, kwargs)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self.run.check()
        super().backward(loss, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.step(super().step, args, kwargs)

    def save(self, directory: str | Path, **_: Any) -> Path:
        return Path(directory)

    def save_weights(self, *_: Any, **__: Any) -> None:
        return None


def _merge(tapes: Sequence[list[tuple[int, Any]]], pieces: int) -> Iterator[Any]:
    """Join what each data rank used: that of all together (0 pieces); or within each microbatch one after another, in
    `pieces` each."""
    if not pieces:
        yield from (join([tree for _, tree in column]) for column in zip(*tapes, strict=True))
        return
    for number in dict.fromkeys(number for number, _ in chain(*tapes)):
        for tape, piece in product(tapes, range(pieces)):
            is_last = tape is tapes[-1] and piece == pieces - 1
            for tree in (tree for at, tree in tape if at == number):
                part = split_rows(tree, pieces, piece)
                yield (part[0], part[1] and is_last) if isinstance(part, tuple) else part  # a batch, and its flag
