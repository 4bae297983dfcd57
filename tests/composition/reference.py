"""What the cells are compared with: the same updates in one process, in fp32, by torch alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .training import OVERFLOW_AT, decay, make_optimizer
from .workloads import SAMPLES, UPDATES, criterion, find_workload


@dataclass(frozen=True)
class Reference:
    """
    Attributes:
        model: trained.
        start: its weights before.
        norms: of the gradients of each update, before clipping; None where it was left out.
        losses: of each update's samples.
        path: how far any weight went in all updates together, relative to the largest weight.
    """

    model: nn.Module
    start: dict[str, torch.Tensor]
    norms: list[float | None]
    losses: list[float]
    path: float


@cache
def reference(name: str, clip: bool, leaves_out: bool) -> Reference:
    """Train a workload. All samples of an update at once: layouts and accumulation only divide them.

    Args:
        clip: whether gradients are clipped.
        leaves_out: whether the update in which scaled cells overflow is left out.
    """
    workload = find_workload(name)
    model = workload.build()
    start = {n: value.clone() for n, value in model.state_dict().items()}
    optimizer = make_optimizer(model.parameters(), workload.lr)
    scheduler = LambdaLR(optimizer, decay)
    path = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    norms, losses = [], []
    x, y = workload.data()
    for update, (inputs, targets) in enumerate(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        losses.append(loss.item())
        if leaves_out and update == OVERFLOW_AT:
            norms.append(None)
            continue
        loss.backward()
        max_norm = workload.max_norm if clip else float("inf")
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
        scheduler.step()
        for n, p in model.named_parameters():
            path[n] += (p.detach() - before[n]).abs()
    assert len(losses) == UPDATES
    largest = max(value.abs().max().item() for value in model.state_dict().values())
    return Reference(model, start, norms, losses, max(p.max().item() for p in path.values()) / largest)
