"""Products of colwise layers. What backward sends for their input is in flight while a weight's gradient is computed
(Megatron-LM's order).

Of the nodes that are ready, autograd runs the one that was made last. So these are made in the order `_EndSum` of the
input's gradient, `_WeightGrad` of the first layer, `_BeginSum`, `_InputGrad`, `_Product`, and run in reverse. Where no
gradient flows they pass on a token, an empty tensor. (Lists hide tensors from autograd.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .. import collectives
from ..collectives import Wait

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
        self._cast, self._sent = self._values, InputSums(group, gathers)
        self._token = _EndSum.apply(x, self._sent)
        self._whole: torch.Tensor | None = None

    def branch(self) -> torch.Tensor:
        """The input, with a sum of its own."""
        return _BeginSum.apply(self._token, [self._values], self._sent)

    def whole(self) -> torch.Tensor:
        """The input."""
        if self._whole is None:
            self._whole = self.branch()
        return self._whole

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
        for_input = _InputGrad.apply(self.whole(), [weight], product)
        return _Product.apply(for_input, for_weight, [self._cast, weight, bias, *self._shard], product)


class InputSums:
    """What backward sends for an input: sums of its gradient, and the input again.

    Attributes:
        gathers: the input was gathered from shards along the sequence, so that each rank keeps its shard of the sum.
    """

    def __init__(self, group: dist.ProcessGroup, gathers: bool) -> None:
        self.gathers, self._group = gathers, group
        self._sums: list[Wait] = []
        self._input: tuple[torch.dtype, Wait] | None = None

    def begin_sum(self, grad: torch.Tensor) -> None:
        if self.gathers:
            self._sums.append(collectives.start_sum_shard(grad, SEQUENCE_DIM, self._group))
        else:
            self._sums.append(collectives.start_sum(grad, self._group))

    def end_sums(self) -> torch.Tensor:
        sums, self._sums, self._input = self._sums, [], None
        return sum((wait() for wait in sums[1:]), sums[0]())

    def gather(self, shard: torch.Tensor, dtype: torch.dtype) -> Wait:
        """Gather the input again, once for all products of it."""
        if self._input is None or self._input[0] != dtype:
            self._input = dtype, collectives.start_gather(shard.to(dtype), SEQUENCE_DIM, self._group)
        return self._input[1]


class _ForBackward:
    """What nodes of a product have in common in backward.

    Attributes:
        dtype: of the product.
        grad: of its output.
        kept: its input, or this rank's shard of it.
    """

    grad: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def __init__(self, sent: InputSums, dtype: torch.dtype) -> None:
        self.sent, self.dtype = sent, dtype

    def begin(self, grad: torch.Tensor, kept: torch.Tensor) -> None:
        self.grad, self.kept = grad, kept
        if self.sent.gathers:
            self.sent.gather(kept, self.dtype)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output's gradient and the input, as matrices."""
        grad, x = self.grad, self.kept
        assert grad is not None
        assert x is not None
        self.grad = self.kept = None
        x = self.sent.gather(x, self.dtype)() if self.sent.gathers else x
        return grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])


class _EndSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: InputSums) -> torch.Tensor:
        ctx.sent = sent
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.sent.end_sums(), None


class _BeginSum(Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, values: list[torch.Tensor], sent: InputSums) -> torch.Tensor:
        ctx.sent = sent
        return values[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.sent.begin_sum(grad)
        return grad.new_empty(0), None, None


class _InputGrad(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: list[torch.Tensor], product: _ForBackward) -> torch.Tensor:
        ctx.product, ctx.dtype = product, x.dtype
        ctx.save_for_backward(*weight)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (ctx.product.grad @ weight).to(ctx.dtype), None, None


class _WeightGrad(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, product: _ForBackward) -> torch.Tensor:
        ctx.product, ctx.is_transposed = product, not weight.is_contiguous()
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        grad, x = ctx.product.take()
        weight = (x.t() @ grad).t() if ctx.is_transposed else grad.t() @ x
        return weight, grad.sum(0) if ctx.needs_input_grad[1] else None, None


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, for_input: torch.Tensor, for_weight: torch.Tensor, values: list[Any], product: _ForBackward
    ) -> torch.Tensor:
        x, weight, bias, *shard = values
        ctx.product = product
        ctx.save_for_backward(*shard or [x])
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.product.begin(grad, *ctx.saved_tensors)
        return grad.new_empty(0), grad.new_empty(0), None, None
