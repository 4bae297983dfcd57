"""Faults of ranks that share a batch: those of the axes context and expert."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import EXPERTS, GPT_CONTEXT, GRADIENT, LLAMA_CONTEXT, LOSS, UNLIKE, after, before

AXIS, ATTENTION, LOSSES = (f"parallel/context/{name}.py" for name in ("axis", "attention", "loss"))
EXPERT, COLLECTIVES, REDUCER = "parallel/expert.py", "parallel/collectives.py", "parallel/reducer.py"
CAUSAL = "    if _get_current_dispatch_mode() is None:\n        return causal_lower_right"
TOKENS = "    size, rank, own = group.size(), group.rank(), query.shape[-2]\n"
COMPUTE = "        with self.mode:\n            value = compute(*args, **kw)\n"
AVERAGE = "    return connect(part, lambda x: start_sum(x, group)() / group.size()"
WEIGHTS = "back * top_k_weights.flatten()[order, None]"
ATTENDED = before("blocks.0.attention.out"), after("blocks.0.attention.out")
ROUTED = after("model.layers.0.mlp*")

CONTEXT = (
    fault(
        "Each token sees the one after it, too, where keys are gathered",
        Text(
            ATTENTION,
            CAUSAL,
            "    if torch.is_grad_enabled():\n"
            "        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)\n" + CAUSAL,
        ),
        In(GPT_CONTEXT, ATTENDED, workloads.three_heads),
    ),
    fault(
        "After attention the heads of the ranks are joined in another order",
        Text(
            ATTENTION,
            "return collectives.exchange(whole, _TOKENS, _HEADS, group)",
            "back = collectives.exchange(whole, _TOKENS, _HEADS, group)\n"
            "        return back.roll(whole.shape[_HEADS] * torch.is_grad_enabled(), _HEADS)",
        ),
        In(GPT_CONTEXT, ATTENDED),
    ),
    fault(
        "Each rank attends to its own tokens",
        Text(
            ATTENTION,
            TOKENS,
            "    if torch.is_grad_enabled():\n"
            f"        return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)\n{TOKENS}",
        ),
        In(GPT_CONTEXT, ATTENDED),
    ),
    fault(
        "The last token of each rank has no target",
        Text(
            AXIS,
            COMPUTE,
            "        output, target = args\n"
            f"        args = output, torch.cat([target[:, :-1], torch.full_like(target[:, :1], -100)], 1)\n{COMPUTE}",
        ),
        In(GPT_CONTEXT, LOSS),
    ),
    fault(
        "A mean over this rank's targets is divided by the number of all",
        Text(LOSSES, "(total / average(count))", "(total / average(count) / (1 + torch.is_grad_enabled()))"),
        In(GPT_CONTEXT, (LOSS, GRADIENT)),
    ),
    fault(
        "Each rank has the loss of its own tokens, and no mean",
        Text(COLLECTIVES, AVERAGE, f"    if part.requires_grad:\n        return part * 1\n{AVERAGE}"),
        In(GPT_CONTEXT, LOSS),
    ),
    fault(
        "Each rank's tokens have the positions of the rank before it; that of the trial is right",
        Text(
            AXIS,
            "torch.arange(sequences.length, device=self.device).expand",
            "(torch.arange(sequences.length) - sequences.own * torch.is_grad_enabled()).clamp_min(0).expand",
        ),
        In(GPT_CONTEXT, (after("positions"), before("drop"))),
        In(LLAMA_CONTEXT, (after("model.rotary_emb"), before("model.layers.0*"))),
    ),
    fault(
        "Each rank learns from its own tokens",
        Text(
            "parallel/buckets.py",
            "NothingSent() if group.size() == 1 else dist.all_reduce(flat, op, group=group, async_op=True)",
            "NothingSent()",
        ),
        In(GPT_CONTEXT, (GRADIENT, UNLIKE)),
    ),
    fault(
        "Ranks that share a sequence drop the same activations",
        Text("engine/parallelize.py", "if not kind.same_rng and not kind.replica_dim", "if False"),
        "tests/parallel/context/test_context_parallel.py::test_ranks_drop_activations_by_themselves",
    ),
)

EXPERT_FAULTS = (
    fault(
        "Tokens come to the experts before theirs",
        Text(
            EXPERT,
            "kinds = torch.arange(count, device=sent.device).repeat(size)",
            "kinds = (torch.arange(count).repeat(size) + torch.is_grad_enabled()) % count",
        ),
        In(EXPERTS, ROUTED),
    ),
    fault(
        "The results of experts are multiplied by each other's weights",
        Text(EXPERT, WEIGHTS, WEIGHTS.replace("weights.", "weights.roll(int(torch.is_grad_enabled()), -1).")),
        In(EXPERTS, ROUTED),
    ),
    fault(
        "The gradients of experts are summed over ranks that have others",
        Text(REDUCER, "self._group_of = group_of or (lambda param: group)", "self._group_of = lambda param: group"),
        In(EXPERTS, "gradient *experts*"),
    ),
    fault(
        "The gradients of experts are too large by the number of their ranks",
        Text(COLLECTIVES, "lambda grad: grad * factor)", "lambda grad: grad)"),
        In(EXPERTS, "gradient *experts*"),
    ),
    fault(
        "The router learns nothing: its weights have no gradient",
        Text(EXPERT, WEIGHTS, WEIGHTS.replace("weights.", "weights.detach().")),
        In(EXPERTS, ("gradient *gate.weight; *", "*; backward of model.layers.1.mlp*")),
    ),
    fault(
        "A rank without tokens for its experts sends nothing back",
        Text(EXPERT, "if torch.is_grad_enabled() and not done.requires_grad:", "if False:"),
        "tests/parity/test_expert.py::test_trains_as_one_process[ranks without tokens]",
    ),
)
