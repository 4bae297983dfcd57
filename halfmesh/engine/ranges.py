"""Named ranges around the parts of a step, for torch.profiler, and on CUDA as NVTX ranges for Nsight Systems."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.profiler import record_function

from ..parallel.reducer import Reducer

if TYPE_CHECKING:
    from .engine import Engine


def add_ranges(engine: Engine) -> ExitStack:
    """From now on the parts of a step run in ranges "halfmesh.forward", "halfmesh.update" and so on. An engine without
    them makes no call for them: they are put around methods of its objects, outside of compiled code.

    Returns:
        A scope whose end removes them.
    """
    scope, undo = _with_nvtx if engine.device.type == "cuda" else record_function, ExitStack()
    for owner, method, name in _methods(engine):
        setattr(owner, method, _ranged(getattr(owner, method), f"halfmesh.{name}", scope))
        undo.callback(delattr, owner, method)
    return undo


def _methods(engine: Engine) -> Iterator[tuple[Any, str, str]]:
    """Objects, a method of each, and the name of its range."""
    update, reducer = engine._update, engine._accumulation.reducer
    yield engine, "_run", "forward"
    yield engine._executor, "criterion", "criterion"
    for stage in engine._executor.stages:
        yield stage, "compute", f"stage_{stage.index}"
    yield engine._accumulation, "backward", "backward"
    yield engine._accumulation, "step", "update"
    if reducer is not None:
        yield reducer, "finish", "reduce"
        for one in (reducer, *reducer.reductions):
            if isinstance(one, Reducer):
                yield one, "_send", "send_bucket"
    yield update, "_measure", "grad_norm"
    yield update.stepper, "step", "optimizer"
    yield update, "_publish", "publish"
    if update.publisher is not None:
        yield update.publisher, "finish", "publish"


def _ranged(method: Callable[..., Any], name: str, scope: Callable[[str], Any]) -> Callable[..., Any]:
    bound = weakref.WeakMethod(method)  # an object that refers to itself would outlive the engine

    def call(*args: Any, **kwargs: Any) -> Any:
        with scope(name):
            return cast(Any, bound())(*args, **kwargs)

    return call


@contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
