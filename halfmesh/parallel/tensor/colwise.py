"""Products of colwise layers. Backward sums the gradient of their input over the ranks while it computes a weight's
gradient (Megatron-LM's order).

Of the nodes that are ready, autograd runs the one that was made last. So these are made in the order `end_sums` of the
input's gradient, `_WeightGrad` of the first layer, `begin_sum`, a layer's `input_grad`, `_Product`, and run in reverse.
Where no gradient flows they pass on a token, an empty tensor. (Lists hide tensors from autograd.)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .. import collectives
from ..collectives import Wait, connect

SEQUENCE_DIM = 1
"""The dimension of activations along which sequence parallelism shards them: [batch, sequence, ...]."""


class SharedInput:
    """An input of layers that each give a partial gradient of it; they share the sum of these over the ranks.

    Args:
        x: the input, which requires a gradient; if `gathers`, this rank's shard along the sequence.
    """

    def __init__(self, x: torch.Tensor, group: dist.ProcessGroup, gathers: bool = False) -> None:
        self._shard = [x] if gathers else []
        self._values = collectives.start_gather(x.detach(), SEQUENCE_DIM, group)() if gathers else x.detach()
        self._sent = sent = InputSums(group, gathers)
        self._token = connect(x, _token, lambda _: sent.end_sums())
        self._cast = self._values

    def branch(self) -> torch.Tensor:
        """The input, with a separate sum."""
        values = self._values
        return connect(self._token, lambda _: values.detach(), self._sent.begin_sum)

    @cached_property
    def whole(self) -> torch.Tensor:
        """The input, with one sum for all layers that take it in this way."""
        return self.branch()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `torch.nn.functional.linear`, also under autocast. `weight` requires a gradient. Of a gathered input this
        rank's shard is kept for backward."""
        dtype, device = self._values.dtype, self._values.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        if self._cast.dtype != dtype:
            self._cast = self._values.to(dtype)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        product = _ForBackward(self._sent, dtype)
        for_weight = _WeightGrad.apply(weight, bias, product)
        for_input = connect(self.whole, _token, product.input_grad, [weight])
        return _Product.apply(for_input, for_weight, [self._cast, weight, bias], product, self._shard)


class InputSums:
    """The sums that backward sends for an input.

    Attributes:
        gathers: the input was gathered from shards along the sequence, so that each rank keeps its shard of the sum.
    """

    def __init__(self, group: dist.ProcessGroup, gathers: bool) -> None:
        self.gathers, self._group = gathers, group
        self._sums: list[Wait] = []
        self._input: tuple[torch.dtype, Wait] | None = None

    def begin_sum(self, grad: torch.Tensor) -> torch.Tensor:
        """Start the sum of a partial gradient."""
        if self.gathers:
            self._sums.append(collectives.start_sum_shard(grad, SEQUENCE_DIM, self._group))
        else:
            self._sums.append(collectives.start_sum(grad, self._group))
        return _token(grad)

    def end_sums(self) -> torch.Tensor:
        """The sum of all partial gradients."""
        sums, self._sums, self._input = self._sums, [], None
        return sum((wait() for wait in sums[1:]), sums[0]())

    def gather(self, shard: torch.Tensor, dtype: torch.dtype) -> Wait:
        """Gather the input again, once for all products of it."""
        if self._input is None or self._input[0] != dtype:
            self._input = dtype, collectives.start_gather(shard.to(dtype), SEQUENCE_DIM, self._group)
        return self._input[1]


class _ForBackward:
    """The values that the nodes of a product share in backward: the gradient of its output, and its input, or this
    rank's shard of the input."""

    def __init__(self, sent: InputSums, dtype: torch.dtype) -> None:
        self._sent, self._dtype = sent, dtype
        self._pair: Any = None

    def begin(self, grad: torch.Tensor, kept: torch.Tensor) -> None:
        self._pair = grad, kept
        if self._sent.gathers:
            self._sent.gather(kept, self._dtype)

    def input_grad(self, _: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._pair[0] @ weight

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output's gradient and the input, as matrices."""
        (grad, x), self._pair = self._pair, None
        x = self._sent.gather(x, self._dtype)() if self._sent.gathers else x
        return grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])


def _token(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0)


class _WeightGrad(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, product: _ForBackward) -> torch.Tensor:
        ctx.product, ctx.is_transposed = product, not weight.is_contiguous()
        return _token(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        grad, x = ctx.product.take()
        weight = (x.t() @ grad).t() if ctx.is_transposed else grad.t() @ x
        return weight, grad.sum(0) if ctx.needs_input_grad[1] else None, None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, for_input: Any, for_weight: Any, values: Any, product: Any, shard: Any) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(*shard or values[:1])
        return F.linear(*values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.product.begin(grad, *ctx.saved_tensors)
        return _token(grad), _token(grad), None, None, None
