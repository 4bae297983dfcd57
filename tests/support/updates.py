"""Optimizers, gradients and the same updates with torch alone, for the tests of the update path."""

from __future__ import annotations

import torch
from torch import nn, optim

from halfmesh.amp.convert import convert
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.amp.precision import Precision
from halfmesh.amp.recipe import FP32, LossScale, UpdateOptions
from halfmesh.amp.step_result import StepResult
from halfmesh.utils.param_shard import ParamShard

OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd_momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adam_amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adam_foreach": lambda params: optim.Adam(params, lr=0.01, foreach=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw_tensor_lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda params: optim.Adadelta(params, lr=0.5),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.05),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
}
DYNAMIC = LossScale(initial=1024.0, growth_interval=2)


def make_params(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in [(7, 5), (5,), (3, 2, 2)]]


def make_update(params, make_optimizer, recipe=FP32, **options) -> MixedPrecisionOptimizer:
    model = nn.Module()
    for i, param in enumerate(params):
        model.register_parameter(f"p{i}", param)
    shards = [ParamShard(name, p) for name, p in model.named_parameters()]
    precision = Precision(recipe, params[0].device)
    return convert(model, make_optimizer(params), shards, precision, options=UpdateOptions(**options))


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * 0.3 for p in make_params()]


def give(params, grads, scale: float = 1.0) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else (grad * scale).to(param.dtype)


def scale_of(update: MixedPrecisionOptimizer) -> float:
    """The loss scale that the next backward seeds with."""
    return update.loss_scales.current()[0]


def take(update: MixedPrecisionOptimizer, params, step: int, factor: float = 1.0) -> StepResult:
    """One update from the gradients of `step`, scaled as backward scales them, times `factor`."""
    give(params, gradients(step), scale_of(update) * factor)
    return update.step()


def held(update: MixedPrecisionOptimizer) -> list[torch.Tensor]:
    """What the optimizer steps: the masters where there are any."""
    return [param.detach() for group in update.optimizer.param_groups for param in group["params"]]


def by_hand(make_optimizer, steps, max_norm: float = 0.0) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """The same updates with torch alone, from unscaled gradients."""
    params = make_params()
    optimizer = make_optimizer(params)
    for step in range(steps):
        give(params, gradients(step))
        if max_norm:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
    return params, optimizer


def assert_close(actual, expected, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)
