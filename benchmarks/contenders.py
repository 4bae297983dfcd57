"""The loops that people write by hand, and halfmesh's: the same model, batch, optimizer and precision for each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.adam import adam

import halfmesh

from .harness import AGAIN, BARE, FUSED, HALFMESH, LOOP, Contender
from .works import Work

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR = 1e-3


@dataclass(frozen=True)
class Setup:
    """What every contender is given. The batch is the same for all of them, and is there before any is made."""

    work: Work
    precision: str
    clip: float
    x: torch.Tensor
    y: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, work: Work, precision: str, clip: float = 0.0, device: str = "cpu", seed: int = 1) -> Setup:
        x, y = work.batch(seed)
        return cls(work, precision, clip, x.to(device), y.to(device), torch.device(device))

    @property
    def dtype(self) -> torch.dtype | None:
        """That autocast computes in, if there is autocast."""
        return HALF.get(self.precision)

    def model(self) -> nn.Module:
        with self.device:  # made where it stays: drawing a billion numbers on the host takes long
            return self.work.model().to(self.device)


Factory = Callable[[Setup], Contender]


def adamw(model: nn.Module, **flags: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, **flags)


def make_loop(setup: Setup, name: str = LOOP, compile_it: bool = False, **flags: Any) -> Contender:
    """What a tutorial of torch.amp has: autocast, and in fp16 a GradScaler. `flags` go to AdamW."""
    model = setup.model()
    optimizer = adamw(model, **flags)
    called: Any = torch.compile(model) if compile_it else model
    forward = forward_of(setup, called)
    clip = setup.clip

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    scaler = torch.amp.GradScaler(setup.device.type)

    def scaled_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Contender(name, scaled_step if setup.precision == "fp16" else step, model, optimizer)


def forward_of(setup: Setup, model: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Forward and loss. fp32 has no autocast at all: a disabled one costs something, too."""
    x, y, criterion, dtype, device = setup.x, setup.y, setup.work.criterion, setup.dtype, setup.device.type

    def plain() -> torch.Tensor:
        return criterion(model(x), y)

    def autocast() -> torch.Tensor:
        with torch.autocast(device, dtype):
            return criterion(model(x), y)

    return plain if dtype is None else autocast


def make_again(setup: Setup) -> Contender:
    return make_loop(setup, AGAIN)


def make_fused(setup: Setup) -> Contender:
    return make_loop(setup, FUSED, fused=True)


def make_bare(setup: Setup) -> Contender:
    """The least that a step can be made of with torch's public functions: no engine can be faster.

    Forward, backward and `functional_adamw`; where the loop clips or scales, a norm of all gradients, and a scale that
    stays on the device. Nothing is looked up, checked, counted or reported, and no hook would run.
    """
    model = setup.model()
    forward = forward_of(setup, model)
    params = list(model.parameters())
    update = functional_adamw(params)
    scale = torch.full((), 2.0**16, device=setup.device) if setup.precision == "fp16" else None
    growth = torch.zeros((), dtype=torch.int32, device=setup.device)
    clip = setup.clip

    def step() -> torch.Tensor:
        for param in params:
            param.grad = None
        loss = forward()
        loss.backward(scale)
        grads = [param.grad for param in params if param.grad is not None]
        if not clip and scale is None:
            update(grads)
            return loss
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        divisor = torch.ones_like(norm) if scale is None else scale
        if clip:
            divisor = torch.maximum(divisor, norm / clip)
        if scale is None:
            update(grads, divisor)
        else:
            found_inf = norm.isfinite().logical_not_().float()
            update(grads, divisor, found_inf)
            torch._amp_update_scale_(scale, growth, found_inf, 2.0, 0.5, 2000)
        return loss

    return Contender(BARE, step, model, note="nothing is checked, counted or reported")


def functional_adamw(params: list[Any]) -> Callable[..., None]:
    """The fused kernel of AdamW through torch's functional form, on lists made once. Takes the gradients, what
    they are too large by, and 1 where the update is to be skipped."""
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    averages, squares = [torch.zeros_like(param) for param in params], [torch.zeros_like(param) for param in params]
    steps = [torch.zeros((), device=param.device) for param in params]
    rest = {key: optimizer.defaults[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    beta1, beta2 = optimizer.defaults["betas"]

    @torch.no_grad()
    def update(grads: list[Any], grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        adam(
            params,
            grads,
            averages,
            squares,
            [],
            steps,
            fused=True,
            beta1=beta1,
            beta2=beta2,
            decoupled_weight_decay=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            **rest,
        )

    return update


def make_halfmesh(setup: Setup, name: str = HALFMESH, **config: Any) -> Contender:
    """The README's loop. `config` has more keys, or others than those of the precision under mode TORCH."""
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    model = setup.model()
    if setup.dtype is not None and not config.keys() & {"fp16", "bf16"}:
        config[setup.precision] = {"mode": "torch"}
    if setup.clip:
        config["clip_grad_norm"] = setup.clip
    engine = halfmesh.initialize(model, adamw(model), setup.work.criterion, config=config, device=setup.device)
    x, y = setup.x, setup.y

    def step() -> torch.Tensor:
        engine.zero_grad()
        loss: torch.Tensor = engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss

    return Contender(name, step, engine.model, engine.optimizer, close=engine.close)


def update_of(engine: halfmesh.Engine, setup: Setup) -> Contender:
    """The engine's update alone: forward and backward run before it, and are not timed."""

    def before() -> torch.Tensor:
        engine.zero_grad()
        loss: torch.Tensor = engine.criterion(engine(setup.x), setup.y)
        engine.backward(loss)
        return loss

    def step() -> None:
        engine.step()

    return Contender(HALFMESH, step, engine.model, engine.optimizer, before, engine.close)
