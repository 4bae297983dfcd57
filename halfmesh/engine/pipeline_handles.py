"""Placeholders for an output or a loss that a pipeline has not computed yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InputError
from ..utils.tensors import leaves_of, map_tensors

_UNSET = object()


class HandleError(InputError, TypeError, AttributeError):
    """An output or a loss was used before the pipeline had computed it. (AttributeError: for `hasattr` and `copy`.)"""


class Handle:
    """A value that `engine.backward(loss)` computes. Before that every use except passing it on raises; after it, it
    works like the value."""

    _value: Any = _UNSET
    _help = ""

    def value(self) -> Any:
        """The value. Raises HandleError if it is not computed yet, or was not kept."""
        if self._value is _UNSET:
            raise HandleError(self._help)
        return self._value

    @property
    def is_ready(self) -> bool:
        """True if `value` can be read."""
        return self._value is not _UNSET

    def __repr__(self) -> str:
        return repr(self.value()) if self.is_ready else f"<{type(self).__name__}: not computed yet>"

    def resolve(self, value: Any) -> None:
        """Set the value."""
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # names that copy, pickle and inspect look up
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    __hash__ = object.__hash__


class PipelineOutput(Handle):
    """The result of `engine(...)` in training under a pipeline: the model's output, once backward has run."""

    _help = (
        "under a pipeline the output of engine(...) is computed by engine.backward(loss), and the model's own loss "
        "(output.loss) is only on the last stage. Give initialize a criterion, write loss = engine.criterion(output, "
        "target), and compute inside the criterion what you need from the output. parallel.pipeline.keep_outputs=True "
        "keeps it for after backward; in evaluation engine(...) returns the real output at once"
    )

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        """The values that backward needs; None after it."""
        self.sequences: Any = None
        """The sequences of which this rank has some tokens, if it does not have all."""

    def drop(self) -> None:
        """Note that backward has run and did not keep the value."""
        self.batch = None
        self._help = (
            "the output of engine(...) was not kept: to use it after backward, set parallel.pipeline.keep_outputs=True"
        )


def sequences_of(tree: Any) -> Any:
    """The sequences of the output in `tree` that is not computed yet; None without one."""
    return next((output.sequences for output in leaves_of(tree, PipelineOutput) if not output.is_ready), None)


class PipelineLoss(Handle):
    """The result of `engine.criterion(output, ...)` in training under a pipeline: the loss of the full batch, on every
    rank, once backward has run. Reading it needs no communication."""

    _help = (
        "under a pipeline the loss is computed by engine.backward(loss); call that first, then read it (loss.item()). "
        "To change the loss (scale it, add to it), do so in the criterion; to accumulate, set gradient_accumulation"
    )

    def __init__(self, output: PipelineOutput, call: Any) -> None:
        self.output = output
        self.call = call


class LastStageOutput(Handle):
    """An output in evaluation, on a rank that does not have it (`eval_outputs="last"`)."""

    _help = (
        "only the ranks with the last stage have the output (parallel.pipeline.eval_outputs='last'): use it only if "
        "engine.context.is_last_stage, or set eval_outputs='all'"
    )


def _values(tree: Any) -> Any:
    return map_tensors(Handle.value, tree, Handle)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Handle, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.value(), name)(*_values(args), **kwargs)

    return call


_BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_OTHERS = "lt le gt ge eq ne neg pos abs invert bool int float complex index len iter getitem setitem contains"
for _name in (*(prefix + name for name in _BINARY for prefix in ("", "r", "i")), *_OTHERS.split(), "format", "array"):
    setattr(Handle, f"__{_name}__", _operator(f"__{_name}__"))
