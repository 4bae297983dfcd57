"""What crosses from stage to stage: the shapes of outputs, found without data, and the tensors of a tree in a form that
torch's stages can send.

torch.distributed.pipelining sends tuples of floating-point tensors that all require gradients, and expects a gradient
for each. (Its versions differ in their handling of other tensors.) So integers are sent as the bits of a float, and
tensors that need no gradient are sent as if they did, and get zeros back. Everything else in the tree is not sent: each
rank knows a stage's output, as a tree of tensors on the meta device.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Function

from ...errors import InputError, shorten
from ...utils.tensors import map_tensors, tensors_of
from ...utils.torch_private import DATA_NEEDED
from ..modules import meta_copy, run_without_data
from ..rng import IsolatedRNG
from .fx_trace import plain_attributes
from .pieces import Call

if TYPE_CHECKING:
    from .axis import StageParameters

_CACHED = type(functools.lru_cache(len))


@contextmanager
def caches_as_before() -> Iterator[None]:
    """A scope after which functions under functools.cache hold no tensors without memory."""
    before = _cache_misses()
    try:
        yield
    finally:
        for function, misses in _cache_misses().items():
            if misses != before.get(function, 0):
                function.cache_clear()


def _cache_misses() -> dict[Any, int]:
    found = (each for each in gc.get_referrers(_CACHED) if type(each) is _CACHED)  # as each object refers to its type
    return {each: each.cache_info().misses for each in found if not str(each.__module__).startswith("torch.")}


@caches_as_before()
def infer_stages(
    params: StageParameters,
    model: nn.Module,
    call: Call,
    autocast: Callable[[], AbstractContextManager[Any]],
    stages: Sequence[int],
    given: Any,
) -> list[Any]:
    """The output of each of `stages` for `call`: a tree of tensors on the meta device. Nothing is computed or sent.

    The forward runs on a copy of `params.meta_model`, whose attributes it may change.

    Args:
        model: this rank's, in training mode or not.
        autocast: the scope of the stages' forward.
        stages: consecutive ones.
        given: the output of the stage before them, as returned here; None before the first one.

    Raises:
        InputError: the forward needs values.
    """
    meta_model, partition = prepare(params, model, call), params.partition

    def run_stages(args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any) -> list[Any]:
        activations, trees = map_tensors(_receive, given), []
        before = {name for name, _ in _plain_tensors(meta_model)}  # such as the weight that weight_norm computes
        for stage in stages:
            each = Call(args, kwargs)
            with autocast():
                for piece in partition.stages[stage]:
                    activations = piece.run(meta_model, each, activations)
            trees.append(activations)
            activations = map_tensors(_receive, activations)
        for name, value in _plain_tensors(meta_model):
            if name not in before and value.requires_grad and not value.is_leaf:
                raise InputError(
                    f"{name} is kept on the model with its graph, perhaps for a loss term, but the criterion runs on "
                    "the last stage only, which cannot reach it; return it as a part of the output, or keep it detached"
                )
        return trees

    try:
        with IsolatedRNG(0):  # what this rank's stages draw, others do not
            trees = run_without_data(meta_model, run_stages, params.context.device, call.args, dict(call.kwargs), given)
    except (*DATA_NEEDED, RuntimeError) as error:
        raise InputError(
            "the model's forward failed on tensors without data, on which a pipeline finds the shapes between its "
            f"stages (.item(), if or boolean indexing of activations ask for values): {str(error).splitlines()[0]}"
        ) from error
    return [map_tensors(_without_memory, tree) for tree in trees]


def prepare(params: StageParameters, model: nn.Module, call: Call) -> nn.Module:
    """A copy of `params.meta_model` in the modes of this rank's `model`, after `prepare` of its pieces for `call`.

    Raises:
        InputError: the model has other modules than at initialize, or cannot be traced for this call.
    """
    meta_model = meta_copy(params.meta_model, params.meta_model)
    changed = sorted(dict(meta_model.named_modules()).keys() ^ dict(model.named_modules()).keys())
    if changed:
        raise InputError(
            f"{shorten(changed)}: modules that were added to the model after initialize, or removed; under a pipeline "
            "each rank holds its stages of the model as it was then. Close the engine, and initialize again"
        )
    for mine, theirs in zip(meta_model.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    # Of other modules the rest follows from a call: a table must fit the length that it was made for.
    for name, module in params.partition.traced(model):
        vars(meta_model.get_submodule(name)).update(plain_attributes(module))
    for piece in params.partition.pieces:
        if piece.prepare is not None:
            piece.prepare(meta_model, call)
    return meta_model


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors on modules that are neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield ".".join(filter(None, (path, name))), value


def _receive(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as the next stage receives it: contiguous, and not a leaf, so that it may be changed in place."""
    received = tensor.detach().contiguous()
    return received.requires_grad_().clone() if tensor.requires_grad else received


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def on_wire(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a tree as they are sent, on the meta device."""
    return tuple(
        torch.empty(tensor.shape, dtype=_wire_dtype(tensor.dtype), device="meta", requires_grad=True)
        for tensor in tensors_of(tree)
    )


def pack(result: Any, expected: Any) -> list[torch.Tensor]:
    """The tensors of a stage's result as they are sent.

    Raises:
        InputError: their shapes differ from the tree `expected`: the result depends on data.
    """
    tensors = [_to_wire(tensor) for tensor in tensors_of(result)]
    wanted = [(tuple(t.shape), t.dtype) for t in on_wire(expected)]
    found = [(tuple(t.shape), t.dtype) for t in tensors]
    if wanted != found:
        raise InputError(
            f"a stage returned tensors of {found}, where {wanted} was expected from its inputs' shapes. Pad to sizes "
            "that do not depend on the data; and do not call engine(...) within an autocast of your own"
        )
    return tensors


def restore(received: Sequence[torch.Tensor], tree: Any) -> Any:
    """The tree of the received tensors, without gradients."""
    following: Iterator[torch.Tensor] = iter(received)
    return map_tensors(lambda meta: _from_wire(next(following), meta.dtype), tree)


def unpack(received: Sequence[torch.Tensor], tree: Any) -> tuple[Any, torch.Tensor]:
    """The tree of the received tensors, and a link for `require_gradients`.

    The tensors may be changed in place, as in one process.
    """
    *tensors, link = _Unpack.apply(*received)
    metas = tensors_of(tree)
    needed = [t if meta.requires_grad else t.detach() for t, meta in zip(tensors, metas, strict=True)]
    return restore(needed, tree), link


def require_gradients(results: Sequence[torch.Tensor], link: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """`results`, all of which require gradients, and whose backward reaches all tensors that the stage received."""
    if link is None and all(result.requires_grad for result in results):
        return tuple(results)
    if link is None:
        link = torch.zeros((), device=results[0].device, requires_grad=True)
    return _Link.apply(link, *results)


class _Unpack(Function):
    """Tensors that are not leaves, and share memory with the received ones; unused ones get a gradient of zeros. The
    last one links them to the results of the stage, which may use none of them."""

    @staticmethod
    def forward(ctx: Any, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *(tensor.detach() for tensor in received), received[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(_contiguous, grads[:-1]))  # torch sends them with their strides if it splits backward


class _Link(Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not as views, which torch's zero-bubble schedules could not detach in place.
        return tuple(torch.ops.aten._unsafe_view(result, result.shape) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


# -- the wire --------------------------------------------------------------------------------------------------------


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype
    if dtype.is_complex:
        raise InputError(
            "complex tensors cannot be sent through a pipeline; send their real and imaginary parts as two tensors"
        )
    return torch.float64 if dtype.itemsize == 8 else torch.float32


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        # A tensor with a dim of 0 or 1 is contiguous with other strides, too, but not for torch 2.11.
        tensor = tensor.reshape(-1).view(tensor.shape)
    return tensor


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous and floating-point; an integer becomes the float with its bits."""
    tensor = _contiguous(tensor)
    if tensor.is_floating_point():
        return tensor
    wire = _wire_dtype(tensor.dtype)
    return (tensor if tensor.dtype.itemsize == 8 else tensor.to(torch.int32)).view(wire)


def _from_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return tensor
    return tensor.view(dtype) if dtype.itemsize == 8 else tensor.view(torch.int32).to(dtype)
