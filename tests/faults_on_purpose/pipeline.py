"""Faults of pipelines."""

from __future__ import annotations

from . import workloads
from .fault import In, Text, fault
from .layouts import GPT_PIPE, GRADIENT, LOSS, MLP_PIPE, PIPE, WEIGHTED, Cell, Pipe, before, grad

AXIS, STAGE = (f"parallel/pipeline/{name}.py" for name in ("axis", "stage"))
MICROBATCHES, OPTIMIZER = "engine/microbatches.py", "amp/optimizer.py"
SCALED = "accumulation.update.scaled(total, accumulation.seed_divisor * count)"
COMPUTE = "        activations = self.compute(batch.calls[number], activations)\n"
WITH_MAP = "        from ...utils.tensors import map_tensors\n\n"

PIPELINE = (
    fault(
        "A weight that the first and the last stage share learns in each of them by itself",
        Text(AXIS, "return Reduction(sums) if sums else None", "return None"),
        In(GPT_PIPE, "gradient tokens.weight; *"),
    ),
    fault(
        "The mean over microbatches is a sum",
        Text(OPTIMIZER, "loss, seed = self._seed(loss, divisor, 0)", "loss, seed = self._seed(loss, 1.0, 0)"),
        In(MLP_PIPE, (LOSS, GRADIENT)),
    ),
    fault(
        "What several stages hold counts several times in the norm",
        Text(AXIS, "return len(self.ties.get(param, [0]))", "return 1"),
        In(Cell("none", "gpt", pipeline=PIPE, clip_grad_norm=True), "norm *"),
    ),
    fault(
        "Gradients are sent over the data ranks in the backward of the first microbatch",
        Text(
            "parallel/pipeline/runner.py",
            "        def begin_last(module: StageModule) -> None:\n"
            "            left.remove(module.index)\n"
            "            on_last(module.params, not left)\n",
            "        on_last([param for part in self.stages for param in part.params], True)\n\n"
            "        def begin_last(module: StageModule) -> None:\n"
            "            left.remove(module.index)\n",
        ),
        In(Cell("none", data=2, pipeline=PIPE), "rejected *changed after it was sent*"),
    ),
    fault(
        "The second half of a backward in two halves has no weights",
        Text(STAGE, "yield from self.params", "yield from ()"),
        In(Cell("none", pipeline=Pipe(2, "zbv", 4, 2)), GRADIENT),
    ),
    fault(
        "The last microbatch has no gradients",
        Text(MICROBATCHES, SCALED, f"{SCALED} * (index + 1 < len(self.calls))"),
        In(MLP_PIPE, LOSS),
    ),
    fault(
        "The loss of a microbatch takes the targets of the next one",
        [
            Text(MICROBATCHES, "self._value(self.calls[index], output)", "self._value(self.calls[index - 1], output)"),
            # Else the engine itself sees it.
            Text(MICROBATCHES, "return nan if equal or not isfinite(full) else full", "return nan"),
        ],
        In(MLP_PIPE, LOSS),
    ),
    fault(
        "A weighted loss is divided by the weight of its last microbatch",
        Text(MICROBATCHES, "torch.stack(weights).sum() if weights", "weights[-1] if weights"),
        In(MLP_PIPE, (LOSS, GRADIENT, "rejected * for its 2 microbatches *"), workloads.weighted, WEIGHTED),
    ),
    fault(
        "The loss that is told is that of the last microbatch",
        Text(MICROBATCHES, 'losses.mean() if reduction == "mean"', 'losses[-1] if reduction == "mean"'),
        In(MLP_PIPE, LOSS),
    ),
    fault(
        "The gradient that goes back from one stage to the one before is too large by two",
        Text(
            STAGE,
            COMPUTE,
            f"{WITH_MAP}        activations = map_tensors(lambda x: x + (x - x.detach()), activations)\n{COMPUTE}",
        ),
        In(MLP_PIPE, (grad("down"), "gradient first.*")),
        In(GPT_PIPE, (grad("blocks.0*"), "gradient tokens.*", "gradient blocks.0*")),
    ),
    fault(
        "Every microbatch goes on with what was received for the first: a buffer is used twice",
        Text(
            STAGE,
            COMPUTE,
            f"{WITH_MAP}        self.kept = map_tensors(torch.clone, activations) if number == 0 else self.kept\n"
            "        first = iter(tensors_of(self.kept))\n"
            f"        activations = map_tensors(lambda x: x + (next(first) - x).detach(), activations)\n{COMPUTE}",
        ),
        In(MLP_PIPE, before("norm")),
        In(GPT_PIPE, before("blocks.1*")),
    ),
    fault(
        "The first stage leaves out its last block: the model is cut in the wrong place",
        Text(STAGE, "self.pieces = tuple(pieces)", "self.pieces = tuple(pieces[: len(pieces) - (index == 0)])"),
        In(GPT_PIPE, (before("blocks.1*"), "* blocks.0")),
    ),
    fault(
        "The last stage's loss is not scaled",
        Text(OPTIMIZER, "return loss if seed is None else loss * seed", "return loss / divisor"),
        In(Cell("torch_fp16", pipeline=PIPE), (LOSS, GRADIENT)),
    ),
)
