"""A scope that leaves no trace: what is computed in it changes nothing of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch import version
from ..checkpoint.rng import rank_random, set_rank_random
from ..shard import clear_grads, set_grad
from .contents import Undo, contents
from .parts import Parts

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def undisturbed(parts: Parts) -> Iterator[list[str]]:
    """Put back what a forward and a backward change: gradients, buffers, parameters that are not trained and other
    attributes of modules, random numbers, the accumulation cycle. Outside of a cycle only.

    (Not seen: what a model changes inside objects of its own.)

    Yields:
        A list, in which afterwards the names of the trained parameters are that the forward has changed. These stay so:
        a copy of all would take too much memory.
    """
    _reshard(parts)  # what is copied is the shards: gathered weights go
    written: list[str] = []
    trained = {name: (param, version(param)) for name, param in _trained(parts)}
    undo = [*_gradients(parts), *_random_numbers(parts), *_plan_check(parts)]
    known: dict[int, Any] = {}
    for module in parts.modules():
        undo += _attributes(module, known)
    try:
        yield written
    finally:
        parts.accumulation.clear()
        _reshard(parts)  # a forward without a backward leaves weights gathered
        written += [name for name, (param, before) in trained.items() if version(param) != before]
        with torch.no_grad():
            for put_back in undo:
                put_back()


def _reshard(parts: Parts) -> None:
    if parts.division.sharded is not None:
        parts.division.sharded.reshard()


def _trained(parts: Parts) -> Iterator[tuple[str, nn.Parameter]]:
    criterion = parts.criterion
    others = criterion.named_parameters(prefix="criterion") if isinstance(criterion, nn.Module) else ()
    for name, param in (*parts.model.named_parameters(), *others):
        if param.requires_grad and not param.is_inference():
            yield name, param


def _gradients(parts: Parts) -> Iterator[Undo]:
    """Parameters that the optimizer does not hold may have some that nobody clears."""
    shards = parts.update.master_weights.shards
    params = [shard.param for shard in (*shards, *(s.source for s in shards if s.source is not None))]
    known = {id(param) for param in params}
    params += [param for param in parts.others() if id(param) not in known]
    for param in params:
        grad = param.grad
        yield partial(clear_grads, [param]) if grad is None else partial(set_grad, param, grad)
        clear_grads([param])


def _random_numbers(parts: Parts) -> Iterator[Undo]:
    state = rank_random(parts.context, parts.division)
    yield lambda: set_rank_random(state, parts.context, parts.division)


def _plan_check(parts: Parts) -> Iterator[Undo]:
    """The tensor plan is checked before the first update, not in what is computed here."""
    tensor = parts.division.tensor
    if tensor is not None:
        yield partial(setattr, tensor, "check", tensor.check)
        tensor.check = None


def _attributes(module: nn.Module, known: dict[int, Any]) -> Iterator[Undo]:
    own = vars(module)
    buffers = dict(module._buffers)
    frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
    before = {name: value for name, value in own.items() if name not in _OF_EVERY_MODULE}

    def put_back() -> None:
        module._parameters.update(frozen)
        module._buffers.clear()
        module._buffers.update(buffers)
        for name in [name for name in own if name not in before and name not in _OF_EVERY_MODULE]:
            del own[name]
        own.update(before)

    yield put_back
    yield from contents((*frozen.values(), *buffers.values(), *before.values()), known)
