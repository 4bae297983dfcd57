"""Models, criteria and plans of users that a layout trains otherwise than one process does: both have the fault."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from tests.composition.workloads import find_workload

from .workloads import Between, Given, given


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# -- criteria --------------------------------------------------------------------------------------------------------


def sum_over_samples() -> Given:
    """The criterion sums over the samples, and the config says that it is a mean."""
    return given("mlp", loss=lambda output, target: F.cross_entropy(output, target, reduction="sum"))


def sum_over_a_fixed_batch() -> Given:
    """The criterion divides the sum over the samples by the size of the whole batch."""
    return given("mlp", loss=lambda output, target: F.cross_entropy(output, target, reduction="sum") / 8)


def unequal_counts() -> Given:
    """The criterion is a mean over the targets that count, of which each batch has another number."""
    return given("mlp", loss=lambda output, target: F.cross_entropy(output, target, ignore_index=0))


def class_weights() -> Given:
    """The criterion is a mean by the weights of classes."""
    return given("mlp", loss=lambda output, target: F.cross_entropy(output, target, torch.arange(1.0, 5.0).to(output)))


def negatives_in_the_batch() -> Given:
    """The criterion compares each sample with the others of its batch."""

    def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    return given("mlp", loss=contrast)


def gathered_without_gradient() -> Given:
    """The criterion gathers the ranks' features itself, and torch's all_gather has no gradient."""

    def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(output) for _ in range(_ranks())]
        if dist.is_initialized():
            dist.all_gather(everyone, output.detach())
        others = torch.cat(everyone) if dist.is_initialized() else output
        place = dist.get_rank() * len(output) if dist.is_initialized() else 0
        return F.cross_entropy(output @ others.T, torch.arange(len(output)) + place)

    return given("mlp", loss=contrast)


def penalty_on_a_shard() -> Given:
    """The criterion adds the norm of a weight, of which each tensor rank has a part."""
    model = find_workload("mlp").make()
    return given("mlp", model, lambda output, target: F.cross_entropy(output, target) + 0.1 * model.up.weight.norm())


# -- forwards --------------------------------------------------------------------------------------------------------


def between(**methods: Any) -> Given:
    """The MLP with this code between its layers."""
    return given("mlp", type("Model", (Between,), methods)())


def learns(model: nn.Module) -> bool:
    """Whether this forward is one that backward follows."""
    return model.training and torch.is_grad_enabled()


def rows_mixed() -> Given:
    """The forward subtracts the mean over the rows of its batch."""
    return between(after_first=lambda self, x: x - x.mean(0))


def state_kept() -> Given:
    """The forward uses what it has seen in the call before."""

    def after_first(self: Any, x: torch.Tensor) -> torch.Tensor:
        before, self.seen = self.seen, x.detach().mean(0) if learns(self) else self.seen
        return x + before

    return between(seen=0.0, after_first=after_first)


def calls_counted() -> Given:
    """The forward depends on how often it was called."""

    def after_first(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += learns(self)
        return x * (1 + 0.1 * self.calls)

    return between(calls=0, after_first=after_first)


def weights_written() -> Given:
    """The forward writes into a weight, once in each call."""

    class Writes(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                with torch.no_grad():
                    self.first.weight.mul_(0.99)
            return super().forward(x)

    return given("mlp", Writes())


def scaled_by_the_world() -> Given:
    """The forward multiplies by the number of ranks."""
    return between(after_first=lambda self, x: x * _ranks())


def depends_on_the_rank() -> Given:
    """The forward adds something on ranks other than the first."""
    return between(after_first=lambda self, x: x + 0.1 * (dist.get_rank() if dist.is_initialized() else 0))


def random_numbers() -> Given:
    """The forward draws random numbers."""
    return between(after_first=lambda self, x: x + 0.1 * torch.randn_like(x) if self.training else x)


def features_mixed_in_training() -> Given:
    """The forward subtracts the mean over features that a tensor group shards, in training only."""
    return between(after_up=lambda self, x: x - x.mean(-1, keepdim=True) if learns(self) else x)


def features_mixed() -> Given:
    """The forward has a softmax over features that a tensor group shards."""
    return between(after_up=lambda self, x: x.softmax(-1))


def tokens_mixed_in_training() -> Given:
    """The forward subtracts the mean over tokens that context ranks share, in training only."""
    from gpt import GPT

    class Centred(GPT):
        def embed(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
            x = super().embed(ids, positions)
            return x - x.mean(1, keepdim=True) if learns(self) else x

    return given("gpt", Centred(context=8, width=16, depth=2, num_heads=4))


# -- buffers, gradients, layers of one's own --------------------------------------------------------------------------


def buffer_of_each_rank() -> Given:
    """The forward keeps a mean of what it sees in a buffer, on each rank of its own batches."""

    class Averages(Between):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(16))

        def after_first(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return x

    return given("mlp", Averages())


class Normalised(Function):
    """Its backward divides the gradient of the batch by its norm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


def gradient_of_its_own() -> Given:
    """A custom autograd function divides by the norm of what it gets, which is this rank's rows."""
    return between(after_first=lambda self, x: Normalised.apply(x))


def gradient_hook() -> Given:
    """A hook on the gradient of a weight divides it by its norm, before ranks are summed."""
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
        qkv = self.qkv(x)
        # With a norm over each head the size is fixed; without, the number of heads.
        shape = (batch, length, 3, -1, 4) if isinstance(self.norm, nn.LayerNorm) else (batch, length, 3, 4, -1)
        q, k, v = qkv.view(shape).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(self.norm(q), k, v)
        return self.out(heads.transpose(1, 2).reshape(batch, length, -1))


class Sequence(nn.Module):
    """An embedding, attention, and a head."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.tokens, self.attention, self.head = nn.Embedding(256, 16), Attention(has_norm), nn.Linear(16, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.tokens(ids)))


def fixed_heads() -> Given:
    """A hand-written attention has the whole model's number of heads on every tensor rank."""
    return given("gpt", Sequence(has_norm=False))


def plan_without_partial() -> Given:
    """The plan does not say that a norm works on some of the heads: its gradients are not summed."""
    return given("gpt", Sequence(has_norm=True))


PLAN = {"attention.qkv": "fused_colwise(3)", "attention.out": "rowwise"}
"""`parallel.tensor.plan` of `Sequence`."""
