"""What the rooms `amp` and `parallel` share: the parameters that a rank holds, and one way to reach the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn, optim

from .tensors import in_memory_order


@dataclass(eq=False, slots=True)
class ParamShard:
    """What one rank holds of one parameter.

    `parallel` makes these and keeps `weight` true, `amp` turns their gradients into new weights. Neither needs to
    know how the other works.
    """

    name: str
    """The parameter's name in the whole model."""
    param: nn.Parameter
    """The parameter as the model on this rank uses it."""
    weight: float = 1.0
    """1 / (number of ranks that hold a copy), so that a sum over all ranks counts every element once."""
    source: ParamShard | None = field(default=None, repr=False)
    """The parameter that the model uses, where `param` is only the part of it that this rank steps. Backward leaves the
    gradient there."""
    start: int = 0
    """Where in the memory of `source` the part begins, in elements."""
    original: nn.Parameter | None = field(default=None, repr=False)
    """The parameter that the model came with, where it uses another one meanwhile, whose memory `param` shares."""

    @property
    def model_param(self) -> nn.Parameter:
        """The parameter that the model came with."""
        if self.original is not None:
            return self.original
        return self.param if self.source is None else self.source.param

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of `tensor`, which lies in memory as the model's parameter does, belongs to `param`: a view."""
        if self.source is None or self.original is not None:
            return tensor
        return in_memory_order(tensor)[self.start : self.start + self.param.numel()]

    def rebind_view(self) -> None:
        """The model's parameter has other memory now; a part of it is a view of that."""
        if self.source is not None and self.original is None:
            self.param.data = self.part_of(self.source.param.data)

    def rebind_grad(self) -> None:
        """Others gave `source` another gradient, or took it away: `param` gets its part of that."""
        assert self.source is not None
        grad: Any = self.source.param.grad
        if grad is None:
            self.param.grad = None
        elif self.original is not None:  # a DTensor, whose local part shares its memory
            self.param.grad = grad.to_local()
        else:
            set_grad(self.param, self.part_of(torch.empty_like(self.source.param, dtype=grad.dtype).copy_(grad)))


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make `grad` the gradient of `param`, in whatever dtype it is: fp32 sums of a half-precision parameter, too.

    What later backwards add is added in that dtype, until `clear_grads`.
    """
    if param.grad_dtype != grad.dtype:
        param.grad = None  # torch changes no dtype under a gradient
        param.grad_dtype = grad.dtype
    param.grad = grad


def clear_grads(params: Iterable[torch.Tensor]) -> None:
    """Forget the gradients of `params`; the next ones come in the parameters' dtypes."""
    for param in params:
        if param.grad is not None:
            param.grad = None
            if param.grad_dtype is not param.dtype:
                param.grad_dtype = param.dtype


def follow_dtype(param: torch.Tensor) -> None:
    """`param` has another dtype now, and no gradient: a `grad_dtype` that was ever set does not follow by itself."""
    param.grad = None
    if param.grad_dtype is not param.dtype:
        param.grad_dtype = param.dtype


def foreign_params(optimizer: optim.Optimizer, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of `optimizer` that are not among `known`, by their place in its groups and their shape."""
    ids = set(map(id, known))
    return {
        f"param_groups[{g}]['params'][{i}] of shape {tuple(param.shape)}": param
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if id(param) not in ids
    }


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype in which the model computes with `param`: under fsdp and NAIVE it is not the one that is kept."""
    dtype: torch.dtype = getattr(param, "_halfmesh_computes_in", param.dtype)
    return dtype


def tell_compute_dtype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """What `compute_dtype` says of `param` from now on."""
    param._halfmesh_computes_in = dtype  # type: ignore[attr-defined]


class Publisher(Protocol):
    """Takes what a rank has stepped to the ranks that use it."""

    def begin(self) -> None:
        """An update is about to write weights."""
        ...

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """The weights of `shards` are new. Need not wait until the others have them."""
        ...

    def finish(self) -> None:
        """All of the update was told. Afterwards every rank has all new weights."""
        ...


class Ranks(Protocol):
    """The ranks that share one update."""

    @property
    def rank(self) -> int:
        """This process's place among them, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> object:
        """Sum `tensor` in place over all of them."""
        ...


@dataclass(frozen=True)
class OneRank:
    """`Ranks` of a single process: nothing to talk to."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """A sum over one rank."""
