"""What apex.amp does under O0 to O3, read from its source and written out by hand on plain torch tensors.

An oracle: it shares no code with halfmesh, so that the two agree only if both follow apex. Where apex patches torch's
functions (O1), the caller hands in a forward with the same casts written into it. One thing differs: masters begin with
the weights as they came, as the engine's do, and not as the cast left them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

INITIAL_SCALE, MAX_SCALE, WINDOW = 2.0**16, 2.0**24, 2000
HALF = torch.float16
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"cast": torch.float32, "keep_batchnorm_fp32": None, "master_weights": False, "loss_scale": 1.0},
    "O1": {"cast": None, "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": "dynamic"},
    "O2": {"cast": HALF, "keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"cast": HALF, "keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}


class Scaler:
    """One loss's scale. A static one never moves, and nothing is ever skipped on its account."""

    def __init__(self, loss_scale: Any, floor: float | None, ceiling: float) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.scale = min(ceiling, INITIAL_SCALE) if self.dynamic else float(loss_scale)
        self.unskipped = 0
        self.floor, self.ceiling = floor or 0.0, ceiling

    def judge(self, overflow: bool) -> bool:
        """Move after a backward; returns whether the step that it was for has to be skipped."""
        skip = overflow and self.dynamic
        if skip:
            self.scale, self.unskipped = max(self.floor, self.scale / 2), 0
        else:
            self.unskipped += 1
        if self.dynamic and self.unskipped == WINDOW:
            self.scale, self.unskipped = min(self.ceiling, self.scale * 2), 0
        return skip


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool | None) -> None:
    """Parameters and floating-point buffers, in place; BatchNorms that have weights can be left out."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Apex:
    """A model and its optimizer after amp.initialize, with the calls of a training loop.

    Args:
        model: in fp32; it is cast in place.
        make_optimizer: called with the model after the cast.
        patched: the forward of O1: (model, inputs) with the casts of apex's lists written out.
        overrides: keep_batchnorm_fp32, master_weights, loss_scale; None leaves what the level says.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], optim.Optimizer],
        opt_level: str,
        *,
        patched: Callable[..., Any] | None = None,
        num_losses: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = MAX_SCALE,
        **overrides: Any,
    ) -> None:
        level = LEVELS[opt_level] | {key: value for key, value in overrides.items() if value is not None}
        self.model, self.cast = model, level["cast"]
        self.before_cast = {p: p.detach().clone() for p in model.parameters()}
        if self.cast is not None:
            cast_model(model, self.cast, level["keep_batchnorm_fp32"])
        self.forward = model if patched is None or self.cast is not None else lambda *inputs: patched(model, *inputs)
        self.scalers = [Scaler(level["loss_scale"], min_loss_scale, max_loss_scale) for _ in range(num_losses)]
        self.keeps_masters = bool(level["master_weights"])
        self.optimizer = make_optimizer(model)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # what the model computes with, what is stepped
        for group in self.optimizer.param_groups:
            group["params"] = self._stepped(group["params"])
        self.skip = False

    def _stepped(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        targets = []
        for param in params:
            has_master = self.keeps_masters and param.dtype == HALF
            first = self.before_cast.get(param, param.detach()).float()
            targets.append(nn.Parameter(first) if has_master else param)
            self.pairs.append((param, targets[-1]))
        return targets

    def __call__(self, *inputs: Any) -> Any:
        if self.cast is None:
            return self.forward(*inputs)
        return cast_floats(self.forward(*cast_floats(inputs, self.cast)), torch.float32)

    def zero_grad(self) -> None:
        for param, target in self.pairs:
            param.grad = target.grad = None

    def backward(self, loss: torch.Tensor, loss_id: int = 0) -> None:
        """Gradients of `loss`, unscaled with its own scale and added to those of earlier backwards."""
        scaler = self.scalers[loss_id]
        earlier = [target.grad for _, target in self.pairs]
        self.zero_grad()
        (loss.float() * scaler.scale).backward()
        overflow = False
        for (param, target), left in zip(self.pairs, earlier, strict=True):
            scaled, param.grad = param.grad, None
            if scaled is None:
                target.grad = left
                continue
            overflow = overflow or not bool(scaled.isfinite().all())
            unscaled = scaled.float() * (1.0 / scaler.scale)
            target.grad = (unscaled if left is None else unscaled + left.float()).to(target.dtype)
        if scaler.judge(overflow):
            self.skip = True  # and stays set, whatever the other losses find

    def step(self) -> bool:
        """Step, or skip; either way the gradients are used up. Returns whether it was skipped."""
        skipped, self.skip = self.skip, False
        if not skipped:
            self.optimizer.step()
            for param, target in self.pairs:
                param.data.copy_(target.data)
        self.zero_grad()
        return skipped

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return tuple(scaler.scale for scaler in self.scalers)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state in fp32, with the masters where there are any."""
        masters = {id(param): target for param, target in self.pairs}
        state = self.model.state_dict(keep_vars=True)
        full = {name: masters.get(id(value), value).detach().clone() for name, value in state.items()}
        return {name: cast_floats(value, torch.float32) for name, value in full.items()}
