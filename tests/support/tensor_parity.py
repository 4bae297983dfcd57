"""A divided model beside its whole copy, in one launch of several ranks: outputs, and gradients joined again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfmesh.parallel.tensor import TensorParallel
from halfmesh.parallel.tensor_axis import TensorAxis
from halfmesh.parallel.tensor_checks import resolve
from halfmesh.shard import ParamShard

CPU = torch.device("cpu")


def make_axis() -> TensorAxis:
    """All ranks as one tensor group."""
    assert dist.group.WORLD is not None
    return TensorAxis(dist.group.WORLD, CPU)


def divide(
    model: nn.Module,
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    axis: TensorAxis | None = None,
) -> TensorParallel:
    """`model` divided over all ranks, in place. Raises ValueError with what `resolve` finds wrong."""
    axis = axis or make_axis()
    resolved, problems = resolve(model, axis.size, plan, sequence_parallel)
    if problems:
        raise ValueError("\n".join(problems))
    tensor = TensorParallel(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), resolved, axis)
    tensor.watch_calls(model)
    return tensor


def make_shards(model: nn.Module, tensor: TensorParallel, copies: int) -> list[ParamShard]:
    """As `halfmesh.division` makes them: `copies` of what is whole, on as many ranks."""
    return [ParamShard(n, p, tensor.weight(p, copies // tensor.axis.size)) for n, p in model.named_parameters()]


def join_grads(model: nn.Module, tensor: TensorParallel) -> dict[str, torch.Tensor | None]:
    """The whole gradients of a divided model, by name."""
    joined: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is not None and param in tensor.splits:
            grad = tensor.splits[param].join(tensor.axis.gathered(grad))
        elif grad is not None and param in tensor.partial:
            grad = grad.clone()
            dist.all_reduce(grad)
        joined[name] = grad
    return joined


@dataclass
class Parity:
    """How far a divided model was from the whole one: largest differences, relative to the largest number."""

    output: float
    grads: float
    missing: list[str]
    """Parameters that have a gradient in one of the two only."""


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30) if b.numel() else 0.0


def parity(
    model: nn.Module,
    call: Callable[[nn.Module], torch.Tensor],
    plan: str | Mapping[str, str] = "auto",
    sequence_parallel: bool = False,
) -> Parity:
    """Run `call(model)`, which returns the output, forward and backward, whole and divided, and compare.

    Afterwards the model is whole again, as it was.
    """
    whole = copy.deepcopy(model)
    expected = call(whole)
    _loss(expected).backward()
    before = [value.detach().clone() for value in model.parameters()]
    model.zero_grad()
    tensor = divide(model, plan, sequence_parallel)
    output = call(model)
    _loss(output).backward()
    grads = join_grads(model, tensor)
    tensor.close()
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a, b)
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in whole.named_modules()}
    differences, missing = [0.0], []
    largest = max(p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None) or 1.0
    for name, param in whole.named_parameters():
        mine = grads[name]
        if (mine is None) != (param.grad is None):
            missing.append(name)
        elif mine is not None and param.grad is not None:
            assert mine.shape == param.grad.shape, name
            differences.append((mine - param.grad).abs().max().item() / largest)
    return Parity(apart(output, expected), max(differences), missing)


def _loss(output: torch.Tensor) -> torch.Tensor:
    """A scalar with a different gradient for each element of `output`."""
    generator = torch.Generator().manual_seed(3)
    return (output * torch.randn(output.shape, generator=generator).to(output)).sum()


def random(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Equal on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def refusal(call: Callable[[], Any]) -> str:
    """The message that `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
