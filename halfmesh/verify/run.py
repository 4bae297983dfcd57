"""One run: the reference in one process, or the layout on one of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..config import Config
from ..dry_run.model_spec import call_of
from ..engine.engine import Engine
from ..engine.initialize import initialize
from ..parallel.batch_shard.shard import ROWS
from ..parallel.deferred.creation import named_tensors
from ..parallel.shard_spec import whole
from ..utils.tensors import count_rows, map_tensors
from . import layout
from .compare import Comparison, Coordinates, Measures
from .record import EngineRecorder, Key, Recorder, Sink, Store, loss_value, record_weights
from .subject import Subject, Undropped, cast, decay, join, make_subject, split_rows


@dataclass(frozen=True)
class Case:
    """The runs of one phase, the same in every process.

    Attributes:
        config: of the layout, settled.
        chunks: of an update's batch: data ranks x accumulation.
        dtype: of model and inputs; None: as they are built.
        overflows: the update in which the loss is inf on the last rank; None: none.
        multiple: rows of a batch are a multiple of it.
        lifts: casts of the model to float32 go to float64.
        mixes: names of modules whose buffers are those of a call.
        start: a file of weights and batches, in place of those that the builder makes, which may be random.
    """

    given: Any
    config: Config
    chunks: int
    updates: int
    device: str
    dtype: torch.dtype | None = torch.float64
    overflows: int | None = None
    multiple: int = 1
    lifts: bool = False
    mixes: tuple[str, ...] = ()
    start: Path | None = None

    @property
    def microbatches(self) -> int:
        """In which a pipeline splits a chunk."""
        pipeline = self.config.parallel.pipeline
        return pipeline.microbatches or 1 if pipeline.size > 1 else 1

    @torch.no_grad()
    def subject(self, rank: int = 0) -> Subject:
        """Built here. Ranks but the first keep the weights that they build: rank 0's count."""
        subject = make_subject(self.given, self.dtype, rank, self.multiple)
        if self.start is not None:
            weights, subject.batches = torch.load(self.start, self.device, weights_only=False)
            if self.dtype is not None:
                subject.batches = cast(subject.batches, self.dtype)
            for name, tensor in named_tensors(subject.model) if rank == 0 else ():
                tensor.copy_(weights[name])
        return subject


def record_plain(case: Case, path: Path, calls: int) -> None:
    """Write what a plain loop of torch computes; `calls` of the model for each update."""
    store = Store(path, write=True)
    _train_plain(case, case.subject(), store, calls)
    store.close()


def _train_plain(case: Case, subject: Subject, store: Sink, calls: int) -> None:
    model = subject.model.to(case.device).train()
    if isinstance(subject.criterion, nn.Module):
        subject.criterion.to(case.device)
    optimizer = subject.optimizer(list(model.parameters()))
    scheduler = LambdaLR(optimizer, decay)
    recorder = Recorder(model, store)
    record_weights(model, store, -1, "update")
    recorder.attach()
    for update in range(case.updates):
        if update:
            record_weights(model, store, update - 1, "begin")
        optimizer.zero_grad()
        weight = _accumulate(case, subject, recorder, update, calls)
        grads = {name: param.grad.to_dense() for name, param in model.named_parameters() if param.grad is not None}
        for name, grad in grads.items():
            store.parameter(Key(update, 0, "gradient", name), grad / weight, whole(grad.shape))
        clip = case.config.clip_grad_norm
        norm = float(nn.utils.get_total_norm(list(grads.values()), clip.norm_type)) / weight
        divisor = weight * max(1.0, (norm + 1e-6) / clip.max_norm) if clip.max_norm else weight
        for name, grad in grads.items():
            model.get_parameter(name).grad = grad / divisor
        store.figure(update, 0, "grad_norm", norm)
        store.figure(update, 0, "lr", optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        record_weights(model, store, update, "update")
    recorder.detach()


def _accumulate(case: Case, subject: Subject, recorder: Recorder, update: int, calls: int) -> float:
    """Add the gradients of an update's calls; returns what they are still to be divided by."""
    total, reduction = 0.0, case.config.loss_reduction
    for call in range(calls):
        recorder.begin(update, call)
        inputs, targets = _to(case.device, _batch(case, subject, update, call, calls))
        recorder.sink.figure(update, call, "rows", count_rows((inputs, targets)))
        args, kwargs = call_of(inputs)
        with Undropped(case.lifts, recorder.used) as mode:
            loss = subject.loss(subject.model(*args, **kwargs), targets)
            value, weight = loss_value(loss)
            recorder.sink.figure(update, call, "loss", (value, weight))
            scalar = loss[0] if isinstance(loss, (tuple, list)) else loss
            (scalar / calls if reduction == "mean" else scalar).backward()
        recorder.sink.figure(update, call, "drawn", list(mode.drawn))
        total += weight
    return total if reduction == "weighted" else 1.0


def record_engine(case: Case, path: Path, calls: int) -> None:
    """Write what an engine in this process computes, in the same mode."""
    store = Store(path, write=True)
    alone = replace(case, config=layout.reference(case.config, calls))
    _train(alone, case.subject(), store, calls)
    store.close()


def estimate(case: Case, path: Path, calls: int, eps: float, parts: int = 0) -> Measures:
    """How far the reference in `path` is from one whose first layer's outputs move by up to `eps` of themselves, and
    whose engine takes an update's batch in `parts` calls, each of which rounds; 0: a plain loop, in `calls` calls."""
    subject = case.subject()
    sink = Comparison(Store(path), Coordinates(0, parts or calls, 1, {}), calls)
    perturb(subject.model, eps)
    if parts:
        _train(replace(case, config=layout.reference(case.config, parts)), subject, sink, parts)
    else:
        _train_plain(case, subject, sink, calls)
    return sink.measures


def perturb(model: nn.Module, eps: float) -> None:
    """Move the outputs of the embedding or convolution that is called first, or else of the first layer."""
    kinds: list[tuple[type, ...]] = [(nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.Linear,), (nn.Module,)]
    leaves = [module for module in model.modules() if not list(module.children())]
    some = next(found for kind in kinds if (found := [module for module in leaves if isinstance(module, kind)]))
    generator, first = torch.Generator().manual_seed(5), list[nn.Module]()

    def move(layer: nn.Module, inputs: Any, output: Any) -> Any:
        first[:] = first or [layer]
        if layer is not first[0] or not isinstance(output, torch.Tensor):
            return output
        noise = torch.rand(output.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (output * (1 + eps * noise.to(output.device))).to(output.dtype)

    for layer in some:
        layer.register_forward_hook(move)


def run_rank(case: Case, path: Path, calls: int, accumulated: Path | None = None) -> Measures:
    """Train the layout on this rank, and compare."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    store, subject = Store(path), case.subject(rank)
    other = None if accumulated is None else Store(accumulated)
    return _train(case, subject, partial(comparison, case, store, calls, other))


def comparison(case: Case, store: Store, calls: int, other: Store | None, engine: Engine) -> Comparison:
    """The sink of this rank, as its engine says where it is."""
    context = engine.context
    axes = {axis: (context.coordinate(axis), size) for axis, size in context.sizes.items() if axis not in ("pp", "dp")}
    tp = engine._parallel.axes.get("tensor")
    # Where ranks exchange tokens: what such a layer has inside are others' rows.
    apart = [f"{name}." for name, module in engine.model.named_modules() if vars(module).get("is_divided_by_engine")]
    here = Coordinates(
        context.rank,
        case.chunks,
        case.microbatches,
        axes,
        tuple(apart),
        tuple(name for name, param in engine.model.named_parameters() if tp is not None and param in tp.splits),
        any(getattr(axis, "sharded_dim", None) == ROWS for axis in engine._parallel.axes.values()),
    )
    return Comparison(store, here, calls, other)


def _train(case: Case, subject: Subject, sink: Any, calls: int | None = None) -> Any:
    """Train with an engine; `sink`: or a function that makes one for it; `calls`: of the model, if this is a reference.
    Returns the measures, if it has any."""
    criterion, mode = _Overflowing(subject), Undropped(case.lifts)
    scheduler: Callable[[Any], Any] = lambda optimizer: LambdaLR(optimizer, decay)  # noqa: E731
    engine = initialize(
        subject.model, subject.optimizer, criterion, None, case.config, lr_scheduler=scheduler, device=case.device
    )
    made: Sink = sink(engine) if isinstance(sink, partial) else sink
    recorder = EngineRecorder(engine, made)
    engine.train()
    with engine._hooks.added(recorder):
        recorder.attach()
        try:
            for update in range(case.updates):
                _update(case, subject, engine, criterion, mode, update, calls)
        except Exception as error:
            vars(error)["measures"] = getattr(made, "measures", None)  # what differed before may be the reason
            raise
        recorder.detach()
    made.figure(0, 0, "bends", list(mode.bends))
    engine.close()
    return getattr(made, "measures", None)


def _update(
    case: Case, subject: Subject, engine: Engine, criterion: Any, mode: Undropped, update: int, calls: int | None
) -> None:
    torch.manual_seed(update)
    place = engine.context
    is_last = (place.dp_rank, place.tp_rank) == (place.dp_size - 1, place.tp_size - 1) and place.is_last_stage
    criterion.overflows = update == case.overflows and is_last
    for step in range(case.config.gradient_accumulation):
        if calls is None:
            batch = subject.batch(update, step * place.dp_size + place.dp_rank, case.chunks)
        else:
            batch = _batch(case, subject, update, step, calls)
        inputs, targets = _to(case.device, batch)
        args, kwargs = call_of(inputs)
        engine.zero_grad()
        with mode:
            output = engine(*args, **kwargs)
            loss = engine.criterion(output, targets) if subject.has_targets else engine.criterion(output)
            engine.backward(loss)
        engine.step()


class _Overflowing(nn.Module):
    """The criterion, whose value is inf where `overflows`."""

    overflows = False

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.inner = subject.criterion

    def forward(self, *args: Any) -> Any:
        """The loss."""
        loss = self.inner(*args)
        if not self.overflows:
            return loss
        return (loss[0] * math.inf, *loss[1:]) if isinstance(loss, (tuple, list)) else loss * math.inf


def _batch(case: Case, subject: Subject, update: int, call: int, calls: int) -> Any:
    """The chunks of a call of the reference, in one batch; of a call for each microbatch, its rows."""
    own, parts = case.chunks // calls, calls // case.chunks
    if parts > 1:
        return split_rows(subject.batch(update, call // parts, case.chunks), parts, call % parts)
    return join([subject.batch(update, call * own + chunk, case.chunks) for chunk in range(own)])


def _to(device: str, tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), tree)
