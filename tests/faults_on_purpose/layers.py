"""Faults of tensor ranks and of pipelines."""

from . import workloads
from .fault import GRADIENT, LOSS, OTHERWISE, PIPE, UNLIKE, WEIGHTED, At, Cell, In, Pipe, Text, after, before, grad

LAYERS, COLWISE, APPLY = (f"parallel/tensor/{name}.py" for name in ("layers", "colwise", "apply"))
COLLECTIVES, MICROBATCHES, OPTIMIZER = "parallel/collectives.py", "engine/microbatches.py", "amp/optimizer.py"
AXIS, STAGE = "parallel/pipeline/axis.py", "parallel/pipeline/stage.py"
REDUCE = "output = collectives.reduce_from_tp(output, group)"
SUM = "return partial(_wait, dist.all_reduce(total, group=group, async_op=True), total)"
GATHER = "connect(x, lambda x: start_gather(x, dim, group)(), lambda grad: _shard(grad, dim, group))"
SCATTER = "    return connect(x, lambda x: start_sum_shard("
LOOKED_UP = "elsewhere.unsqueeze(-1), 0), self.axis.group)"

TENSOR = {
    "A layer divided by rows keeps its part of the output: an all-reduce is missing in forward": (
        Text(LAYERS, REDUCE, "pass"),
        In(At.MLP_TENSOR, (after("down"), OTHERWISE)),
    ),
    "A layer divided by rows sums its output twice: an all-reduce too many in forward": (
        Text(LAYERS, REDUCE, "OLD\n            OLD"),
        In(At.LLAMA_TENSOR, after("model.layers.0.self_attn.o_proj")),
    ),
    "Every rank adds the bias of a layer divided by rows, and then the ranks are summed": (
        Text(LAYERS, "output = self.product(x, weight)\n", "output = self.product(x, weight, self.bias)\n"),
        Text(LAYERS, "output if self.bias is None else output + self.bias.to(output.dtype)", "output"),
        In(At.MLP_TENSOR, (after("down"), OTHERWISE)),
    ),
    "Layers divided by columns hand back their part of the gradient: an all-reduce is missing in backward": (
        Text(COLLECTIVES, SUM, "return lambda: total"),
        In(At.LLAMA_TENSOR, (grad("*norm"), "rejected *gradients of*norm*")),
    ),
    "Layers divided by columns sum the gradient of their input twice: an all-reduce too many in backward": (
        Text(COLLECTIVES, SUM, "dist.all_reduce(total, group=group)\n    OLD"),
        In(At.GPT_TENSOR, grad("norm")),
    ),
    "The shards of a head's output are joined in another order than that of the ranks": (
        Text(COLLECTIVES, GATHER, "OLD.roll(x.shape[dim] * torch.is_grad_enabled(), dim)"),
        In(At.GPT_TENSOR, after("head")),
    ),
    "Two ranks look up the last word of the first one's shard: the mask of an embedding is off by one": (
        Text(LAYERS, LOOKED_UP, "OLD * (1 + (ids == entries - 1)).unsqueeze(-1)"),
        In(At.LLAMA_TENSOR, after("model.embed_tokens")),
    ),
    "A weight of queries, keys and values is cut as if it were one matrix": (
        Text("parallel/tensor/styles.py", "self.blocks = int(blocks)", "self.blocks = 1"),
        In(At.VIT_TENSOR, "* blocks.0.attn*"),
    ),
    "Of four shards of a head's output the last two are joined in the wrong order": (
        Text(COLLECTIVES, GATHER, "torch.cat([*(each := OLD.chunk(group.size(), dim))[:2], *each[:1:-1]], dim)"),
        In(
            Cell("none", "gpt", tensor=4),
            after("head"),
            unseen="on a CPU verify takes 2 ranks in place of 4; `--no-shrink` sees it",
        ),
    ),
    "Each rank of a tensor group drops other elements of activations that all of them hold": (
        Text("parallel/rng.py", "(seed + place)", "(seed + place + torch.distributed.get_rank())"),
        In(
            At.GPT_TENSOR,
            after("*drop1"),
            workloads.dropping,
            unseen="dropout is switched off: layouts draw other numbers anyway",
        ),
    ),
    "A weight that embedding and head share learns from the head only": (
        Text(LAYERS, LOOKED_UP, "OLD.detach()"),
        In(At.GPT_TENSOR, "gradient tokens.weight; *"),
    ),
    "Gradients from this rank's shard of the activations are left as they are": (
        Text(APPLY, "self._axis.trial.run()  # before the comparison", "return  #"),
        In(At.VIT_TENSOR, "gradient *_norm.*"),
        In(At.GPT_SEQUENCE, ("gradient *norm*", "gradient *bias; *", UNLIKE)),
    ),
    "Gradients from shards of the activations are summed over the ranks twice": (
        Text(
            APPLY,
            "        super().finish()\n",
            "OLD        for shard in self._shards:\n            shard.param.grad *= self.group.size()\n",
        ),
        In(At.GPT_SEQUENCE, ("gradient *norm*", "gradient *bias; *")),
    ),
    "Where a sequence is gathered, backward takes this rank's part of the gradient, and not the sum": (
        Text(
            COLWISE,
            "self._sums.append(collectives.start_sum_shard(grad, SEQUENCE_DIM, self._group))",
            "mine = grad.chunk(self._group.size(), SEQUENCE_DIM)[self._group.rank()].clone()\n"
            "            self._sums.append(lambda: mine)",
        ),
        In(At.GPT_SEQUENCE, grad("blocks.1.norm2")),
    ),
    "The sum of a layer divided by rows is scattered along the sequence to the wrong ranks": (
        Text(COLLECTIVES, SCATTER, "    x = x.roll(x.shape[dim] // group.size() * torch.is_grad_enabled(), dim)\nOLD"),
        In(At.GPT_SEQUENCE, after("blocks.0.attention.out")),
    ),
    "Sharded layers sum over the data ranks: a wrong group": (
        Text(LAYERS, 'self.group = context.group("tp")', "self.group = context.dp_group"),
        In(Cell("none", "llama", tensor=2, data=2), after("model.embed_tokens")),
    ),
    "A sum over tensor ranks is made in place": (
        Text(COLLECTIVES, "total = x.clone(memory_format=torch.contiguous_format)", "total = x"),
        "tests/parallel/test_late_collectives.py::test_a_gradient_that_others_hold_is_not_summed_in_place",
    ),
}

SCALED = "accumulation.update.scaled(total, accumulation.seed_divisor * count)"
COMPUTE = "        activations = self.compute(batch.calls[number], activations)\n"
MAP = "        from ...utils.tensors import map_tensors\n\n        "
LEFT = "        def begin_last(module: StageModule) -> None:\n            left.remove(module.index)\n"

PIPELINE = {
    "A weight that the first and the last stage share learns in each of them by itself": (
        Text(AXIS, "return Reduction(sums) if sums else None", "return None"),
        In(At.GPT_PIPE, "gradient tokens.weight; *"),
    ),
    "The mean over microbatches is a sum": (
        Text(OPTIMIZER, "loss, seed = self._seed(loss, divisor, 0)", "loss, seed = self._seed(loss, 1.0, 0)"),
        In(At.MLP_PIPE, (LOSS, GRADIENT)),
    ),
    "What several stages hold counts several times in the norm": (
        Text(AXIS, "return len(self.ties.get(param, [0]))", "return 1"),
        In(Cell("none", "gpt", pipeline=PIPE, clip_grad_norm=True), "norm *"),
    ),
    "Gradients are sent over the data ranks in the backward of the first microbatch": (
        Text(
            "parallel/pipeline/runner.py",
            f"{LEFT}            on_last(module.params, not left)\n",
            f"        on_last([param for part in self.stages for param in part.params], True)\n\n{LEFT}",
        ),
        In(Cell("none", data=2, pipeline=PIPE), "rejected *changed after it was sent*"),
    ),
    "The second half of a backward in two halves has no weights": (
        Text(STAGE, "yield from self.params", "yield from ()"),
        In(Cell("none", pipeline=Pipe(2, "zbv", 4, 2)), GRADIENT),
    ),
    "The last microbatch has no gradients": (
        Text(MICROBATCHES, SCALED, "OLD * (index + 1 < len(self.calls))"),
        In(At.MLP_PIPE, LOSS),
    ),
    "The loss of a microbatch takes the targets of the next one": (
        Text(MICROBATCHES, "self._value(self.calls[index], output)", "self._value(self.calls[index - 1], output)"),
        # Else the engine itself sees it.
        Text(MICROBATCHES, "return nan if equal or not isfinite(full) else full", "return nan"),
        In(At.MLP_PIPE, LOSS),
    ),
    "A weighted loss is divided by the weight of its last microbatch": (
        Text(MICROBATCHES, "torch.stack(weights).sum() if weights", "weights[-1] if weights"),
        In(At.MLP_PIPE, (LOSS, GRADIENT, "rejected * for its 2 microbatches *"), workloads.weighted, WEIGHTED),
    ),
    "The loss that is told is that of the last microbatch": (
        Text(MICROBATCHES, 'losses.mean() if reduction == "mean"', 'losses[-1] if reduction == "mean"'),
        In(At.MLP_PIPE, LOSS),
    ),
    "The gradient that goes back from one stage to the one before is too large by two": (
        Text(STAGE, COMPUTE, f"{MAP}activations = map_tensors(lambda x: x + (x - x.detach()), activations)\nOLD"),
        In(At.MLP_PIPE, (grad("down"), "gradient first.*")),
    ),
    "Every microbatch goes on with what was received for the first: a buffer is used twice": (
        Text(
            STAGE,
            COMPUTE,
            f"{MAP}self.kept = map_tensors(torch.clone, activations) if number == 0 else self.kept\n"
            "        first = iter(tensors_of(self.kept))\n"
            "        activations = map_tensors(lambda x: x + (next(first) - x).detach(), activations)\nOLD",
        ),
        In(At.MLP_PIPE, before("norm")),
    ),
    "The first stage leaves out its last block: the model is cut in the wrong place": (
        Text(STAGE, "self.pieces = tuple(pieces)", "self.pieces = tuple(pieces[: len(pieces) - (index == 0)])"),
        In(At.GPT_PIPE, (before("blocks.1*"), "* blocks.0")),
    ),
    "The last stage's loss is not scaled": (
        Text(OPTIMIZER, "return loss if seed is None else loss * seed", "return loss / divisor"),
        In(Cell("torch_fp16", pipeline=PIPE), (LOSS, GRADIENT)),
    ),
}
