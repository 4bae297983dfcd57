"""Optimizers that several tests give to engines: two for one model, one over another, and one that needs matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim


def split(params: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the rest."""
    params = list(params)
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.01, eps=1e-4)


def sgd_and_adamw(params: Any) -> list[optim.Optimizer]:
    matrices, others = split(params)
    return [optim.SGD(matrices, lr=0.05, momentum=0.9), adamw(others)]


def muon_and_adamw(params: Any) -> list[optim.Optimizer]:
    matrices, others = split(params)
    return [optim.Muon(matrices, lr=0.02), adamw(others)]


def of_timm(name: str, params: Any, **settings: Any) -> optim.Optimizer:
    return getattr(pytest.importorskip("timm.optim"), name)(list(params), **settings)


def lookahead(params: Any) -> optim.Optimizer:
    """timm's, over AdamW: every second step goes half of the way back."""
    return pytest.importorskip("timm.optim").Lookahead(adamw(list(params)), alpha=0.5, k=2)


class Whitened(optim.SGD):
    """As Shampoo: a gradient is divided by a root of its products, which are kept."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad.double().reshape(len(param), -1), self.state[param]
                state["left"] = state.get("left", 0) + (grad @ grad.T).to(param.dtype)
                values, vectors = torch.linalg.eigh(state["left"].double())
                root = vectors @ (values.clamp(min=0) + 1e-2).rsqrt().diag() @ vectors.T
                param.data.sub_((root @ grad).view_as(param), alpha=group["lr"])
