"""The list of faults: what is wrong, in which layout, and what has to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import pytest

from tests.composition.cells import Cell, Pipe

from . import batch_shard as shares
from . import data, models, pipeline, tensor, update, workloads
from .workloads import Given

PIPE = Pipe(2, "1f1b", 2)


@dataclass(frozen=True)
class Fault:
    """A fault, and where it is.

    Attributes:
        source: what puts it into the engine of a rank; or, of a user's fault, what builds the model that has it.
        cell: the layout.
        right: patterns of what may be said first, "kind name; sentence"; or "refused text", where the engine itself
            finds it.
        build: makes the model, inputs and criterion; None: those of the cell's workload, or of `source`.
        more: keys of the config.
        cause: words of the likely cause, or of what to try.
        unseen: why nothing is said of it.
    """

    source: Callable[..., Any]
    cell: Cell
    right: tuple[str, ...]
    build: Callable[[], Given] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    unseen: str = ""

    @property
    def name(self) -> str:
        return f"{self.source.__name__}-{self.cell}" + "".join(f"-{key}" for key in self.more)

    @property
    def is_users(self) -> bool:
        """Whether the model has it, also in one process."""
        return self.source.__module__ == models.__name__

    @property
    def why(self) -> str:
        return (self.source.__doc__ or "").partition("\n")[0]

    @property
    def builder(self) -> Callable[[], Given]:
        """What makes model, inputs and criterion; can be pickled."""
        if self.build is not None:
            return self.build
        return self.source if self.is_users else partial(workloads.given, self.cell.model)

    def config(self) -> dict[str, Any]:
        return self.cell.config() | dict(self.more)

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put it into this process; a user's is in the model."""
        if not self.is_users:
            self.source(patch)

    def is_right(self, said: str) -> bool:
        """Whether a report may say this first."""
        return any(fnmatchcase(said, pattern) for pattern in self.right)


def after(name: str) -> str:
    """The output of a module whose inputs agree."""
    return f"output {name}; *its inputs agree*"


def before(name: str) -> str:
    """The caller's own code before a module, whose input differs."""
    return f"output *; * {name}, whose input*"


def grad(name: str) -> str:
    """The gradient of a module's output, which is made by what was given that."""
    return f"*; *the gradient of the output of {name} differs*"


NONE = "none"
ANY_GRADIENT = ("gradient *",)
LOSS = ("loss *",)
UNLIKE = "refused *differ between ranks that should hold the same*"


def _tensor() -> Iterator[Fault]:
    llama, gpt, mlp = Cell(NONE, "llama", tensor=2), Cell(NONE, "gpt", tensor=2), Cell(NONE, "mlp", tensor=2)
    sequence = Cell(NONE, "gpt", tensor=2, sequence_parallel=True)
    o_proj = (after("model.layers.0.self_attn.o_proj"),)
    yield Fault(tensor.output_not_summed, llama, (*o_proj, "refused *output*"))
    yield Fault(tensor.output_not_summed, mlp, (after("down"), "refused *compute something else*"))
    yield Fault(tensor.output_summed_twice, llama, o_proj)
    yield Fault(tensor.output_summed_twice, gpt, (after("blocks.0.attention.out"), "refused *blocks.0*"))
    yield Fault(tensor.bias_before_the_sum, llama, o_proj)
    yield Fault(tensor.bias_before_the_sum, mlp, (after("down"), "refused *compute something else*"))
    yield Fault(tensor.input_gradient_not_summed, llama, (grad("*norm"), "refused *gradients of*norm*"))
    yield Fault(tensor.input_gradient_summed_twice, llama, (grad("model.norm"), grad("model")))
    yield Fault(tensor.input_gradient_summed_twice, gpt, (grad("norm"),))
    yield Fault(tensor.gathered_in_other_order, gpt, (after("head"),))
    yield Fault(tensor.border_word_twice, llama, (after("model.embed_tokens"),))
    vit = Cell(NONE, "vit", tensor=2)
    yield Fault(tensor.fused_weight_cut_as_one, vit, ("* blocks.0.attn*",))
    shrunk = "on a CPU verify takes 2 ranks in place of 4; `--no-shrink` sees it"
    yield Fault(tensor.last_ranks_swapped, Cell(NONE, "gpt", tensor=4), (after("head"),), unseen=shrunk)
    off = "dropout is switched off: layouts draw other numbers anyway"
    yield Fault(tensor.other_numbers_dropped, gpt, (after("*drop1"),), workloads.dropping, unseen=off)
    yield Fault(tensor.tied_gradient_dropped, gpt, ("gradient tokens.weight; *",))
    yield Fault(tensor.partial_not_summed, vit, ("gradient *_norm.*",))
    yield Fault(tensor.partial_not_summed, sequence, ("gradient *norm*", "gradient *bias; *", UNLIKE))
    yield Fault(tensor.partial_summed_twice, sequence, ("gradient *norm*", "gradient *bias; *"))
    yield Fault(tensor.sequence_gradient_not_summed, sequence, (grad("blocks.1.norm2"),))
    yield Fault(tensor.shard_of_the_neighbour, sequence, (after("blocks.0.attention.out"),))
    grid = Cell(NONE, "llama", tensor=2, data=2)
    yield Fault(tensor.summed_over_the_data_ranks, grid, (after("model.embed_tokens"),))


def _pipelines() -> Iterator[Fault]:
    mlp, gpt = Cell(NONE, "mlp", pipeline=PIPE), Cell(NONE, "gpt", pipeline=PIPE)
    yield Fault(pipeline.stages_not_tied, gpt, ("gradient tokens.weight; *",))
    yield Fault(pipeline.microbatches_not_divided, mlp, (*LOSS, *ANY_GRADIENT))
    yield Fault(pipeline.norm_of_every_stage, Cell(NONE, "gpt", pipeline=PIPE, clip_grad_norm=True), ("norm *",))
    yield Fault(pipeline.reduced_too_early, Cell(NONE, "mlp", data=2, pipeline=PIPE), ("refused *arrived twice*",))
    zbv = Cell(NONE, "mlp", pipeline=Pipe(2, "zbv", 4, 2))
    yield Fault(pipeline.weight_gradients_lost, zbv, ANY_GRADIENT)
    yield Fault(pipeline.last_microbatch_lost, mlp, LOSS)
    yield Fault(pipeline.targets_of_another_microbatch, mlp, LOSS)
    weighted = {"loss_reduction": "weighted"}
    refused = "refused *its 2 microbatches make *"
    yield Fault(pipeline.microbatch_weights_lost, mlp, (*LOSS, *ANY_GRADIENT, refused), workloads.weighted, weighted)
    yield Fault(pipeline.loss_of_the_last_microbatch, mlp, LOSS)
    yield Fault(pipeline.border_gradient_doubled, mlp, (grad("down"),))
    yield Fault(pipeline.border_gradient_doubled, gpt, (grad("blocks.0*"),))
    yield Fault(pipeline.activations_of_the_first_microbatch, mlp, (before("norm"),))
    yield Fault(pipeline.activations_of_the_first_microbatch, gpt, (before("blocks.1*"),))
    yield Fault(pipeline.piece_left_out, gpt, (before("blocks.1*"), "* blocks.0"))
    yield Fault(pipeline.scale_not_in_stage_loss, Cell("torch_fp16", "mlp", pipeline=PIPE), (*LOSS, *ANY_GRADIENT))


def _shared_batches() -> Iterator[Fault]:
    gpt, llama = Cell(NONE, "gpt", context=2), Cell(NONE, "llama", context=2)
    attended = (before("blocks.0.attention.out"), after("blocks.0.attention.out"))
    yield Fault(shares.mask_shifted, gpt, attended, workloads.three_heads)
    yield Fault(shares.heads_in_other_order, gpt, attended)
    yield Fault(shares.own_tokens_only, gpt, attended)
    yield Fault(shares.border_label_lost, gpt, LOSS)
    yield Fault(shares.targets_of_all_ranks_counted, gpt, (*LOSS, *ANY_GRADIENT))
    yield Fault(shares.loss_of_own_tokens, gpt, LOSS)
    yield Fault(shares.positions_off_by_a_shard, gpt, (after("positions"), before("drop")))
    yield Fault(shares.positions_off_by_a_shard, llama, (after("model.rotary_emb"), before("model.layers.0*")))
    yield Fault(shares.tokens_not_summed, gpt, (*ANY_GRADIENT, UNLIKE))
    experts = Cell(NONE, "mixtral", data=2, expert=2)
    routed = (after("model.layers.0.mlp*"),)
    yield Fault(shares.experts_of_the_neighbours, experts, routed)
    yield Fault(shares.weights_of_another_expert, experts, routed)
    yield Fault(shares.expert_gradients_summed, experts, ("gradient *experts*",))
    yield Fault(shares.expert_gradients_too_large, experts, ("gradient *experts*",))
    yield Fault(
        shares.router_gradient_lost, experts, ("gradient *gate.weight; *", "*; backward of model.layers.1.mlp*")
    )


def _data() -> Iterator[Fault]:
    mlp, twice = Cell(NONE, "mlp", data=2), Cell(NONE, "mlp", data=2, gradient_accumulation=2)
    yield Fault(data.data_divided_twice, mlp, ANY_GRADIENT)
    yield Fault(data.data_not_divided, mlp, ANY_GRADIENT)
    yield Fault(
        data.data_not_reduced, mlp, ANY_GRADIENT, cause="an all-reduce or a broadcast between these ranks is missing"
    )
    small = mlp.config()["parallel"]
    small = {"parallel": small | {"data": small["data"] | {"bucket_mb": 0.0005}}}
    yield Fault(data.last_bucket_lost, mlp, ("gradient first.*",), more=small)
    yield Fault(data.reduced_in_half, mlp, ANY_GRADIENT)
    half = Cell("naive_bf16", "mlp", data=2)
    rounds = "it is no larger than the rounding of the format"
    yield Fault(data.half_gradients_reduced_in_half, half, ANY_GRADIENT, unseen=rounds)
    yield Fault(data.weights_not_shared, mlp, ("* first*", UNLIKE))
    yield Fault(data.statistics_not_averaged, mlp, ("buffer norm.running_*",), workloads.batch_norm)
    yield Fault(
        data.first_microbatch_lost, twice, (*ANY_GRADIENT, "refused *gradients that engine.backward left*gone*")
    )
    yield Fault(data.microbatches_summed, twice, ANY_GRADIENT)
    weighted = {"loss_reduction": "weighted"}
    yield Fault(data.loss_weight_of_one_rank, mlp, ANY_GRADIENT, workloads.weighted, weighted)
    yield Fault(data.loss_weight_of_the_last, twice, ANY_GRADIENT, workloads.weighted, weighted)
    zero1 = Cell(NONE, "mlp", data=2, strategy="zero1")
    clipped = {"clip_grad_norm": 0.5}
    yield Fault(data.norm_of_parts_as_copies, zero1, ("norm *",), more=clipped)
    yield Fault(data.gradients_of_the_neighbours, zero1, ANY_GRADIENT)
    yield Fault(data.border_of_parts_lost, zero1, ("gradient down.weight; *", "gradient first.weight; *"))
    yield Fault(data.bucket_not_gathered, zero1, ("update *",))
    yield Fault(data.parts_gathered_in_other_order, zero1, ("update *",))
    sent = Cell(NONE, "mlp", data=2, gradient_accumulation=2, strategy="zero1")
    yield Fault(data.parts_sent_in_each_microbatch, sent, ANY_GRADIENT)
    fsdp = Cell(NONE, "gpt", data=2, strategy="fsdp")
    yield Fault(data.norm_of_parts_as_copies, fsdp, ("norm *",), more=clipped)
    yield Fault(data.sum_divided_again, fsdp, ANY_GRADIENT)
    yield Fault(
        data.unit_not_summed, fsdp, ("gradient blocks.0*", "refused *has not summed the gradients of*blocks.0*")
    )
    kept = fsdp.config()["parallel"]
    kept = {"parallel": kept | {"data": kept["data"] | {"reshard_after_forward": False}}}
    yield Fault(data.old_weights_kept, fsdp, ("update *", after("*"), before("*")), more=kept)


def _updates() -> Iterator[Fault]:
    def cell(mode: str, **axes: Any) -> Cell:
        return Cell(mode, "mlp", **axes)

    clipped = {"clip_grad_norm": 0.5}
    yield Fault(
        update.local_verdict, cell("naive_fp16", data=2, strategy="zero1"), ("verdict *", "norm *", "refused *")
    )
    fsdp = Cell("torch_fp16", "gpt", data=2, strategy="fsdp")
    yield Fault(update.local_verdict, fsdp, ("verdict *", "norm *", "refused *"))
    yield Fault(update.local_verdict, cell(NONE, tensor=2), ("norm *",), more=clipped)
    yield Fault(update.norm_of_every_replica, cell(NONE, tensor=2), ("norm *",), more=clipped)
    yield Fault(update.norm_of_every_replica, cell(NONE, data=2), ("norm *",), more=clipped)
    yield Fault(update.clipped_before_unscaling, cell("torch_fp16", tensor=2), ("update *",), more=clipped)
    yield Fault(update.not_clipped, cell(NONE, data=2), ("update *",), more=clipped)
    yield Fault(update.overflow_not_skipped, cell("torch_fp16", data=2), ("verdict *", "update *"))
    yield Fault(update.scale_kept, cell("naive_fp16", data=2), ("verdict *",))
    patient = {"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 2}}
    yield Fault(update.hysteresis_ignored, cell("naive_fp16", data=2), ("verdict loss_scale; *",), more=patient)
    yield Fault(update.scale_grows_too_late, cell("naive_fp16", data=2), ("verdict loss_scale; *",))
    yield Fault(update.scheduler_counts_skips, cell("torch_fp16", data=2), ("verdict lr; *",))
    yield Fault(
        update.scale_moved_first, cell("torch_fp16", tensor=2), ("verdict loss_scale; *", "update *", "gradient *")
    )
    yield Fault(update.not_unscaled, cell("torch_fp16", data=2), ("update *", "gradient *"))
    yield Fault(update.masters_not_published, Cell("naive_fp16", "gpt", tensor=2), ("update *",))
    shifted = Cell("naive_bf16", "gpt", tensor=2, data=2, strategy="zero1")
    yield Fault(update.masters_of_the_neighbours, shifted, ("update *", "refused *masters differ*"))
    yield Fault(update.stale_masters, cell("naive_bf16", data=2), ("update *",))
    yield Fault(update.old_gradients_kept, cell(NONE, tensor=2), ANY_GRADIENT)
    yield Fault(update.weight_not_stepped, cell(NONE, data=2), ("update up.weight; *",))
    yield Fault(update.one_rank_not_stepped, cell(NONE, data=2), ("update *",))
    yield Fault(update.tied_weight_stale, Cell(NONE, "gpt", pipeline=PIPE), ("update tokens.weight; *",))
    again = {"activation_checkpoint": "full"}
    gpt = Cell(NONE, "gpt", data=2)
    backwards = (grad("blocks.1*"), "gradient blocks.1*")
    yield Fault(update.recomputed_from_other_inputs, gpt, backwards, more=again)
    blocks = {"activation_checkpoint": {"patterns": ["blocks.*"]}}
    in_block = (grad("blocks.1"), grad("blocks.2"), "gradient blocks.*")
    yield Fault(update.recomputed_in_evaluation, Cell(NONE, data=2), in_block, workloads.scaled_in_training, blocks)
    kept = {"activation_offload": True}
    yield Fault(update.offloaded_in_half, gpt, (grad("*"), "gradient *"), more=kept)
    yield Fault(update.offload_buffer_used_twice, gpt, (grad("*"), "gradient *"), more=kept)


def _users() -> Iterator[Fault]:
    dp, tp = Cell(NONE, data=2), Cell(NONE, tensor=2)
    twice = Cell(NONE, data=2, gradient_accumulation=2)
    summed = (*LOSS, *ANY_GRADIENT)
    yield Fault(models.sum_over_samples, dp, summed, cause="set loss_reduction='sum'")
    yield Fault(models.sum_over_a_fixed_batch, twice, summed)
    yield Fault(models.unequal_counts, dp, summed, cause="set loss_reduction='weighted'")
    yield Fault(models.class_weights, dp, summed)
    yield Fault(models.negatives_in_the_batch, dp, summed, cause="samples compared with each other")
    yield Fault(models.gathered_without_gradient, dp, summed)
    yield Fault(models.penalty_on_a_shard, tp, (*LOSS, "gradient up.weight; *", "refused *losses*"))
    between = (before("up"),)
    yield Fault(models.rows_mixed, dp, between, cause="rows of the batch are combined")
    yield Fault(models.state_kept, dp, between, cause="kept from an earlier call")
    yield Fault(models.calls_counted, twice, between)
    yield Fault(models.weights_written, twice, (after("first"),))
    yield Fault(models.scaled_by_the_world, dp, between)
    yield Fault(models.depends_on_the_rank, dp, between)
    yield Fault(models.random_numbers, dp, between, cause="random numbers: randn_like")
    yield Fault(
        models.features_mixed_in_training, tp, (before("down"),), cause="features that tensor ranks share are combined"
    )
    yield Fault(models.features_mixed, tp, (before("down"), "refused *compute something else*"))
    yield Fault(models.tokens_mixed_in_training, Cell(NONE, "gpt", context=2), (before("blocks.0*"),))
    yield Fault(
        models.buffer_of_each_rank, dp, ("buffer average; *",), cause="each data rank changes it by its own batches"
    )
    yield Fault(models.gradient_of_its_own, dp, (grad("first"),))
    yield Fault(models.gradient_hook, dp, ("gradient up.weight; *",))
    planned = Cell(NONE, "gpt", tensor=2).config()["parallel"]
    planned = {"parallel": planned | {"tensor": planned["tensor"] | {"plan": models.PLAN}}}
    heads = Cell(NONE, "gpt", tensor=2)
    yield Fault(models.fixed_heads, heads, ("* attention*", "refused *attention*"), more=planned)
    yield Fault(
        models.plan_without_partial, heads, ("gradient attention.norm.*", "refused *attention.norm*"), more=planned
    )


FAULTS = (*_tensor(), *_pipelines(), *_shared_batches(), *_data(), *_updates(), *_users())
