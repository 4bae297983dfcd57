"""Experts that data ranks divide among them train as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from halfmesh.verify.models import Experts, Mixture, Transformer, mixture
from tests.support.proofs import Row, TeamWork, rows

pytestmark = pytest.mark.distributed


def expert(size: int = 2, data: Any = None, axes: Any = None, **config: Any) -> dict[str, Any]:
    parallel = {"expert": size, **({"data": data} if data else {}), **(axes or {})}
    return {"clip_grad_norm": 1.0, "timeout": 30.0, "parallel": parallel, **config}


def summed() -> Any:
    *given, _ = mixture()
    return *given, lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


class Skipping(Experts):
    """Of no tokens it returns zeros without a graph, as transformers' plain loop."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        output = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if number < self.num_experts:
                token, nth = (top_k_index == number).nonzero(as_tuple=True)
                value = F.gelu(hidden_states[token] @ self.up[number]) @ self.down[number]
                output = output.index_add(0, token, value * top_k_weights[token, nth, None])
        return output


class Favouring(Mixture):
    """All tokens go to the first `count` experts, so that a rank may have none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts, self.count = Skipping(), count

    def forward(self, x: torch.Tensor) -> Any:
        weights, index = self.router(x).flatten(0, 1).softmax(-1).sort(-1)
        return self.experts(x.flatten(0, 1), index % self.count, weights).view_as(x)


def favouring(count: int, only_experts: bool = False) -> Any:
    model = Transformer(Favouring(count), Favouring(count))
    for name, param in model.named_parameters():
        param.requires_grad_(not only_experts or "experts" in name)
    return model, *mixture()[1:]


STAGES = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("blocks.2",)}}
SMALL = {"strategy": "zero1", "bucket_mb": 0.005}


@pytest.mark.promise("sequences or experts larger than a device")
@rows(
    Row("two groups, accumulated", mixture, expert(gradient_accumulation=2), 4),
    Row("two groups, zero1, summed", summed, expert(data=SMALL, loss_reduction="sum"), 4),
    Row("two groups, fsdp", mixture, expert(data="fsdp"), 4, work=TeamWork),
    Row("pipeline", mixture, expert(axes=STAGES), 4),
    Row("recomputed", mixture, expert(activation_checkpoint="full")),
    Row("ranks without tokens", partial(favouring, 2), expert(4), 4),
    Row("one expert for all", partial(favouring, 1), expert()),
    Row("only experts are trained", partial(favouring, 2, only_experts=True), expert()),
)
def test_trains_as_one_process(row):
    row.prove()
