"""Faults of data ranks, and of ranks that share a batch: those of the axes context and expert."""

from __future__ import annotations

from . import workloads
from .fault import CLIPPED, GRADIENT, LOSS, UNLIKE, WEIGHTED, At, Cell, In, Text, after, before

REDUCER, BUCKETS, ACCUMULATION = "parallel/reducer.py", "parallel/buckets.py", "engine/accumulation.py"
ZERO1_FILE, FSDP_FILE, FSDP_REDUCER = (f"parallel/sharding/{name}.py" for name in ("zero1", "fsdp", "fsdp_reducer"))
REDUCE_DTYPE = "torch.float64 if param.dtype == torch.float64 else options.dtype"
RECEIVED = "zip(self.slices, self.split(received), strict=True)"
OPEN = "            shard.param.grad = None  # a placeholder\n        "
MISSING = "                add_missing_grads(unit)\n"


def with_data(cell: Cell, **options: object) -> dict[str, object]:
    parallel = cell.config()["parallel"]
    return {"parallel": {**parallel, "data": {**parallel["data"], **options}}}


DATA_FAULTS = {
    "The mean over the data ranks is divided by their number once more": (
        Text(REDUCER, "flat = bucket.pack()", "OLD.div_(bucket.group.size())"),
        In(At.DATA, GRADIENT),
    ),
    "The mean over the data ranks is a sum": (
        Text(REDUCER, "flat.div_(divisor)  # before the sum", "pass  #"),
        In(At.DATA, GRADIENT),
    ),
    "Data ranks keep their own gradients: an all-reduce is missing": (
        Text(BUCKETS, "return all_reduce(flat, self.group, op)", "return NothingSent()"),
        In(At.DATA, GRADIENT, cause="an all-reduce or a broadcast between these ranks is missing"),
    ),
    "The last bucket of gradients is not sent": (
        Text(
            REDUCER,
            "return bucket.start(flat)",
            "OLD if self._buckets[-1] is not bucket else torch.futures.collect_all([])",
        ),
        In(At.DATA, "gradient first.*", more=with_data(At.DATA, bucket_mb=0.0005)),
    ),
    "Gradients are rounded to bfloat16 before they are summed": (
        Text(BUCKETS, REDUCE_DTYPE, "torch.bfloat16"),
        In(At.DATA, GRADIENT),
    ),
    "Gradients of weights in half precision are summed in it, where the config says float32": (
        Text(BUCKETS, REDUCE_DTYPE, "options.dtype if param.dtype == torch.float32 else param.dtype"),
        In(At.NAIVE_BF16, GRADIENT, unseen="it is no larger than the rounding of the format"),
    ),
    "Each rank keeps the weights that it began with": (
        Text("engine/inputs.py", "if context.size == 1 or is_simulated():", "if True:"),
        In(At.DATA, ("* first*", UNLIKE)),
    ),
    "BatchNorm's statistics stay each data rank's own": (
        Text(REDUCER, "if self._statistics:", "if False:"),
        In(At.DATA, "buffer norm.running_*", workloads.batch_norm),
    ),
    "The gradients of a cycle's first microbatches are cleared": (
        Text(
            "engine/engine.py",
            "        accumulation.has_backward = False\n",
            "OLD        for param in () if updates else accumulation.update.master_weights.grad_params:\n"
            "            param.grad = None\n",
        ),
        In(At.TWICE, (GRADIENT, "rejected *gradients of this update are gone*")),
    ),
    "The mean over the microbatches of a cycle is a sum": (
        Text(ACCUMULATION, 'float(self.length) if self.reduction == "mean" else 1.0', "1.0"),
        In(At.TWICE, GRADIENT),
    ),
    "Weighted losses are divided by the weight of this rank's": (
        Text(ACCUMULATION, 'self._context.all_reduce(total, "dp")', "pass"),
        In(At.DATA, GRADIENT, workloads.weighted, WEIGHTED),
    ),
    "Weighted losses are divided by the weight of the last microbatch": (
        Text(ACCUMULATION, "weight if self._weight is None else self._weight + weight", "weight"),
        In(At.TWICE, GRADIENT, workloads.weighted, WEIGHTED),
    ),
    "A short last cycle is divided by the full length": (
        Text(ACCUMULATION, "divisor = (self.index + self.has_backward) / self.length", "pass"),
        "tests/engine/test_cycle.py::test_the_last_cycle_of_a_loop_that_fetches_before_the_step",
    ),
    "An error in backward leaves half a gradient": (
        Text(ACCUMULATION, "self.clear()  # a partial gradient is worse than none", "pass  #"),
        "tests/engine/test_cycle.py::test_a_cycle_that_was_broken_leaves_nothing_to_the_next",
    ),
    "Reduced gradients are widened by a launch each": (
        Text(BUCKETS, "foreach_copy_(wide, grads)\n", "[one.copy_(other) for one, other in zip(wide, grads)]\n"),
        "tests/counts/test_launches.py::test_launches_of_data_ranks",
    ),
}

SHARDED = {
    "A part of a parameter counts in the norm as little as one of several copies (zero1)": (
        Text(ZERO1_FILE, "shard.weight * size, source=shard", "shard.weight, source=shard"),
        In(At.ZERO1, "norm *", more=CLIPPED),
    ),
    "A part of a parameter counts in the norm as little as one of several copies (fsdp)": (
        Text(FSDP_FILE, "shard.weight * weight.device_mesh.size(-1)", "shard.weight"),
        In(At.FSDP, "norm *", more=CLIPPED),
    ),
    "A part is stepped with gradients that belong one element further": (
        Text(ZERO1_FILE, RECEIVED, RECEIVED.replace("received", "received.roll(1)")),
        In(At.ZERO1, GRADIENT),
    ),
    "The last element of each rank's part has no gradient: the end of a part is off by one": (
        Text(ZERO1_FILE, RECEIVED, RECEIVED.replace("received", "torch.cat([received[:-1], received[-1:] * 0])")),
        In(At.ZERO1, ("gradient down.weight; *", "gradient first.weight; *")),
    ),
    "The new weights of one bucket stay on the ranks that have stepped them": (
        Text(ZERO1_FILE, "if self._stepped.isdisjoint", "if bucket is self._order[0] or self._stepped.isdisjoint"),
        In(At.ZERO1, "update *"),
    ),
    "New weights are joined in another order than that of the ranks": (
        Text(ZERO1_FILE, "bucket.views(flat))", "bucket.views(flat.roll(bucket.chunk)))"),
        In(At.ZERO1, "update *"),
    ),
    "New weights are used before they have arrived": (
        Text(ZERO1_FILE, "        work.wait()\n        foreach_copy_", "        foreach_copy_"),
        "tests/parallel/test_late_collectives.py::test_nothing_is_read_or_written_before_its_time[zero1-none]",
    ),
    "Gradients go to the ranks that step them in the backward of each microbatch; those of the last one count": (
        Text(ZERO1_FILE, f"{OPEN}super().open(last)", f"{OPEN}self._reset(), super().open(True)"),
        Text(REDUCER, "bucket.missing.discard(param)\n", "OLD        self._send_complete()\n"),
        In(Cell("none", data=2, gradient_accumulation=2, strategy="zero1"), GRADIENT),
    ),
    "What FSDP2 has averaged over the ranks is divided by their number once more": (
        Text(
            FSDP_REDUCER,
            "if factor != 1:\n                    local.mul_(factor)\n",
            "local.mul_(factor / self.group.size())\n",
        ),
        In(At.FSDP, GRADIENT),
    ),
    "FSDP2 is not told to sum the gradients of one block": (
        Text(FSDP_REDUCER, MISSING, "OLD        self._strategy.unit_params[0][0].set_requires_gradient_sync(False)\n"),
        In(At.FSDP, ("gradient blocks.0*", "rejected *has not summed the gradients of*blocks.0*")),
    ),
    "Weights that were gathered before an update are used after it": (
        Text(FSDP_FILE, "        for unit in self.units:\n            unit.reshard()\n", "        return\n"),
        Text(
            FSDP_FILE,
            "        for _, weight in self.sharded:  # so that each gradient is freed as it is used\n",
            "        for unit in self.units:\n            unit.unshard()\nOLD",
        ),
        In(At.FSDP, ("update *", after("*"), before("*")), more=with_data(At.FSDP, reshard_after_forward=False)),
    ),
}

AXIS, ATTENTION, LOSSES = (f"parallel/context/{name}.py" for name in ("axis", "attention", "loss"))
EXPERT, COLLECTIVES = "parallel/expert.py", "parallel/collectives.py"
CAUSAL = "    if _get_current_dispatch_mode() is None:\n        return causal_lower_right"
TOKENS = "    size, rank, own = group.size(), group.rank(), query.shape[-2]\n"
COMPUTE = "        with self.mode:\n            value = compute(*args, **kw)\n"
AVERAGE = "    return connect(part, lambda x: start_sum(x, group)() / group.size()"
WEIGHTS = "back * top_k_weights.flatten()[order, None]"
ATTENDED = before("blocks.0.attention.out"), after("blocks.0.attention.out")
ROUTED = after("model.layers.0.mlp*")
IF_TRAINED = "    if torch.is_grad_enabled():\n        "

CONTEXT = {
    "Each token sees the one after it, too, where keys are gathered": (
        Text(
            ATTENTION,
            CAUSAL,
            f"{IF_TRAINED}return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)\nOLD",
        ),
        In(At.GPT_CONTEXT, ATTENDED, workloads.three_heads),
    ),
    "After attention the heads of the ranks are joined in another order": (
        Text(
            ATTENTION,
            "return collectives.exchange(whole, _TOKENS, _HEADS, group)",
            "OLD.roll(whole.shape[_HEADS] * torch.is_grad_enabled(), _HEADS)",
        ),
        In(At.GPT_CONTEXT, ATTENDED),
    ),
    "Each rank attends to its own tokens": (
        Text(
            ATTENTION,
            TOKENS,
            f"{IF_TRAINED}return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)\nOLD",
        ),
        In(At.GPT_CONTEXT, ATTENDED),
    ),
    "The last token of each rank has no target": (
        Text(
            AXIS,
            COMPUTE,
            "        output, target = args\n"
            "        args = output, torch.cat([target[:, :-1], torch.full_like(target[:, :1], -100)], 1)\nOLD",
        ),
        In(At.GPT_CONTEXT, LOSS),
    ),
    "A mean over this rank's targets is divided by the number of all": (
        Text(LOSSES, "(total / average(count))", "(total / average(count) / (1 + torch.is_grad_enabled()))"),
        In(At.GPT_CONTEXT, (LOSS, GRADIENT)),
    ),
    "Each rank has the loss of its own tokens, and no mean": (
        Text(COLLECTIVES, AVERAGE, "    if part.requires_grad:\n        return part * 1\nOLD"),
        In(At.GPT_CONTEXT, LOSS),
    ),
    "Each rank's tokens have the positions of the rank before it; that of the trial is right": (
        Text(
            AXIS,
            "torch.arange(sequences.length, device=self.device).expand",
            "(torch.arange(sequences.length) - sequences.own * torch.is_grad_enabled()).clamp_min(0).expand",
        ),
        In(At.GPT_CONTEXT, (after("positions"), before("drop"))),
        In(At.LLAMA_CONTEXT, (after("model.rotary_emb"), before("model.layers.0*"))),
    ),
    "Each rank learns from its own tokens": (
        Text(BUCKETS, "else dist.all_reduce(flat, op, group=group, async_op=True)", "else NothingSent()"),
        In(At.GPT_CONTEXT, (GRADIENT, UNLIKE)),
    ),
    "Ranks that share a sequence drop the same activations": (
        Text("engine/parallelize.py", "if not kind.same_rng and not kind.replica_dim", "if False"),
        "tests/parallel/context/test_context_parallel.py::test_ranks_drop_activations_by_themselves",
    ),
}

EXPERT_FAULTS = {
    "Tokens come to the experts before theirs": (
        Text(
            EXPERT,
            "kinds = torch.arange(count, device=sent.device).repeat(size)",
            "kinds = (torch.arange(count).repeat(size) + torch.is_grad_enabled()) % count",
        ),
        In(At.EXPERTS, ROUTED),
    ),
    "The results of experts are multiplied by each other's weights": (
        Text(EXPERT, WEIGHTS, WEIGHTS.replace("weights.", "weights.roll(int(torch.is_grad_enabled()), -1).")),
        In(At.EXPERTS, ROUTED),
    ),
    "The gradients of experts are summed over ranks that have others": (
        Text(REDUCER, "self._group_of = group_of or (lambda param: group)", "self._group_of = lambda param: group"),
        In(At.EXPERTS, "gradient *experts*"),
    ),
    "The gradients of experts are too large by the number of their ranks": (
        Text(COLLECTIVES, "lambda grad: grad * factor)", "lambda grad: grad)"),
        In(At.EXPERTS, "gradient *experts*"),
    ),
    "The router learns nothing: its weights have no gradient": (
        Text(EXPERT, WEIGHTS, WEIGHTS.replace("weights.", "weights.detach().")),
        In(At.EXPERTS, ("gradient *gate.weight; *", "*; backward of model.layers.1.mlp*")),
    ),
    "A rank without tokens for its experts sends nothing back": (
        Text(EXPERT, "if torch.is_grad_enabled() and not done.requires_grad:", "if False:"),
        "tests/parity/test_expert.py::test_trains_as_one_process[ranks without tokens]",
    ),
}
