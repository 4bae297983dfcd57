"""The types that `amp` and `parallel` share: a rank's shards of the parameters, their gradients, the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn, optim

from .tensors import in_memory_order
from .torch_private import without_subclasses


@dataclass(eq=False, slots=True)
class ParamShard:
    """One rank's shard of one parameter. `parallel` creates shards, `amp` computes new weights from their gradients.

    Attributes:
        name: the parameter's name in the full model.
        param: the parameter as the model on this rank uses it.
        weight: 1 / (number of ranks that hold a copy), so that a sum over all ranks counts every element once.
        source: set if this rank steps only a shard, `param`, of a parameter (zero1, fsdp): the parameter that the model
            uses, which receives the gradient in backward.
        start: the offset of the shard in the memory of `source`, in elements.
        original: the user's original parameter, if the model now uses another one (fsdp: a DTensor with `param` as its
            local tensor).
    """

    name: str
    param: nn.Parameter
    weight: float = 1.0
    source: ParamShard | None = field(default=None, repr=False)
    start: int = 0
    original: nn.Parameter | None = field(default=None, repr=False)

    @property
    def model_param(self) -> nn.Parameter:
        """The user's original parameter."""
        if self.original is not None:
            return self.original
        return self.param if self.source is None else self.source.param

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor` that belong to `param`, as a view; `tensor` has the model parameter's strides."""
        if self.source is None or self.original is not None:
            return tensor
        return in_memory_order(tensor)[self.start : self.start + self.param.numel()]

    def rebind_view(self) -> None:
        """Make `param` a view of the model's parameter again, after that parameter got new memory."""
        if self.source is not None and self.original is None:
            self.param.data = self.part_of(self.source.param.data)

    def rebind_grad(self) -> None:
        """Take this shard of the gradient of `source` again, after the user changed the gradient."""
        assert self.source is not None
        grad: Any = self.source.param.grad
        if grad is None:
            self.param.grad = None
        elif self.original is not None:
            self.param.grad = grad.to_local()
        else:
            set_grad(self.param, self.part_of(torch.empty_like(self.source.param, dtype=grad.dtype).copy_(grad)))


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Make `grad` the gradient of `param`, keeping its dtype, such as fp32 sums of a half-precision parameter.

    Later backwards add to it in that dtype, until `clear_grads`.
    """
    if param.grad_dtype != grad.dtype:
        param.grad = None  # torch does not change grad_dtype while there is a gradient
        param.grad_dtype = grad.dtype
    param.grad = grad


def clear_grads(params: Iterable[torch.Tensor]) -> None:
    """Set the gradients of `params` to None; the next ones come in the parameters' dtypes."""
    with without_subclasses():  # it reads no values
        for param in params:
            if param.grad is not None:
                param.grad = None
                if param.grad_dtype is not param.dtype:
                    param.grad_dtype = param.dtype


def foreign_params(optimizer: optim.Optimizer, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of `optimizer` that are not in `known`, by their index in its groups and their shape."""
    ids = set(map(id, known))
    return {
        f"param_groups[{g}]['params'][{i}] of shape {tuple(param.shape)}": param
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if id(param) not in ids
    }


def compute_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype in which the model computes with `param`: another one than its own if fsdp casts it for the gather."""
    dtype: torch.dtype = getattr(param, "_halfmesh_computes_in", param.dtype)
    return dtype


def set_compute_dtype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Make `compute_dtype` return `dtype` for `param`."""
    param._halfmesh_computes_in = dtype  # type: ignore[attr-defined]


class Publisher(Protocol):
    """Sends the weights that a rank has stepped to the ranks that use them: an all-gather (zero1, fsdp)."""

    def follow(self) -> None:
        """Called before weights are used. Those of the optimizer or model may have new memory (`x.data = ...`)."""

    def join(self, names: list[str]) -> list[str]:
        """Called before weights are sent that user code wrote into. Returns the `names` of all ranks."""

    def begin(self) -> None:
        """Called before an update writes weights."""

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """Start to send the new weights of `shards`. It need not wait for the end."""

    def finish(self) -> None:
        """Called after the last `stepped`, when all new weights are on their way."""

    def arrive(self) -> None:
        """Return when this rank has all new weights. Called after `finish`, and before weights are used; not before a
        forward, in which what uses weights waits for them."""


class Ranks(Protocol):
    """The ranks that share one update, which are those of the default process group: this rank, and their number."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class OneRank:
    """`Ranks` of a single process."""

    rank: int = 0
    size: int = 1
