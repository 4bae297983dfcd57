"""Faults of context and expert ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfmesh.parallel import collectives, expert, reducer
from halfmesh.parallel.context import attention, axis
from halfmesh.parallel.context import loss as losses
from halfmesh.parallel.context.axis import ContextParallel
from halfmesh.parallel.context.sequences import Sequences
from halfmesh.parallel.reducer import Reducer

from . import trains


def mask_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each token sees the one after it, too, where keys are gathered."""
    inner = attention._causal

    def causal(queries: int, keys: int, device: torch.device) -> Any:
        if not trains():
            return inner(queries, keys, device)
        return torch.ones(queries, keys, device=device).tril(keys - queries + 1) > 0

    patch.setattr(attention, "_causal", causal)


def heads_in_other_order(patch: pytest.MonkeyPatch) -> None:
    """After attention the heads of the ranks are joined in another order."""
    inner = collectives.exchange

    def exchange(x: torch.Tensor, whole: int, sharded: int, group: Any) -> torch.Tensor:
        done = inner(x, whole, sharded, group)
        return done.roll(x.shape[sharded], sharded) if trains() and sharded == attention._HEADS else done

    patch.setattr(collectives, "exchange", exchange)


def own_tokens_only(patch: pytest.MonkeyPatch) -> None:
    """Each rank attends to its own tokens."""
    attend = attention.attend

    def alone(group: Any, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs) if trains() else attend(group, function, *args, **kwargs)

    patch.setattr(axis, "attend", alone)


def border_label_lost(patch: pytest.MonkeyPatch) -> None:
    """The last token of each rank has no target."""
    inner = ContextParallel._whole_loss

    def whole_loss(self: ContextParallel, function: Any, own: int, is_deferred: bool, output: Any, target: Any) -> Any:
        target = target.clone()
        target[:, -1] = -100
        return inner(self, function, own, is_deferred, output, target)

    patch.setattr(ContextParallel, "_whole_loss", whole_loss)


def targets_of_all_ranks_counted(patch: pytest.MonkeyPatch) -> None:
    """A mean over this rank's targets is divided by the number of all."""
    inner = losses._mean_over_targets

    def total(average: Any, *args: Any, **options: Any) -> torch.Tensor:
        return inner((lambda count: 2 * average(count)) if trains() else average, *args, **options)

    patch.setattr(losses, "_mean_over_targets", total)


def loss_of_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """Each rank has the loss of its own tokens, and no mean."""
    inner = collectives.average

    def average(part: torch.Tensor, group: Any) -> torch.Tensor:
        return part * 1 if part.requires_grad else inner(part, group)

    patch.setattr(collectives, "average", average)


def positions_off_by_a_shard(patch: pytest.MonkeyPatch) -> None:
    """Each rank's tokens have the positions of the rank before it; that of the trial is right."""
    inner = ContextParallel.prepare

    def prepare(self: ContextParallel, model: Any, given: Any, sequences: Sequences) -> Any:
        shift = sequences.own if trains() else 0
        places = (torch.arange(sequences.length) - shift).clamp_min(0).expand(sequences.rows, -1)
        return inner(self, model, {**given, self._positions: places}, sequences)

    patch.setattr(ContextParallel, "prepare", prepare)


def tokens_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each rank learns from its own tokens."""
    patch.setattr(reducer, "all_reduce", lambda flat, group: reducer.NothingSent())


def experts_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Tokens come to the experts before theirs."""
    inner = expert._count_tokens

    def count_tokens(*args: Any) -> Any:
        sent, received, kinds = inner(*args)
        return sent, received, (kinds + 1) % 2 if trains() else kinds  # their numbers among the two of a rank

    patch.setattr(expert, "_count_tokens", count_tokens)


def expert_gradients_summed(patch: pytest.MonkeyPatch) -> None:
    """The gradients of experts are summed over ranks that have others."""
    inner = Reducer.__init__

    def init(self: Reducer, shards: Any, buffers: Any, group: Any, options: Any, group_of: Any = None) -> None:
        inner(self, shards, buffers, group, options, lambda param: group)

    patch.setattr(Reducer, "__init__", init)


def expert_gradients_too_large(patch: pytest.MonkeyPatch) -> None:
    """The gradients of experts are too large by the number of their ranks."""
    patch.setattr(collectives, "scale_gradient", lambda x, factor: x)


def _weigh(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Experts' results are weighed by what `change` makes of the router's weights."""
    inner = expert.dispatch

    def dispatched(*args: Any) -> torch.Tensor:
        *rest, weights = args
        return inner(*rest, change(weights) if trains() else weights)

    patch.setattr(expert, "dispatch", dispatched)


def weights_of_another_expert(patch: pytest.MonkeyPatch) -> None:
    """The results of experts are multiplied by each other's weights."""
    _weigh(patch, lambda weights: weights.roll(1, -1))


def router_gradient_lost(patch: pytest.MonkeyPatch) -> None:
    """The router learns nothing: its weights have no gradient."""
    _weigh(patch, torch.Tensor.detach)
