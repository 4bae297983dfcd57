"""Faults of the update, and of activations that are computed again or kept elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.amp import master_weights
from halfmesh.amp import optimizer as amp_optimizer
from halfmesh.amp.loss_scaler import LossScaler, LossScales
from halfmesh.amp.master_weights import MasterWeights
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.amp.stepper import Stepper
from halfmesh.engine import offload, recompute
from halfmesh.engine.lr_scheduler import LRAdvance
from halfmesh.engine.parallelize import ParallelModel
from halfmesh.utils.param_shard import OneRank

# -- norm and verdict ------------------------------------------------------------------------------------------------


def local_verdict(patch: pytest.MonkeyPatch) -> None:
    """Each rank judges its own gradients only."""
    inner = amp_optimizer.grad_stats
    patch.setattr(amp_optimizer, "grad_stats", lambda grads, ranks, *rest: inner(grads, OneRank(), *rest))


def norm_of_every_replica(patch: pytest.MonkeyPatch) -> None:
    """What several ranks hold counts several times in the norm."""
    patch.setattr(ParallelModel, "_weight", lambda self, param: 1.0)


def clipped_before_unscaling(patch: pytest.MonkeyPatch) -> None:
    """The norm of scaled gradients is compared with the largest that is allowed."""
    inner = amp_optimizer.clip_divisor

    def clip(divisor: Any, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        return inner(None, norm, max_norm) * (1.0 if divisor is None else divisor)

    patch.setattr(amp_optimizer, "clip_divisor", clip)


def not_clipped(patch: pytest.MonkeyPatch) -> None:
    """The norm is measured, and nothing is clipped."""
    one = torch.ones((), dtype=torch.float64)
    patch.setattr(amp_optimizer, "clip_divisor", lambda divisor, norm, most: one if divisor is None else divisor)


def overflow_not_skipped(patch: pytest.MonkeyPatch) -> None:
    """An update with inf in its gradients is taken."""
    inner = MixedPrecisionOptimizer._apply
    patch.setattr(
        MixedPrecisionOptimizer, "_apply", lambda self, g, b, divisor, found: inner(self, g, b, divisor, None)
    )


def scale_kept(patch: pytest.MonkeyPatch) -> None:
    """The loss scale never moves."""
    patch.setattr(LossScaler, "update", lambda self, found_inf, used=None: None)


def hysteresis_ignored(patch: pytest.MonkeyPatch) -> None:
    """The loss scale falls at the first overflow, where the config allows more."""
    _scaled_with(patch, hysteresis=lambda options: 1)


def scale_grows_too_late(patch: pytest.MonkeyPatch) -> None:
    """The loss scale grows one update too late."""
    _scaled_with(patch, growth_interval=lambda options: options.growth_interval + 1)


def _scaled_with(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    inner = LossScaler.__init__

    def init(self: LossScaler, options: Any, device: torch.device) -> None:
        inner(self, replace(options, **{name: change(options) for name, change in changes.items()}), device)

    patch.setattr(LossScaler, "__init__", init)


def scheduler_counts_skips(patch: pytest.MonkeyPatch) -> None:
    """The learning rate moves on after an update that was skipped, too."""

    def settle(self: LRAdvance) -> None:
        result, self._pending = self._pending, None
        if result is not None:
            self._advance()

    patch.setattr(LRAdvance, "settle", settle)


def scale_moved_first(patch: pytest.MonkeyPatch) -> None:
    """The loss scale is updated before gradients are divided by it."""
    update, measure = LossScales.update, MixedPrecisionOptimizer._measure

    def measure_and_move(self: MixedPrecisionOptimizer, grads: Any) -> Any:
        verdict = measure(self, grads)
        update(self.loss_scales, verdict)
        return verdict

    patch.setattr(MixedPrecisionOptimizer, "_measure", measure_and_move)
    patch.setattr(LossScales, "update", lambda self, verdict: None)


def not_unscaled(patch: pytest.MonkeyPatch) -> None:
    """Gradients are not divided by the loss scale."""
    inner = LossScales.grad_divisor
    patch.setattr(LossScales, "grad_divisor", lambda self, divisor: (inner(self, divisor)[0], None))


# -- the update ------------------------------------------------------------------------------------------------------


def masters_not_published(patch: pytest.MonkeyPatch) -> None:
    """The model never hears of what its masters have learned."""
    patch.setattr(MasterWeights, "publish", lambda self, shards: None)


def masters_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Masters begin with the values that lie one element further."""
    inner = master_weights.make_master
    patch.setattr(master_weights, "make_master", lambda param: nn.Parameter(inner(param).detach().roll(1)))


def stale_masters(patch: pytest.MonkeyPatch) -> None:
    """Each update begins with the model's rounded weights, and not with their masters."""
    inner = Stepper.step

    def step(self: Stepper, *args: Any, **kwargs: Any) -> None:
        for param, master in self._masters.masters.items():
            master.data.copy_(param)
        inner(self, *args, **kwargs)

    patch.setattr(Stepper, "step", step)


def old_gradients_kept(patch: pytest.MonkeyPatch) -> None:
    """The second update has the gradients of the first one, too."""
    kept: dict[torch.Tensor, torch.Tensor] = {}
    inner = MixedPrecisionOptimizer.after_backward

    def after_backward(self: MixedPrecisionOptimizer, *args: Any) -> None:
        inner(self, *args)
        for param in self.master_weights.grad_params:
            new = param.grad.clone()
            param.grad += kept.get(param, 0)
            kept[param] = new

    patch.setattr(MixedPrecisionOptimizer, "after_backward", after_backward)


def _left_out(patch: pytest.MonkeyPatch, *names: str) -> None:
    """The optimizer does not step these parameters; none at all without names."""
    inner = Stepper.step

    def step(self: Stepper, shards: Any, grads: Any, *rest: Any) -> None:
        left_out = [shard for shard in shards if not names or shard.name in names]
        for shard in left_out:
            shard.param.grad = None
            grads.pop(shard)
        inner(self, [shard for shard in shards if shard not in left_out], grads, *rest)

    patch.setattr(Stepper, "step", step)


def _is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def weight_not_stepped(patch: pytest.MonkeyPatch) -> None:
    """One parameter is left out of the update."""
    _left_out(patch, "up.weight")


def one_rank_not_stepped(patch: pytest.MonkeyPatch) -> None:
    """The last rank takes no update."""
    if _is_last_rank():
        _left_out(patch)


def tied_weight_stale(patch: pytest.MonkeyPatch) -> None:
    """The last stage does not step the weight that it shares with the first."""
    if _is_last_rank():
        _left_out(patch, "tokens.weight")


# -- activations -----------------------------------------------------------------------------------------------------


def _again() -> bool:
    """Whether backward runs: activations are computed again."""
    return torch._C._current_graph_task_id() != -1


def recomputed_from_other_inputs(patch: pytest.MonkeyPatch) -> None:
    """A block is computed again from inputs that were changed since."""
    inner = recompute.Checkpointed.own

    def own(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return inner(self, x * 1.01 if _again() else x, *args, **kwargs)

    patch.setattr(recompute.Checkpointed, "own", own)


def recomputed_in_evaluation(patch: pytest.MonkeyPatch) -> None:
    """A block is computed again with its modules in evaluation."""
    inner = recompute.Checkpointed._again
    patch.setattr(
        recompute.Checkpointed, "_again", lambda self, flags, *more: inner(self, [False for _ in flags], *more)
    )


def offloaded_in_half(patch: pytest.MonkeyPatch) -> None:
    """Activations are rounded to bfloat16 on their way to the host."""
    inner = offload._OnHost.__init__
    patch.setattr(
        offload._OnHost, "__init__", lambda self, host, *more: inner(self, host.bfloat16().to(host.dtype), *more)
    )


def offload_buffer_used_twice(patch: pytest.MonkeyPatch) -> None:
    """Activations of one shape share their memory on the host."""
    places: dict[Any, torch.Tensor] = {}
    inner = offload._OnHost.__init__

    def init(self: Any, host: torch.Tensor, *more: Any) -> None:
        inner(self, places.setdefault((host.shape, host.dtype), host).copy_(host), *more)

    patch.setattr(offload._OnHost, "__init__", init)
