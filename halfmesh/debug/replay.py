"""The last batch, computed once more by the engine's own calls, with probes and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from .._torch import is_compiled
from ..errors import InputError, shorten
from .last_batch import CHANGED, LET_GO, NO_LOSS, UNKNOWN, LastBatch, copied, criterion_arguments, own_loss
from .parts import Parts
from .probes import Listener, Probes
from .undisturbed import undisturbed

WRITTEN = (
    "the forward changes trained parameters by itself ({}), which computing the batch once more has done once more: "
    "nothing else of the run is changed"
)
_Result = TypeVar("_Result")


def find_problem(parts: Parts, batch: LastBatch) -> str | None:
    """Why the batch cannot be computed once more, on this rank or another; the same on all. All ranks together."""
    mine = batch.kind, parts.model.training
    everyone = parts.context.everyone(mine)
    if any(kind.startswith("False") for kind, _ in everyone):
        return "no batch went forward in training mode yet"
    if not all(training for _, training in everyone):
        return "the model is in evaluation mode; call engine.train() first"
    if any(theirs != mine for theirs in everyone):
        return "the ranks did not call the engine alike for their last batches"
    return None


def replay(parts: Parts, batch: LastBatch, listener: Listener, factor: float = 1.0) -> list[str]:
    """Compute `batch` once more: forward, criterion and backward, with the gradients complete over the ranks. All ranks
    together.

    The same weights, other random numbers (those that come next; every replay draws the same).

    Args:
        factor: the gradients are so many times larger.

    Returns:
        What of the batch was not computed as it was then, and what of the run is not as it was.
    """
    with undisturbed(parts) as written:
        notes = _compute(parts, batch, listener, factor)
    everyone = parts.context.everyone(written)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    return notes + ([WRITTEN.format(shorten(names))] if names else [])


def _compute(parts: Parts, batch: LastBatch, listener: Listener, factor: float) -> list[str]:
    """What was not computed as it was then."""
    assert batch.call is not None
    pipeline = parts.division.plans.partition is not None
    params = parts.model.named_parameters() if parts.division.sharded is None else ()  # FSDP2 calls no hooks of theirs
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(eager(parts))
        enter(torch.inference_mode(False))
        enter(torch.enable_grad())
        enter(parts.accumulation.magnified(factor))
        args, kwargs = copied(list(batch.call))
        own = ((name, p) for name, p in params if p.requires_grad)
        probes = enter(Probes(parts.hooked(), own, parts.executor.stages, listener))

        def forward() -> tuple[Any, list[str]]:
            return _loss(parts, batch, parts.executor.forward(*args, **kwargs), probes)

        loss, notes = compute_together(parts, forward)
        if loss is None:
            if pipeline:
                raise InputError("the criterion was not given the output of engine(...)")
            return notes
        parts.accumulation.backward(parts.executor, loss, is_last_batch=True, loss_id=batch.loss_id)
        parts.accumulation.reduce()
        for shard, grad in parts.update.gradients().items():
            listener.complete_gradient(shard.name, grad)
    return notes


class FailedTogether(Exception):  # noqa: N818 - it says what happened, and is never seen
    """A replay has failed on some rank, and all ranks know it."""


def compute_together(parts: Parts, compute: Callable[[], _Result]) -> _Result:
    """What `compute` gives. Where the ranks need each other in backward only, all of them fail if one does."""
    division = parts.division
    divided = division.tensor or division.cut or division.sharded
    if divided or any(isinstance(module, nn.SyncBatchNorm) for module in parts.model.modules()):
        return compute()
    problem, result = "", None
    try:
        result = compute()
    except Exception as error:
        if parts.context.size == 1:
            raise
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    everyone = parts.context.everyone(problem)
    failed = [f"{theirs} (rank {rank})" for rank, theirs in enumerate(everyone) if theirs]
    if failed:
        raise FailedTogether(failed[0])
    return result  # type: ignore[return-value]


def _loss(parts: Parts, batch: LastBatch, output: Any, probes: Probes) -> tuple[Any, list[str]]:
    """The loss, and what is to be said of it; None where the loop computed it."""
    loss = own_loss(batch, output)
    if loss is not None:
        return loss, []
    given = criterion_arguments(batch, output)
    if given is None or parts.criterion is None:
        return None, [NO_LOSS]
    args, kwargs = given
    loss = parts.executor.criterion(probes.watched(parts.criterion), *args, **kwargs)
    return loss, [] if batch.loss is None else [UNKNOWN if batch.value is LET_GO else CHANGED]


@contextmanager
def eager(parts: Parts) -> Iterator[None]:
    """Compiled code has no place for hooks."""
    if parts.division.compiled or any(map(is_compiled, parts.model.modules())):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
