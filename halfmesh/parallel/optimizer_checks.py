"""Whether an optimizer may step a part of a parameter: found by trying."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn, optim

from .._torch import outside_of_dry_run
from ..errors import InputError

_STEPS = 3
_SIDES = (4, 256)  # of the matrices; some optimizers look at rows and columns of large ones only


def refuse_other_state(optimizer: optim.Optimizer) -> None:
    """Raise InputError if `optimizer`, over parts of parameters, holds state of another shape: fused optimizers would
    take it as it is, and read past what is theirs."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                raise InputError(
                    f"the loaded optimizer state has {name!r} of shape {tuple(value.shape)} for a parameter of "
                    f"which this rank holds {tuple(param.shape)}; load what was saved by the same rank in the same "
                    "layout (engine.load_state_dict), or load the whole state into the optimizer before initialize"
                )


def find_problem(optimizer: optim.Optimizer) -> str | None:
    """Why `optimizer` cannot step divided parameters, if it cannot.

    One that looks at a parameter as a whole (its norm, its rows, its singular values: LAMB, Adafactor, Muon) takes
    another step on the parts than on the whole. Matrices are stepped whole and in parts, and compared.
    """
    name = type(optimizer).__name__
    if inspect.unwrap(optimizer.step) is not inspect.unwrap(type(optimizer).step):
        return (
            f"optimizer: the step of this {name} was exchanged for one of yours, and whether that can step divided "
            "parameters cannot be tried out on a matrix; make it the step of a class derived from "
            "torch.optim.Optimizer, or leave parameters whole (tensor=1, data='replicate')"
        )
    try:
        try:
            apart = _differs_anywhere(optimizer, with_state=False)
        except LookupError:  # its state is made when it is built (Adagrad's, in older torch)
            apart = _differs_anywhere(optimizer, with_state=True)
    except Exception as error:
        return (
            f"optimizer: whether {name} can step divided parameters could not be tried out on a matrix "
            f"({type(error).__name__}: {error}); use SGD, Adam, AdamW or another optimizer that steps dense float32 "
            "matrices"
        )
    if apart:
        return (
            f"optimizer: {name} steps a parameter as a whole (its norm, rows or columns count), so parts of it would "
            "be stepped otherwise; use SGD, Adam, AdamW or another elementwise optimizer, or leave parameters whole "
            "(tensor=1, data='replicate')"
        )
    return None


def _differs_anywhere(optimizer: optim.Optimizer, with_state: bool) -> bool:
    with outside_of_dry_run(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        cells = itertools.product(optimizer.param_groups, _SIDES, (0, 1))
        return any(_differs(optimizer, group, side, dim, with_state) for group, side, dim in cells)


def _differs(optimizer: optim.Optimizer, group: dict[str, Any], side: int, dim: int, with_state: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *grads = tensors = [torch.randn(side, side, generator=generator) for _ in range(_STEPS + 1)]
    # Halves of different size, or their norms would hardly differ; in the weights otherwise than in the gradients.
    for tensor in tensors:
        tensor.narrow(dim, 0, side // 2).mul_(3.0 if tensor is start else 9.0)
    whole = _stepped(optimizer, group, start, grads, with_state)
    parts = zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True)
    halves = [_stepped(optimizer, group, part, list(grads), with_state) for part, *grads in parts]
    return not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: optim.Optimizer, group: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor], with_state: bool
) -> torch.Tensor:
    """`start` after a step with each of `grads`, by a copy of `optimizer` that has the settings of `group`."""
    param = nn.Parameter(start.clone())
    settings = {
        "lr": 0.1,  # may be 0 at the start of a warm-up, where nothing would be seen
        "capturable": False,  # computes the same, and refuses parameters on the CPU
    }
    known = {name: value for name, value in settings.items() if name in group}
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), [{**group, **known, "params": [param]}]
    for name, value in vars(optimizer).items():  # settings that an optimizer keeps beside its groups
        if isinstance(value, (bool, int, float, str)):
            vars(trial).setdefault(name, value)
    if with_state:
        trial.state[param] = _state_like(optimizer, group, param)
    for grad in grads:
        param.grad = grad.clone()
        type(optimizer).step(trial)  # not the instance's: a scheduler may have wrapped it
    return param.detach()


def _state_like(optimizer: optim.Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """State for `param`, with the first numbers of that of a parameter of `group`."""
    given = next((p for p in group["params"] if p in optimizer.state and p.dim()), param)  # of a scalar all look alike

    def fit(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        fits = value.dim() > 0 and value.shape == given.shape
        return torch.full_like(param, value.flatten()[0].item()) if fits else value.detach().clone()

    return {name: fit(value) for name, value in optimizer.state.get(given, {}).items()}
