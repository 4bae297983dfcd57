"""Models, criteria and plans of users that a layout trains otherwise than one process does: both have the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tests.composition.workloads import find_workload

from .fault import GRADIENT, LOSS, OTHERWISE, At, In, after, before, grad
from .workloads import Between, Given, given


def make(what: str) -> Given:
    """What the user's fault of this name builds: ranks are sent the name."""
    return USERS[what][0]()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def loss(function: Callable[..., torch.Tensor]) -> Callable[[], Given]:
    """The MLP with this criterion, of output and targets."""
    return lambda: given("mlp", loss=function)


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def contrast_gathered(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    everyone = [output.detach()]
    if dist.is_initialized():
        everyone = [torch.empty_like(output) for _ in range(_ranks())]
        dist.all_gather(everyone, output.detach())
    others = torch.cat(everyone) if dist.is_initialized() else output
    return F.cross_entropy(output @ others.T, torch.arange(len(output)) + _rank() * len(output))


def penalty_on_a_shard() -> Given:
    model = find_workload("mlp").make()
    return given("mlp", model, lambda output, target: F.cross_entropy(output, target) + 0.1 * model.up.weight.norm())


def between(**methods: Any) -> Callable[[], Given]:
    """The MLP with this code between its layers."""
    return lambda: given("mlp", type("Model", (Between,), methods)())


def learns(model: nn.Module) -> bool:
    """Whether this forward is one that backward follows."""
    return model.training and torch.is_grad_enabled()


def add_what_was_seen(self: Any, x: torch.Tensor) -> torch.Tensor:
    before, self.seen = self.seen, x.detach().mean(0) if learns(self) else self.seen
    return x + before


def count_calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += learns(self)
    return x * (1 + 0.1 * self.calls)


def write_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.training:
        with torch.no_grad():
            self.first.weight.mul_(0.99)
    return Between.forward(self, x)


def tokens_mixed_in_training() -> Given:
    from gpt import GPT

    class Centred(GPT):
        def embed(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
            x = super().embed(ids, positions)
            return x - x.mean(1, keepdim=True) if learns(self) else x

    return given("gpt", Centred(context=8, width=16, depth=2, num_heads=4))


class Averages(Between):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def after_first(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x


class Normalised(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


def gradient_hook() -> Given:
    model = find_workload("mlp").make()
    model.up.weight.register_hook(lambda grad: grad / grad.norm())
    return given("mlp", model)


class Attention(nn.Module):
    """Attention written by hand, with four heads whatever the shape of its activations."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(4) if has_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # With a norm over each head the size is fixed; without, the number of heads.
        sizes = (-1, 4) if isinstance(self.norm, nn.LayerNorm) else (4, -1)
        q, k, v = self.qkv(x).view(batch, length, 3, *sizes).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(self.norm(q), k, v)
        return self.out(heads.transpose(1, 2).reshape(batch, length, -1))


class Sequence(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.tokens, self.attention, self.head = nn.Embedding(256, 16), Attention(has_norm), nn.Linear(16, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.tokens(ids)))


PLANNED = At.GPT_TENSOR.config()["parallel"]
PLAN = {"attention.qkv": "fused_colwise(3)", "attention.out": "rowwise"}
PLANNED = {"parallel": PLANNED | {"tensor": PLANNED["tensor"] | {"plan": PLAN}}}
SUMMED, BETWEEN = (LOSS, GRADIENT), before("up")

USERS: dict[str, tuple[Any, In]] = {
    "The criterion sums over the samples, and the config says that it is a mean": (
        loss(lambda output, target: F.cross_entropy(output, target, reduction="sum")),
        In(At.DATA, SUMMED, cause="set loss_reduction='sum'"),
    ),
    "The criterion divides the sum over the samples by the size of the whole batch": (
        loss(lambda output, target: F.cross_entropy(output, target, reduction="sum") / 8),
        In(At.TWICE, SUMMED),
    ),
    "The criterion is a mean over the targets that count, of which each batch has another number": (
        loss(lambda output, target: F.cross_entropy(output, target, ignore_index=0)),
        In(At.DATA, SUMMED, cause="set loss_reduction='weighted'"),
    ),
    "The criterion is a mean by the weights of classes": (
        loss(lambda output, target: F.cross_entropy(output, target, torch.arange(1.0, 5.0).to(output))),
        In(At.DATA, SUMMED),
    ),
    "The criterion compares each sample with the others of its batch": (
        loss(contrast),
        In(At.DATA, SUMMED, cause="samples compared with each other"),
    ),
    "The criterion gathers the ranks' features itself, and torch's all_gather has no gradient": (
        loss(contrast_gathered),
        In(At.DATA, SUMMED),
    ),
    "The criterion adds the norm of a weight, of which each tensor rank has a part": (
        penalty_on_a_shard,
        In(At.MLP_TENSOR, (LOSS, "gradient up.weight; *", "rejected *losses*")),
    ),
    "The forward subtracts the mean over the rows of its batch": (
        between(after_first=lambda self, x: x - x.mean(0)),
        In(At.DATA, BETWEEN, cause="the model combines rows of the batch"),
    ),
    "The forward uses what it has seen in the call before": (
        between(seen=0.0, after_first=add_what_was_seen),
        In(At.DATA, BETWEEN, cause="keeps state from an earlier call"),
    ),
    "The forward depends on how often it was called": (
        between(calls=0, after_first=count_calls),
        In(At.TWICE, BETWEEN),
    ),
    "The forward writes into a weight, once in each call": (
        between(forward=write_weights),
        In(At.TWICE, after("first")),
    ),
    "The forward multiplies by the number of ranks": (
        between(after_first=lambda self, x: x * _ranks()),
        In(At.DATA, BETWEEN),
    ),
    "The forward adds something on ranks other than the first": (
        between(after_first=lambda self, x: x + 0.1 * _rank()),
        In(At.DATA, BETWEEN),
    ),
    "The forward draws random numbers": (
        between(after_first=lambda self, x: x + 0.1 * torch.randn_like(x) if self.training else x),
        In(At.DATA, BETWEEN, cause="draws random numbers"),
    ),
    "The forward subtracts the mean over features that a tensor group shards, in training only": (
        between(after_up=lambda self, x: x - x.mean(-1, keepdim=True) if learns(self) else x),
        In(At.MLP_TENSOR, before("down"), cause="the model combines features that are split over tensor ranks"),
    ),
    "The forward has a softmax over features that a tensor group shards": (
        between(after_up=lambda self, x: x.softmax(-1)),
        In(At.MLP_TENSOR, (before("down"), OTHERWISE)),
    ),
    "The forward subtracts the mean over tokens that context ranks share, in training only": (
        tokens_mixed_in_training,
        In(At.GPT_CONTEXT, before("blocks.0*")),
    ),
    "The forward keeps a mean of what it sees in a buffer, on each rank of its own batches": (
        lambda: given("mlp", Averages()),
        In(At.DATA, "buffer average; *", cause="each data rank updates it from its own batches"),
    ),
    "A custom autograd function divides by the norm of what it gets, which is this rank's rows": (
        between(after_first=lambda self, x: Normalised.apply(x)),
        In(At.DATA, grad("first")),
    ),
    "A hook on the gradient of a weight divides it by its norm, before ranks are summed": (
        gradient_hook,
        In(At.DATA, "gradient up.weight; *"),
    ),
    "A hand-written attention has the whole model's number of heads on every tensor rank": (
        lambda: given("gpt", Sequence(has_norm=False)),
        In(At.GPT_TENSOR, ("* attention*", "rejected *attention*"), more=PLANNED),
    ),
    "The plan does not say that a norm works on some of the heads: its gradients are not summed": (
        lambda: given("gpt", Sequence(has_norm=True)),
        In(At.GPT_TENSOR, ("gradient attention.norm.*", "rejected *attention.norm*"), more=PLANNED),
    ),
}
