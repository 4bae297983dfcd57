"""Faults of tensor ranks."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import (
    GPT_SEQUENCE,
    GPT_TENSOR,
    LLAMA_TENSOR,
    MLP_TENSOR,
    OTHERWISE,
    UNLIKE,
    VIT_TENSOR,
    Cell,
    after,
    grad,
)

LAYERS, COLWISE, APPLY = (f"parallel/tensor/{name}.py" for name in ("layers", "colwise", "apply"))
COLLECTIVES = "parallel/collectives.py"
REDUCE = "output = collectives.reduce_from_tp(output, group)"
GATHER = "lambda grad: _shard(grad, dim, group))"
LOOKED_UP = "elsewhere.unsqueeze(-1), 0), self.axis.group)"
O_PROJ = after("model.layers.0.self_attn.o_proj")
LATE = "tests/parallel/test_late_collectives.py"

TENSOR = (
    fault(
        "A layer divided by rows keeps its part of the output: an all-reduce is missing in forward",
        Text(LAYERS, REDUCE, "pass"),
        In(LLAMA_TENSOR, (O_PROJ, "rejected *output*")),
        In(MLP_TENSOR, (after("down"), OTHERWISE)),
    ),
    fault(
        "A layer divided by rows sums its output twice: an all-reduce too many in forward",
        Text(LAYERS, REDUCE, f"{REDUCE}\n            {REDUCE}"),
        In(LLAMA_TENSOR, O_PROJ),
        In(GPT_TENSOR, (after("blocks.0.attention.out"), "rejected *blocks.0*")),
    ),
    fault(
        "Every rank adds the bias of a layer divided by rows, and then the ranks are summed",
        [
            Text(LAYERS, "output = self.product(x, weight)\n", "output = self.product(x, weight, self.bias)\n"),
            Text(LAYERS, "output if self.bias is None else output + self.bias.to(output.dtype)", "output"),
        ],
        In(LLAMA_TENSOR, O_PROJ),
        In(MLP_TENSOR, (after("down"), OTHERWISE)),
    ),
    fault(
        "Layers divided by columns hand back their part of the gradient: an all-reduce is missing in backward",
        Text(
            COLLECTIVES,
            "return partial(_wait, dist.all_reduce(total, group=group, async_op=True), total)",
            "return lambda: total",
        ),
        In(LLAMA_TENSOR, (grad("*norm"), "rejected *gradients of*norm*")),
    ),
    fault(
        "Layers divided by columns sum the gradient of their input twice: an all-reduce too many in backward",
        Text(
            COLLECTIVES,
            "    return partial(_wait, dist.all_reduce(total, group=group, async_op=True), total)",
            "    dist.all_reduce(total, group=group)\n"
            "    return partial(_wait, dist.all_reduce(total, group=group, async_op=True), total)",
        ),
        In(LLAMA_TENSOR, (grad("model.norm"), grad("model"))),
        In(GPT_TENSOR, grad("norm")),
    ),
    fault(
        "The shards of a head's output are joined in another order than that of the ranks",
        Text(COLLECTIVES, GATHER, f"{GATHER}.roll(x.shape[dim] * torch.is_grad_enabled(), dim)"),
        In(GPT_TENSOR, after("head")),
    ),
    fault(
        "Two ranks look up the last word of the first one's shard: the mask of an embedding is off by one",
        Text(LAYERS, LOOKED_UP, f"{LOOKED_UP} * (1 + (ids == entries - 1)).unsqueeze(-1)"),
        In(LLAMA_TENSOR, after("model.embed_tokens")),
    ),
    fault(
        "A weight of queries, keys and values is cut as if it were one matrix",
        Text("parallel/tensor/styles.py", "self.blocks = int(blocks)", "self.blocks = 1"),
        In(VIT_TENSOR, "* blocks.0.attn*"),
    ),
    fault(
        "Of four shards of a head's output the last two are joined in the wrong order",
        Text(
            COLLECTIVES,
            "return connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: _shard(grad",
            "shards = connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: _shard(grad, dim, group))"
            ".chunk(group.size(), dim)\n"
            "    return torch.cat([*shards[:2], *shards[:1:-1]], dim)\n"
            "    return connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: _shard(grad",
        ),
        In(
            Cell("none", "gpt", tensor=4),
            after("head"),
            unseen="on a CPU verify takes 2 ranks in place of 4; `--no-shrink` sees it",
        ),
    ),
    fault(
        "Each rank of a tensor group drops other elements of activations that all of them hold",
        Text(
            "parallel/rng.py", "manual_seed(seed % _SEEDS)", "manual_seed(seed % _SEEDS + torch.distributed.get_rank())"
        ),
        In(
            GPT_TENSOR,
            after("*drop1"),
            workloads.dropping,
            unseen="dropout is switched off: layouts draw other numbers anyway",
        ),
    ),
    fault(
        "A weight that embedding and head share learns from the head only",
        Text(LAYERS, LOOKED_UP, f"{LOOKED_UP}.detach()"),
        In(GPT_TENSOR, "gradient tokens.weight; *"),
    ),
    fault(
        "Gradients from this rank's shard of the activations are left as they are",
        Text(APPLY, "self._axis.trial.run()  # before the comparison", "return  #"),
        In(VIT_TENSOR, "gradient *_norm.*"),
        In(GPT_SEQUENCE, ("gradient *norm*", "gradient *bias; *", UNLIKE)),
    ),
    fault(
        "Gradients from shards of the activations are summed over the ranks twice",
        Text(
            APPLY,
            "        super().finish()\n",
            "        super().finish()\n"
            "        for shard in self._shards:\n            shard.param.grad *= self.group.size()\n",
        ),
        In(GPT_SEQUENCE, ("gradient *norm*", "gradient *bias; *")),
    ),
    fault(
        "Where a sequence is gathered, backward takes this rank's part of the gradient, and not the sum",
        Text(
            COLWISE,
            "self._sums.append(collectives.start_sum_shard(grad, SEQUENCE_DIM, self._group))",
            "mine = grad.chunk(self._group.size(), SEQUENCE_DIM)[self._group.rank()].clone()\n"
            "            self._sums.append(lambda: mine)",
        ),
        In(GPT_SEQUENCE, grad("blocks.1.norm2")),
    ),
    fault(
        "The sum of a layer divided by rows is scattered along the sequence to the wrong ranks",
        Text(
            COLLECTIVES,
            "    return connect(x, lambda x: start_sum_shard(",
            "    x = x.roll(x.shape[dim] // group.size() * torch.is_grad_enabled(), dim)\n"
            "    return connect(x, lambda x: start_sum_shard(",
        ),
        In(GPT_SEQUENCE, after("blocks.0.attention.out")),
    ),
    fault(
        "Sharded layers sum over the data ranks: a wrong group",
        Text(LAYERS, 'self.group = context.group("tp")', "self.group = context.dp_group"),
        In(Cell("none", "llama", tensor=2, data=2), after("model.embed_tokens")),
    ),
    fault(
        "A sum over tensor ranks is made in place",
        Text(
            COLLECTIVES,
            "total = x.clone(memory_format=torch.contiguous_format)",
            "total = x",
        ),
        f"{LATE}::test_a_gradient_that_others_hold_is_not_summed_in_place",
    ),
)
