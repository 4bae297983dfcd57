"""One run: the reference in one process, or the layout on one of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from ..config import Config
from ..dry_run.model_spec import call_of
from ..engine.deferred import named_tensors
from ..engine.initialize import initialize
from ..errors import InputError
from ..parallel.shard_spec import whole
from ..utils.optimizer_state import join_optimizers, parts_of
from ..utils.tensors import count_rows
from ..utils.torch_private import BATCH_NORMS
from . import layout
from .compare import Comparison, Measures
from .record import EngineRecorder, Key, Recorder, Sink, Store, loss_value, record_weights
from .subject import Subject, Undropped, cast, make_subject


@dataclass(frozen=True)
class Case:
    """The runs of one phase, the same in every process.

    Attributes:
        given: what is trained: `Given`, or a `Script`.
        config: of the layout, settled.
        data_ranks: of the layout.
        start: the folder of what all runs begin with, once the first has written it.
        dtype: of model and inputs, in the proof of the structure; None: as they are built.
        overflows: the update in which the loss is inf on the last rank; None: none.
        lifts: casts of the model to float32 go to float64.
        eps: outputs of the first layer are moved by up to this share of themselves.
        batch_norms: modules whose statistics are those of a call: their classes, by name.
    """

    given: Any
    config: Config
    data_ranks: int
    updates: int
    device: str
    start: Path
    dtype: torch.dtype | None = torch.float64
    overflows: int | None = None
    lifts: bool = False
    eps: float = 0.0
    batch_norms: Mapping[str, str] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """Of an update's batch: data ranks x accumulation."""
        return self.data_ranks * self.config.gradient_accumulation

    @property
    def microbatches(self) -> int:
        """In which a pipeline splits a chunk."""
        pipeline = self.config.parallel.pipeline
        return pipeline.microbatches or 1 if pipeline.size > 1 else 1


# -- what a process is asked for -----------------------------------------------------------------------------------


def record(case: Case, path: Path, calls: int) -> None:
    """Write what one process computes; `calls` of the model for each update."""
    store = Store(path, write=True)
    case.given.train(case, store, calls)
    store.close()


def estimate(case: Case, path: Path, calls: int, parts: int) -> Measures:
    """How far the reference in `path` is from a perturbed one, which takes an update's batch in `parts` calls, each of
    which rounds."""
    sink = Comparison(Store(path), parts, calls)
    case.given.train(case, sink, parts)
    return sink.measures


def compare(case: Case, path: Path, calls: int, accumulated: Path | None = None) -> Measures:
    """Train the layout on this rank, and compare it with the reference, and with one that accumulates."""
    other = None if accumulated is None else Store(accumulated)
    sink = Comparison(Store(path), case.chunks * case.microbatches, calls, case.microbatches, other)
    try:
        case.given.train(case, sink)
    except Exception as error:
        vars(error)["measures"] = sink.measures  # what differed before may be the reason
        raise
    return sink.measures


# -- a model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The user's builder and optimizer: see `verify`."""

    build: str | Callable[[], Any]
    optimizer: str | Callable[[Any], optim.Optimizer] | None = None

    is_script = False

    @property
    def preload(self) -> str:
        """A module, or a function in one, for the server of processes."""
        return self.build if isinstance(self.build, str) else f"{self.build.__module__}:{self.build.__qualname__}"

    def survey(self, case: Case) -> tuple[Config, dict[str, str]]:
        """Look at the model, and write weights and batches for all runs. Returns the settled config, and the names of
        BatchNorms. Raises InputError if the builder is wrong."""
        subject = make_subject(self, replace(case, dtype=None))
        if not any(param.requires_grad for param in subject.model.parameters()):
            raise InputError("no parameter of the model requires gradients, so there is nothing to train")
        torch.save((dict(named_tensors(subject.model)), subject.batches), case.start / "model")
        rows = count_rows(subject.batches[0])
        if len(subject.batches) == 1 and rows < 2 and case.chunks > 1:
            raise InputError(
                f"the batch has one row, so all {case.chunks} batches of an update would be equal and prove nothing; "
                "return a batch of several rows, or a list of batches"
            )
        return layout.settle(case.config, rows * case.data_ranks), find_batch_norms(subject.model)

    def train(self, case: Case, sink: Sink, calls: int | None = None) -> None:
        """Train with an engine, or, for the reference in float64, in a plain loop.

        Args:
            calls: of the model, for each update, if this is a reference.
        """
        weights, batches = torch.load(case.start / "model", case.device, weights_only=False)
        subject = make_subject(self, case, weights)
        subject.batches = batches if case.dtype is None else cast(batches, case.dtype)
        if calls is None or case.dtype is None:
            _train(case, subject, sink, calls)
        else:
            _train_plain(case, subject, sink, calls)


def find_batch_norms(model: nn.Module) -> dict[str, str]:
    """The modules that normalize each batch separately: their classes, by name."""
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}


def _decay(optimizer: Any) -> LambdaLR:
    """The schedule of all runs: each update has its own learning rate."""
    return LambdaLR(optimizer, lambda update: float(0.9**update))


def _train_plain(case: Case, subject: Subject, sink: Sink, calls: int) -> None:
    model = subject.model.to(case.device).train()
    if isinstance(subject.criterion, nn.Module):
        subject.criterion.to(case.device)
    optimizer = join_optimizers(subject.optimizer(list(model.parameters())))
    scheduler, clip, recorder = _decay(optimizer), case.config.clip_grad_norm, Recorder(model, sink)
    record_weights(model, sink, -1, "update")
    recorder.attach()
    for update in range(case.updates):
        if update:
            record_weights(model, sink, update, "begin")
        optimizer.zero_grad()
        weight = _accumulate(case, subject, recorder, update, calls)
        for name, param in model.named_parameters():
            if param.grad is not None:
                param.grad = param.grad.to_dense() / weight
                sink.parameter(Key(update, 0, "gradient", name), param.grad, whole(param.shape))
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm or math.inf, clip.norm_type)
        sink.figure(update, 0, "grad_norm", float(norm))
        sink.figure(update, 0, "lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        record_weights(model, sink, update, "update")
    recorder.detach()


def _accumulate(case: Case, subject: Subject, recorder: Recorder, update: int, calls: int) -> float:
    """Add the gradients of an update's calls; returns what they are still to be divided by."""
    total, reduction, sink = 0.0, case.config.loss_reduction, recorder.sink
    for call in range(calls):
        recorder.begin(update, call)
        inputs, targets = subject.batch(case, update, call, calls)
        sink.figure(update, call, "rows", count_rows((inputs, targets)))
        args, kwargs = call_of(inputs)
        with Undropped(case.lifts) as mode:
            loss = subject.criterion(subject.model(*args, **kwargs), *targets)
            value, weight = loss_value(loss)
            sink.figure(update, call, "loss", (value, weight))
            scalar = loss[0] if isinstance(loss, (tuple, list)) else loss
            (scalar / calls if reduction == "mean" else scalar).backward()
        sink.figure(update, call, "drawn", list(mode.drawn))
        total += weight
    return total if reduction == "weighted" else 1.0


def _train(case: Case, subject: Subject, sink: Sink, calls: int | None) -> None:
    config = case.config if calls is None else layout.reference(case.config, calls)
    criterion, mode = _Overflowing(subject.criterion), Undropped(case.lifts)
    engine = initialize(
        subject.model, subject.optimizer, criterion, None, config, lr_scheduler=_decay, device=case.device
    )
    recorder, context = EngineRecorder(engine, sink), engine.context
    is_last = (context.dp_rank, context.tp_rank) == (context.dp_size - 1, context.tp_size - 1) and context.is_last_stage
    engine.train()
    with engine._hooks.added(recorder):
        recorder.attach()
        for update in range(case.updates):
            torch.manual_seed(update)
            criterion.overflows = update == case.overflows and is_last
            for step in range(config.gradient_accumulation):
                own = step * context.dp_size + context.dp_rank
                inputs, targets = subject.batch(case, update, own, calls or case.chunks)
                args, kwargs = call_of(inputs)
                engine.zero_grad()
                with mode:
                    engine.backward(engine.criterion(engine(*args, **kwargs), *targets))
                engine.step()
        recorder.detach()
    sink.figure(0, 0, "bends", list(mode.bends))
    rounds = not case.lifts and any(type(part).__name__ == "Muon" for part in parts_of(engine.optimizer))
    sink.figure(0, 0, "rounds", rounds)
    engine.close()


class _Overflowing(nn.Module):
    """A criterion whose value is inf where `overflows`."""

    overflows = False

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        if hasattr(inner, "set_context"):
            self.set_context = inner.set_context

    def forward(self, *args: Any) -> Any:
        """The loss."""
        loss = self.inner(*args)
        if not self.overflows:
            return loss
        return (loss[0] * math.inf, *loss[1:]) if isinstance(loss, (tuple, list)) else loss * math.inf
