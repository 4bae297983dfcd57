"""The loops that people write by hand, and halfmesh's: the same model, batch, optimizer and precision for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import halfmesh

from .harness import HALFMESH, LOOP, Contender
from .works import Work

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR = 1e-3


@dataclass(frozen=True)
class Setup:
    """What every contender is given.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        clip: the largest norm of the gradients; 0 for no clipping.
        masters: half-precision weights with fp32 masters (mode NAIVE), in place of autocast (mode TORCH).
        compiled: with torch.compile; a dict has its arguments.
    """

    work: Work
    precision: str
    clip: float
    x: torch.Tensor
    y: torch.Tensor
    device: torch.device
    masters: bool = False
    compiled: bool | dict[str, Any] = False

    @classmethod
    def of(
        cls, work: Work, precision: str, clip: float = 0.0, device: str = "cpu", seed: int = 1, **options: Any
    ) -> Setup:
        x, y = work.batch(seed)
        return cls(work, precision, clip, x.to(device), y.to(device), torch.device(device), **options)

    @property
    def dtype(self) -> torch.dtype | None:
        """The half precision, if there is one."""
        return HALF.get(self.precision)

    @property
    def config(self) -> dict[str, Any]:
        """The same for halfmesh."""
        mode = {"mode": "naive" if self.masters else "torch"}
        half = {} if self.dtype is None else {self.precision: mode}
        return {"clip_grad_norm": self.clip, "compile": self.compiled} | half

    def model(self) -> nn.Module:
        with self.device:  # made where it stays: drawing a billion numbers on the host takes long
            return self.work.model().to(self.device)

    def forward(self, model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Forward and loss, with autocast in half precision. (A disabled autocast costs something, too.)"""
        x, y, criterion, dtype, device = self.x, self.y, self.work.criterion, self.dtype, self.device.type
        options = self.compiled if isinstance(self.compiled, dict) else {}
        called = torch.compile(model, **options) if self.compiled else model

        def plain() -> torch.Tensor:
            return criterion(called(x), y)

        def autocast() -> torch.Tensor:
            with torch.autocast(device, dtype):
                return criterion(called(x), y)

        return plain if dtype is None else autocast


def adamw(model: nn.Module, **flags: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, **flags)


def make_loop(setup: Setup, name: str = LOOP, **flags: Any) -> Contender:
    """What a tutorial of torch.amp has: autocast, and in fp16 a GradScaler. `flags` go to AdamW."""
    if setup.masters:
        return make_masters_loop(setup, name, **flags)
    model = setup.model()
    optimizer = adamw(model, **flags)
    forward, clip = setup.forward(model), setup.clip
    scaler = torch.amp.GradScaler(setup.device.type) if setup.precision == "fp16" else None

    def before() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss

    def step() -> None:
        if clip:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return Contender(name, step, model, optimizer, before)


def make_masters_loop(setup: Setup, name: str = LOOP, fused: bool = False) -> Contender:
    """A bf16 model with fp32 masters: one copy for each tensor, or with `fused` one call for all of them."""
    model = setup.model()
    masters = [param.detach().clone() for param in model.parameters()]
    params: list[torch.Tensor] = list(model.to(setup.dtype).parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=fused or None)
    x = setup.x.to(setup.dtype) if setup.x.is_floating_point() else setup.x
    y, criterion, clip = setup.y, setup.work.criterion, setup.clip

    def before() -> torch.Tensor:
        for param in params:
            param.grad = None
        loss = criterion(model(x).float(), y)
        loss.backward()
        return loss

    @torch.no_grad()
    def step() -> None:
        if fused:
            wide = [torch.empty_like(master) for master in masters]
            torch._foreach_copy_(wide, [param.grad for param in params if param.grad is not None])
            for master, grad in zip(masters, wide, strict=True):
                master.grad = grad
        else:
            for master, param in zip(masters, params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
        if clip:
            nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        if fused:
            torch._foreach_copy_(params, masters)
        else:
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)

    return Contender(name, step, model, optimizer, before)


def make_halfmesh(setup: Setup, **config: Any) -> Contender:
    """The README's loop; `config` has more keys."""
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    model = setup.model()
    config = setup.config | config
    engine = halfmesh.initialize(model, adamw(model), setup.work.criterion, config=config, device=setup.device)
    x, y, accumulation = setup.x, setup.y, engine.config.gradient_accumulation

    def before() -> torch.Tensor:
        for number in range(accumulation):
            if number:
                engine.step()
            engine.zero_grad()
            loss: torch.Tensor = engine.criterion(engine(x), y)
            engine.backward(loss)
        return loss

    def step() -> None:
        engine.step()

    return Contender(HALFMESH, step, engine.model, engine.optimizer, before, engine.close)
