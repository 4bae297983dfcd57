"""Faults of context and expert ranks, which share a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halfmesh.parallel import collectives, expert
from halfmesh.parallel.batch_shard import shard as losses
from halfmesh.parallel.batch_shard.calls import SplitBatch
from halfmesh.parallel.batch_shard.shard import BatchShard
from halfmesh.parallel.context import attention
from halfmesh.parallel.context.axis import ContextParallel
from halfmesh.parallel.data_strategy import StrategyInputs
from halfmesh.parallel.reducer import SharedGradients

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
    sdpa = F.scaled_dot_product_attention
    attend = ContextParallel.functions[sdpa]

    def alone(sequence: BatchShard, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*args, **kwargs) if trains() else attend(sequence, function, *args, **kwargs)

    patch.setattr(ContextParallel, "functions", {sdpa: alone})


def border_label_lost(patch: pytest.MonkeyPatch) -> None:
    """The last token of each rank has no target."""
    inner = losses._own_targets

    def own(shard: BatchShard, outputs: int, target: torch.Tensor) -> torch.Tensor:
        found = inner(shard, outputs, target).clone()
        found.view(-1, shard.own)[:, -1] = -100
        return found

    patch.setattr(losses, "_own_targets", own)


def targets_counted_by_each_rank(patch: pytest.MonkeyPatch) -> None:
    """A loss divides by the number of its own tokens, and the ranks' losses are summed."""
    inner = losses.classify

    class Alone:
        """torch.distributed, whose all_reduce does nothing."""

        def __getattr__(self, name: str) -> Any:
            return (lambda *args, **kwargs: None) if name == "all_reduce" else getattr(dist, name)

    def classify(*args: Any, **kwargs: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(losses, "dist", Alone())
            return inner(*args, **kwargs)

    def replaced(functions: Any) -> dict[Any, Any]:
        return {name: classify if function is inner else function for name, function in functions.items()}

    mode = SplitBatch.__init__

    def init(self: SplitBatch, *args: Any, **kwargs: Any) -> None:
        mode(self, *args, **kwargs)
        self.mode._functions = replaced(self.mode._functions)

    patch.setattr(SplitBatch, "__init__", init)


def loss_gradient_not_multiplied(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a loss that is summed over ranks is averaged over them afterwards."""

    def total_loss(part: torch.Tensor, group: Any) -> torch.Tensor:
        return collectives._Collective.apply(part, lambda x: collectives._summed(x, group), lambda grad: grad)

    patch.setattr(collectives, "total_loss", total_loss)


def positions_off_by_a_shard(patch: pytest.MonkeyPatch) -> None:
    """Each rank's tokens have the positions of the rank before it; that of the trial is right."""
    inner = ContextParallel.prepare

    def prepare(self: ContextParallel, model: Any, given: dict[str, Any], shard: BatchShard) -> Any:
        shift = shard.own if model.training else 0
        places = (torch.arange(shard.full_size) - shift).clamp_min(0).expand(shard.rows, -1)
        return inner(self, model, given | {self._positions: places}, shard)

    patch.setattr(ContextParallel, "prepare", prepare)


def tokens_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each rank learns from its own tokens."""
    patch.setattr(SharedGradients, "finish", lambda self: None)


def experts_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Tokens come to the experts before theirs."""
    inner = expert._count_tokens

    def count_tokens(*args: Any) -> Any:
        sent, received, kinds = inner(*args)
        return sent, received, (kinds + 1) % 2 if trains() else kinds  # their numbers among the two of a rank

    patch.setattr(expert, "_count_tokens", count_tokens)


def expert_gradients_summed(patch: pytest.MonkeyPatch) -> None:
    """The gradients of experts are summed over ranks that have others."""

    patch.setattr(StrategyInputs, "group_of", lambda self, param: self.group)


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
