"""Experts that data ranks divide among them train as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.verify.models import WIDTH, Experts, Mixture, Transformer, mixture
from tests.support.proofs import Row, TeamWork, rows

pytestmark = pytest.mark.distributed


def expert(size: int = 2, data: Any = None, axes: Any = None, **config: Any) -> dict[str, Any]:
    parallel = {"expert": size, **({"data": data} if data else {}), **(axes or {})}
    return {"clip_grad_norm": 1.0, "timeout": 30.0, "parallel": parallel, **config}


def made(*mlps: nn.Module) -> Any:
    _, data, criterion = mixture()
    return Transformer(*mlps), data, criterion


def summed() -> Any:
    model, data, _ = mixture()
    return (
        model,
        data,
        lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"),
    )


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
    built = made(Favouring(count), Favouring(count))
    for name, param in built[0].named_parameters():
        param.requires_grad_(not only_experts or "experts" in name)
    return built


class Adapter(nn.Module):
    """Of a layer of experts, which is frozen: a product of low rank for each, and itself such a layer."""

    def __init__(self, base: Experts) -> None:
        super().__init__()
        self.base, self.num_experts = base, base.num_experts
        self.a = nn.Parameter(torch.randn(4, 2, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(4, WIDTH, 2) * 0.1)
        base.requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        inner = torch.einsum("tkri,ti->tkr", self.a[top_k_index], hidden_states)
        low = torch.einsum("tkor,tkr->tko", self.b[top_k_index], inner)
        return self.base(hidden_states, top_k_index, top_k_weights) + (low * top_k_weights[..., None]).sum(1)


def adapted() -> Any:
    mlps = Mixture(), Mixture()
    for mlp in mlps:
        mlp.experts = Adapter(mlp.experts)
    return made(*mlps)


class Penalised(Transformer):
    """Adds a term of what all ranks hold, and of experts, whose value is zero."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        held = [param for name, param in self.named_parameters() if "experts" in name or "qkv" in name]
        return super().forward(ids, position_ids) + sum((param - param.detach()).sum() for param in held)


def penalised() -> Any:
    _, data, criterion = mixture()
    return Penalised(Mixture(), Mixture()), data, criterion


STAGES = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("blocks.2",)}}
SMALL = {"strategy": "zero1", "bucket_mb": 0.005}


@pytest.mark.promise("sequences or experts larger than a device")
@rows(
    Row("two groups, accumulated", mixture, expert(gradient_accumulation=2), 4),
    Row("two groups, zero1, summed", summed, expert(data=SMALL, loss_reduction="sum"), 4),
    Row("two groups, fsdp", mixture, expert(data="fsdp"), 4, work=TeamWork),
    Row("pipeline", mixture, expert(axes=STAGES), 4),
    Row("context", mixture, expert(axes={"context": 2}), 4, slow=True),
    Row("adapters", adapted, expert()),
    Row("recomputed", mixture, expert(activation_checkpoint="full")),
    Row("ranks without tokens", partial(favouring, 2), expert(4), 4),
    Row("one expert for all", partial(favouring, 1), expert()),
    Row("only experts are trained", partial(favouring, 2, only_experts=True), expert()),
    Row("a penalty on weights", penalised, expert()),
)
def test_trains_as_one_process(row):
    row.prove()
