"""What stands for an output or a loss that a pipeline has not computed yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ..errors import InputError

_UNSET = object()


class HandleError(InputError, TypeError, AttributeError):
    """An output or a loss was used before the pipeline had computed it. (An AttributeError too, so that `hasattr` and
    `copy` work.)"""


class Handle:
    """Something that exists after `engine.backward(loss)`. Before, every use but passing it on raises; after, it is
    used like what it stands for.
    """

    _value: Any = _UNSET
    _help = ""

    def value(self) -> Any:
        """What it stands for.

        Raises:
            HandleError: it is not there yet, or was not kept.
        """
        if self._value is _UNSET:
            raise HandleError(self._help)
        if callable(self._value):
            self._value = self._value()
        return self._value

    @property
    def is_ready(self) -> bool:
        """Whether `value` is there."""
        return self._value is not _UNSET

    def settle(self, value: Callable[[], Any]) -> None:
        """`value()` gives what it stands for; it is called when that is first asked for."""
        self._value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and inspect look for
            raise AttributeError(name)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_unwrap(args), **_unwrap(kwargs or {}))

    def __repr__(self) -> str:
        return repr(self.value()) if self.is_ready else f"<{type(self).__name__}: not computed yet>"

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__array__(*args, **kwargs)

    __hash__ = object.__hash__


def _unwrap(tree: Any) -> Any:
    if isinstance(tree, Handle):
        return tree.value()
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_unwrap, tree)) if type(tree) in (list, tuple) else tree
    return {key: _unwrap(value) for key, value in tree.items()} if type(tree) is dict else tree


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Handle, *args: Any) -> Any:
        value = self.value()
        return getattr(value, name)(*_unwrap(args))

    call.__name__ = name
    return call


_BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
_COMPARE = ["lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"]
_CONTAIN = ["bool", "int", "float", "complex", "index", "len", "iter", "getitem", "setitem", "contains"]
_OPERATORS = [
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")),
    *(f"__{name}__" for name in (*_COMPARE, *_CONTAIN)),
]
for _name in _OPERATORS:
    setattr(Handle, _name, _operator(_name))


class PipelineOutput(Handle):
    """What `engine(...)` returns in training under a pipeline: the model's output, once backward has run."""

    _help = (
        "the output of engine(...) is not computed before engine.backward(loss) under a pipeline. Pass it to "
        "engine.criterion(output, target) as it is, and compute inside the criterion what you need of it; with "
        "parallel = dict(pipeline=dict(..., keep_outputs=True)) it can be used after backward. In evaluation "
        "(engine.eval(), or torch.no_grad()) engine(...) returns the real output at once"
    )
    _dropped = (
        "the output of engine(...) was not kept: set parallel = dict(pipeline=dict(..., keep_outputs=True)) to use it "
        "after engine.backward(loss)"
    )

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.was_used = False

    def drop(self) -> None:
        """Its value will not come any more."""
        self.batch, self.was_used = None, True
        self._help = self._dropped

    def __getattr__(self, name: str) -> Any:
        self._refuse_own_loss(name)
        return super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        self._refuse_own_loss(key)
        return self.value()[_unwrap(key)]

    def _refuse_own_loss(self, name: Any) -> None:
        if isinstance(name, str) and name == "loss" and not self.is_ready:
            raise HandleError(
                "the model's own loss (output.loss) is on the last stage of the pipeline only, one for each "
                "microbatch; give a criterion to initialize and write loss = engine.criterion(output, target)"
            )


class PipelineLoss(Handle):
    """What `engine.criterion(output, ...)` returns in training under a pipeline: the loss of the whole batch, on every
    rank, once backward has run. Reading it needs no other rank."""

    _help = (
        "the loss is not computed before engine.backward(loss) under a pipeline; call that first, then read it "
        "(loss.item()). To change the loss (scale it, add to it) do so in the criterion; to accumulate set "
        "gradient_accumulation"
    )

    def __init__(self, output: PipelineOutput, call: Any) -> None:
        self.output = output
        self.call = call

    def backward(self, *_: Any, **__: Any) -> Any:
        raise HandleError("loss.backward() does not run the pipeline; write engine.backward(loss)")


class Elsewhere(Handle):
    """An output in evaluation that only the last stage has (`eval_outputs="last"`)."""

    _help = (
        "only the ranks with the last stage have the output (parallel.pipeline.eval_outputs='last'): use it where "
        "engine.context.is_last_stage is true, or set eval_outputs='all'"
    )


def find_handles(tree: Any) -> list[Handle]:
    """The handles among arguments, also within lists, tuples and dicts."""
    if isinstance(tree, Handle):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [handle for item in tree for handle in find_handles(item)]
    return [handle for item in tree.values() for handle in find_handles(item)] if isinstance(tree, dict) else []


def replace(tree: Any, old: Handle, new: Any) -> Any:
    """`tree` with `new` in the place of `old`."""
    if tree is old:
        return new
    if all(handle is not old for handle in find_handles(tree)):
        return tree
    if isinstance(tree, dict):
        changed = copy.copy(tree)
        changed.update({key: replace(item, old, new) for key, item in tree.items()})
        return changed
    items = [replace(item, old, new) for item in tree]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
