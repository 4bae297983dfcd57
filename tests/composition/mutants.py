"""Faults that are put into the engine on purpose, each with the cell that has to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from halfmesh.amp import optimizer as amp_optimizer
from halfmesh.amp.loss_scales import LossScales
from halfmesh.amp.master_weights import MasterWeights
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.division import Division
from halfmesh.loop.lr import LRAdvance
from halfmesh.parallel import collectives
from halfmesh.parallel.batch_shard import losses
from halfmesh.parallel.batch_shard.calls import SharesBatch
from halfmesh.parallel.batch_shard.shard import BatchShard
from halfmesh.parallel.context import ParallelContext
from halfmesh.parallel.context_parallel import attention
from halfmesh.parallel.context_parallel.calls import ContextParallel
from halfmesh.parallel.gradient_sums import SharedGradients
from halfmesh.parallel.pipeline.executor import Pipeline
from halfmesh.parallel.pipeline.stage import StageModule
from halfmesh.parallel.pipeline.stage_params import StageParameters
from halfmesh.parallel.reducer import Reducer
from halfmesh.parallel.tensor.gradients import TensorGradients
from halfmesh.parallel.tensor.layers import RowwiseLinear, VocabEmbedding
from halfmesh.shard import OneRank
from tests.support.ranks import rank_device

from .cells import Cell, Pipe
from .overflows import overflow
from .sharding_faults import (
    Kept,
    bucket_not_gathered,
    gradients_of_the_neighbours,
    masters_of_the_neighbours,
    norm_of_parts_as_copies,
    old_weights_kept,
    parts_sent_in_each_microbatch,
    sum_divided_again,
    train_looking_ahead,
)
from .training import Outcome, train


def local_verdict(patch: pytest.MonkeyPatch) -> None:
    """Each rank judges its own gradients only."""
    inner = amp_optimizer.grad_stats
    patch.setattr(amp_optimizer, "grad_stats", lambda grads, ranks, *rest: inner(grads, OneRank(), *rest))


def data_divided_twice(patch: pytest.MonkeyPatch) -> None:
    """The mean over the data ranks is divided by their number once more."""
    inner = Reducer._all_reduce

    def all_reduce(self: Reducer, flat: torch.Tensor, divide: bool = True) -> Any:
        return inner(self, flat.div_(self.group.size()) if self.options.mean else flat, divide)

    patch.setattr(Reducer, "_all_reduce", all_reduce)


def norm_of_every_replica(patch: pytest.MonkeyPatch) -> None:
    """What several ranks hold counts several times."""
    patch.setattr(Division, "_weight", lambda self, param: 1.0)


def scale_moved_first(patch: pytest.MonkeyPatch) -> None:
    """The loss scale is updated before gradients are divided by it."""
    update, measure = LossScales.update, MixedPrecisionOptimizer._measure

    def measure_and_move(self: MixedPrecisionOptimizer, grads: Any) -> Any:
        verdict = measure(self, grads)
        update(self.loss_scales, verdict)
        return verdict

    patch.setattr(MixedPrecisionOptimizer, "_measure", measure_and_move)
    patch.setattr(LossScales, "update", lambda self, verdict: None)


def partial_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Gradients from parts of the sequence are left as they are."""
    patch.setattr(TensorGradients, "finish", lambda self: None)


def bias_before_the_sum(patch: pytest.MonkeyPatch) -> None:
    """Every rank of a tensor group adds the bias, and then they are summed."""

    def forward(self: RowwiseLinear, x: torch.Tensor) -> torch.Tensor:
        x = collectives.split(x, -1, self.axis.group) if self.splits else x
        return collectives.reduce_from_tp(F.linear(x, self.weight, self.bias), self.axis.group)

    patch.setattr(RowwiseLinear, "forward", forward)


def tied_gradient_dropped(patch: pytest.MonkeyPatch) -> None:
    """A weight that embedding and head share learns from the head only."""
    inner = VocabEmbedding.forward
    patch.setattr(VocabEmbedding, "forward", lambda self, ids: inner(self, ids).detach())


def input_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Layers that are divided by columns each hand back their part of the gradient."""
    patch.setattr(collectives, "copy_to_tp", lambda x, group: x)


def weights_not_shared(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps the weights that it began with."""
    patch.setattr(ParallelContext, "start_equal", lambda self, model, optimizer: None)


def masters_not_published(patch: pytest.MonkeyPatch) -> None:
    """The model never hears of what its masters have learned."""
    patch.setattr(MasterWeights, "publish", lambda self, shards: None)


def scheduler_counts_skips(patch: pytest.MonkeyPatch) -> None:
    """The learning rate moves on after an update that was skipped, too."""

    def settle(self: LRAdvance) -> None:
        result, self._pending = self._pending, None
        if result is not None:
            self._advance()

    patch.setattr(LRAdvance, "settle", settle)


def stages_not_tied(patch: pytest.MonkeyPatch) -> None:
    """A weight that the first and the last stage share learns in each of them by itself."""
    patch.setattr(SharedGradients, "finish", lambda self: None)


def microbatches_not_divided(patch: pytest.MonkeyPatch) -> None:
    """The mean over microbatches is a sum."""
    inner = MixedPrecisionOptimizer.scaled
    patch.setattr(MixedPrecisionOptimizer, "scaled", lambda self, loss, divisor: inner(self, loss))


def scale_not_in_stage_loss(patch: pytest.MonkeyPatch) -> None:
    """The last stage's loss is not scaled."""
    patch.setattr(MixedPrecisionOptimizer, "scaled", lambda self, loss, divisor: loss.float() / divisor)


def norm_of_every_stage(patch: pytest.MonkeyPatch) -> None:
    """What several stages hold counts several times."""
    patch.setattr(StageParameters, "replicas", lambda self, param: 1)


def reduced_too_early(patch: pytest.MonkeyPatch) -> None:
    """Gradients are sent over the data ranks in the backward of the first microbatch."""
    inner = Pipeline.train

    def train(self: Pipeline, calls: Any, known: Any, finish: Any, on_last: Any) -> None:
        on_last([param for stage in self.stages for param in stage.params], True)
        inner(self, calls, known, finish, lambda params, rest: None)

    patch.setattr(Pipeline, "train", train)


def weight_gradients_lost(patch: pytest.MonkeyPatch) -> None:
    """The second half of a backward in two halves has no weights."""
    patch.setattr(StageModule, "parameters", lambda self, recurse=True: iter(()))


def mask_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each token sees the one after it, too, where keys are gathered."""

    def causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
        return torch.ones(queries, keys, device=device).tril(keys - queries + 1) > 0

    patch.setattr(attention, "_causal", causal)


def border_label_lost(patch: pytest.MonkeyPatch) -> None:
    """The last token of each rank has no target."""
    inner = losses._own_targets

    def own(shard: BatchShard, outputs: int, target: torch.Tensor) -> torch.Tensor:
        found = inner(shard, outputs, target).clone()
        found.view(-1, shard.own)[:, -1] = -100
        return found

    patch.setattr(losses, "_own_targets", own)


def positions_off_by_a_shard(patch: pytest.MonkeyPatch) -> None:
    """Each rank's tokens have the positions of the rank before it; that of the trial is right."""
    inner = ContextParallel.prepare

    def prepare(self: ContextParallel, model: Any, given: dict[str, Any], shard: BatchShard) -> Any:
        shift = shard.own if model.training else 0
        places = (torch.arange(shard.whole, device=rank_device()) - shift).clamp_min(0).expand(shard.rows, -1)
        return inner(self, model, given | {self._positions: places}, shard)

    patch.setattr(ContextParallel, "prepare", prepare)


def tokens_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each rank learns from its own tokens."""
    patch.setattr(SharedGradients, "finish", lambda self: None)


def experts_of_the_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Tokens come to the experts before theirs."""
    inner = collectives.send_rows

    def send(x: torch.Tensor, sent: Any, received: Any, group: Any) -> torch.Tensor:
        rows = inner(x, sent, received, group)
        return (rows + 1) % 2 if x.dim() == 1 else rows  # their numbers among the two of a rank

    patch.setattr(collectives, "send_rows", send)


def experts_summed(patch: pytest.MonkeyPatch) -> None:
    """The gradients of experts are summed over ranks that have others."""

    def make(self: SharesBatch, shards: Any) -> SharedGradients:
        return SharedGradients({shard.model_param for shard in shards}, self.group, shards)

    patch.setattr(SharesBatch, "make_reduction", make)


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        apply: puts it in.
        cell: which has to see it.
        seen_as: words of the problem that is found.
        job: what is run; `train`, a form of it, or `overflow`.
    """

    apply: Callable[[pytest.MonkeyPatch], None]
    cell: Cell
    seen_as: str
    job: Callable[..., Any] = train

    @property
    def name(self) -> str:
        return f"{self.apply.__name__}-{self.cell}" + ("-overflow" if self.job is overflow else "")


PIPE = Pipe(2, "1f1b", 2)
WEIGHT, MOVED, NORM = "a weight differs", "a parameter moved otherwise", "a gradient norm differs"
REFUSED = "differ between the ranks of a tensor group"  # the engine itself compares, before its first update
APART = "differ between ranks that should hold the same"  # the same, in its first updates
MASTERS = "model and fp32 masters differ"  # and this
MUTANTS = (
    Mutant(local_verdict, Cell("torch_fp16", "gpt", tensor=2, data=2), "rank 0 has"),
    Mutant(local_verdict, Cell("naive_fp16", "gpt", tensor=2, data=2), APART, overflow),
    Mutant(local_verdict, Cell("torch_fp16", "gpt", data=2, pipeline=PIPE), APART, overflow),
    Mutant(local_verdict, Cell("naive_fp16", "gpt", data=2, strategy="zero1"), "the ranks differ", overflow),
    Mutant(local_verdict, Cell("torch_fp16", "gpt", data=2, strategy="fsdp"), "the ranks differ", overflow),
    Mutant(data_divided_twice, Cell("none", "mlp", data=2), WEIGHT),
    Mutant(norm_of_every_replica, Cell("none", "gpt", tensor=2, data=2, clip_grad_norm=True), NORM),
    Mutant(scale_moved_first, Cell("torch_fp16", "mlp", tensor=2), MOVED),
    Mutant(partial_not_summed, Cell("none", "gpt", tensor=2, sequence_parallel=True), "other weights than rank 0"),
    Mutant(partial_not_summed, Cell("naive_bf16", "vit", tensor=2), MOVED),
    Mutant(bias_before_the_sum, Cell("none", "mlp", tensor=2), "compute something else when they are sharded"),
    Mutant(tied_gradient_dropped, Cell("none", "gpt", tensor=2), WEIGHT),
    Mutant(input_gradient_not_summed, Cell("torch_bf16", "llama", tensor=2), REFUSED),
    Mutant(weights_not_shared, Cell("none", "mlp", data=2), APART),
    Mutant(masters_not_published, Cell("naive_fp16", "gpt", tensor=2), MOVED),
    Mutant(scheduler_counts_skips, Cell("torch_fp16", "gpt", tensor=2), MOVED),
    Mutant(stages_not_tied, Cell("none", "gpt", pipeline=PIPE), WEIGHT),
    Mutant(microbatches_not_divided, Cell("none", "mlp", pipeline=PIPE), WEIGHT),
    Mutant(scale_not_in_stage_loss, Cell("torch_fp16", "mlp", pipeline=PIPE), MOVED),
    Mutant(norm_of_every_stage, Cell("none", "gpt", pipeline=PIPE, clip_grad_norm=True), NORM),
    Mutant(reduced_too_early, Cell("none", "mlp", data=2, pipeline=PIPE), "arrived twice"),
    Mutant(weight_gradients_lost, Cell("none", "mlp", pipeline=Pipe(2, "zbv", 4, 2)), MOVED),
    Mutant(mask_shifted, Cell("none", "gpt", tensor=2, context=4), "differs by"),
    Mutant(border_label_lost, Cell("none", "gpt", context=2), WEIGHT),
    Mutant(positions_off_by_a_shard, Cell("none", "gpt", context=2), WEIGHT),
    Mutant(positions_off_by_a_shard, Cell("naive_bf16", "llama", context=2), MOVED),
    Mutant(tokens_not_summed, Cell("torch_bf16", "gpt", context=2), "other weights than rank 0"),
    Mutant(experts_of_the_neighbours, Cell("none", "mixtral", expert=2), WEIGHT),
    Mutant(experts_summed, Cell("none", "mixtral", expert=2), WEIGHT),
    Mutant(norm_of_parts_as_copies, Cell("none", "mlp", data=2, clip_grad_norm=True, strategy="zero1"), NORM),
    Mutant(norm_of_parts_as_copies, Cell("none", "gpt", data=2, clip_grad_norm=True, strategy="fsdp"), NORM),
    Mutant(gradients_of_the_neighbours, Cell("none", "mlp", data=2, strategy="zero1"), WEIGHT),
    Mutant(bucket_not_gathered, Cell("none", "mlp", data=2, strategy="zero1"), WEIGHT),
    Mutant(
        parts_sent_in_each_microbatch, Cell("none", "mlp", data=2, gradient_accumulation=2, strategy="zero1"), WEIGHT
    ),
    Mutant(masters_of_the_neighbours, Cell("naive_bf16", "gpt", tensor=2, data=2, strategy="zero1"), MASTERS),
    Mutant(sum_divided_again, Cell("none", "mlp", data=2, strategy="fsdp"), WEIGHT),
    Mutant(old_weights_kept, Kept("none", "gpt", data=2, strategy="fsdp"), WEIGHT, train_looking_ahead),
)


def run_mutant(rank: int, world_size: int, number: int) -> Outcome | Any:
    """What a mutant does; the fault is taken out again afterwards."""
    mutant = MUTANTS[number]
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        return mutant.job(rank, world_size, mutant.cell)
