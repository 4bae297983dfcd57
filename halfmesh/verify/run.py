"""One run: the reference in one process, or the layout on one of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..dry_run.model_spec import call_of
from ..engine.initialize import initialize
from ..parallel.shard_spec import whole
from ..utils.optimizer_state import join_optimizers
from ..utils.tensors import count_rows
from . import layout
from .compare import Comparison, Measures
from .record import EngineRecorder, Key, Recorder, Sink, Store, loss_value
from .script import ScriptRun
from .subject import Case, Subject, Undropped, make_subject


def record(case: Case, path: Path, calls: int) -> None:
    """Write what one process computes; `calls` of the model for each update."""
    store = Store()
    train(case, store, calls)
    store.write(path)


def compare(case: Case, path: Path, calls: int, parts: int | None = None) -> Measures:
    """Train the layout on this rank, and compare it with the reference in `path`; or compare a perturbed reference,
    which takes an update's batch in `parts` calls, each of which rounds."""
    microbatches = case.microbatches if parts is None else 1
    sink = Comparison(Store(path), parts or case.chunks * microbatches, calls, microbatches)
    try:
        train(case, sink, parts)
    except Exception as error:
        vars(error)["measures"] = sink.measures  # what differed before may be the reason
        raise
    return sink.measures


def train(case: Case, sink: Sink, calls: int | None = None) -> None:
    """Train with an engine, or, for the reference in float64, in a plain loop; or run the script.

    Args:
        calls: of the model, for each update, if this is a reference.
    """
    if case.given.is_script:
        ScriptRun(case, sink, calls).run()
        return
    subject = make_subject(case)
    if calls is None or case.dtype is None:
        _train(case, subject, sink, calls)
    else:
        _train_plain(case, subject, sink, calls)


def _decay(optimizer: Any) -> LambdaLR:
    """The schedule of all runs: each update has its own learning rate."""
    return LambdaLR(optimizer, lambda update: float(0.9**update))


def _train_plain(case: Case, subject: Subject, sink: Sink, calls: int) -> None:
    model, reduction = subject.model.to(case.device).train(), case.config.loss_reduction
    if isinstance(subject.criterion, nn.Module):
        subject.criterion.to(case.device)
    optimizer = join_optimizers(subject.optimizer(list(model.parameters())))
    scheduler, clip, recorder = _decay(optimizer), case.config.clip_grad_norm, Recorder(model, sink)
    recorder.weights("update", -1)
    recorder.attach()
    for update in range(case.updates):
        if update:
            recorder.weights("begin", update)
        optimizer.zero_grad()
        weights = list[float]()
        for call in range(calls):
            recorder.begin(update, call)
            inputs, targets = subject.batch(case, update, call, calls)
            sink.figures[update, call, "rows"] = count_rows((inputs, targets))
            args, kwargs = call_of(inputs)
            with Undropped(lifts=True):
                loss = subject.criterion(model(*args, **kwargs), *targets)
                sink.figures[update, call, "loss"] = loss_value(loss)
                scalar = loss[0] if isinstance(loss, (tuple, list)) else loss
                (scalar / calls if reduction == "mean" else scalar).backward()
            weights.append(loss_value(loss)[1])
        divisor = sum(weights) if reduction == "weighted" else 1.0
        for name, param in model.named_parameters():
            if param.grad is not None:
                param.grad = param.grad.to_dense() / divisor
                sink.parameter(Key(update, 0, "gradient", name), param.grad, whole(param.shape))
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip.max_norm or math.inf, clip.norm_type)
        sink.figures[update, 0, "grad_norm"] = float(norm)
        sink.figures[update, 0, "lr"] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        recorder.weights("update", update)
    recorder.detach()


def _train(case: Case, subject: Subject, sink: Sink, calls: int | None) -> None:
    config = case.config if calls is None else layout.reference(case.config, calls)
    criterion, mode = _Overflowing(subject.criterion), Undropped(lifts=case.dtype is not None)
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
        recorder.finish(mode.bends)
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
        loss, factor = self.inner(*args), math.inf if self.overflows else 1.0
        return (loss[0] * factor, *loss[1:]) if isinstance(loss, (tuple, list)) else loss * factor
