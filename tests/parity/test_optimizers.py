"""Optimizers under layouts that shard what they step: one, several for a model, one over another, and those that need
whole matrices."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.composition.workloads import criterion
from tests.support.nano_gpt import CONTEXT, GPT, PLAN, WORDS
from tests.support.optimizers import Whitened, adamw, lookahead, muon_and_adamw, of_timm, sgd_and_adamw
from tests.support.proofs import FormatAlone, Row, StructureAlone, rows

pytestmark = pytest.mark.distributed

TENSOR = {"tensor": {"size": 2, "plan": PLAN}}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["transformer.h.1"]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": TENSOR,
    "pipeline": PIPELINE,
    "offload": {"data": {"strategy": "fsdp", "cpu_offload": True}},
}
FP16 = {"fp16": {"mode": "naive", "initial_scale": 256.0, "hysteresis": 1}}
MODES: dict[str, dict[str, Any]] = {"fp32": {}, "fp16": FP16, "bf16": {"bf16": {"mode": "torch"}}}


class Brief(optim.SGD):
    """As people write it for a model of their own: it sets `data`, and expects a gradient of each parameter."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad / (param.grad.norm() + 0.01)


OPTIMIZERS: dict[str, Any] = {
    "adamw": adamw,
    "sgd and adamw": sgd_and_adamw,
    "muon and adamw": muon_and_adamw,
    "lookahead": lookahead,
    "adafactor": partial(optim.Adafactor, lr=0.01, eps=(1e-6, 1e-3)),  # the gradient of k.bias is noise
    "lamb": partial(of_timm, "Lamb", lr=0.01, max_grad_norm=None),
    "own": partial(Whitened, lr=0.01),
    "brief": partial(Brief, lr=0.01),
}


def gpt() -> Any:
    return GPT(), (torch.randint(WORDS, (8, CONTEXT)), torch.randint(WORDS, (8, CONTEXT))), criterion


def layers() -> Any:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return model, (torch.randn(8, 4), torch.randn(8, 4)), nn.functional.mse_loss


def half_each(params: Any) -> list[optim.Optimizer]:
    params = list(params)
    return [optim.SGD(params[: len(params) // 2], lr=0.1), adamw(params[len(params) // 2 :])]


def row(optimizer: str, layout: str, mode: str = "", **config: Any) -> Row:
    """The layout in float64; or, with a mode, in that, where an update is skipped if it has a loss scale."""
    config = {"clip_grad_norm": 0.5, "parallel": LAYOUTS[layout], **config, **(MODES[mode] if mode else {})}
    name, work = ", ".join(filter(None, (optimizer, layout, mode))), FormatAlone if mode else StructureAlone
    return Row(name, gpt, config, optimizer=OPTIMIZERS[optimizer], work=work)


@rows(
    row("adamw", "tensor"),
    row("adamw", "fsdp"),
    row("adamw", "fsdp", "fp32"),
    *(row("sgd and adamw", layout) for layout in ("zero1", "fsdp", "tensor", "pipeline")),
    *(row("sgd and adamw", layout, "fp16") for layout in ("zero1", "fsdp", "pipeline")),
    *(row("lookahead", layout) for layout in ("zero1", "fsdp")),
    Row(
        "a stage without parameters of the second of two",
        layers,
        {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}},
        optimizer=half_each,
    ),
    # Where matrices are whole.
    *(row("muon and adamw", layout) for layout in ("fsdp", "pipeline")),
    row("muon and adamw", "tensor", gradient_accumulation=2),
    row("muon and adamw", "fsdp", "bf16"),
    *(row("lamb", layout) for layout in ("zero1", "fsdp", "tensor", "offload")),
    *(row("lamb", layout, "fp16") for layout in ("zero1", "fsdp")),
    *(row("own", layout) for layout in ("zero1", "tensor")),
    *(row("brief", layout) for layout in ("zero1", "fsdp", "tensor")),
    *(row("adafactor", layout) for layout in ("zero1", "fsdp", "tensor")),
)
def test_trains_as_one_process(row):
    row.prove()
