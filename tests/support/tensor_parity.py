"""A divided model beside its whole copy, on all ranks of a launch: outputs, and the weights after one update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError
from tests.support.ranks import here, rank_device

Plan = str | Mapping[str, str]


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """A weight takes its whole gradient; one without a gradient stays, one with a gradient of zero decays."""
    return torch.optim.SGD(params, lr=1.0, weight_decay=0.5)


def divide(model, plan: Plan = "auto", sequence_parallel=False, optimizer=None, **config: Any) -> halfmesh.Engine:
    """An engine whose layers are divided over all ranks."""
    tensor = {"size": dist.get_world_size(), "plan": plan, "sequence_parallel": sequence_parallel}
    config |= {"parallel": {"tensor": tensor}}
    return halfmesh.initialize(model, optimizer or make_optimizer, config=config, device=rank_device())


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest number of `b`."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30) if b.numel() else 0.0


def scalar(output: torch.Tensor) -> torch.Tensor:
    """A loss with another gradient for each element of `output`."""
    return (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)).sum()


def random(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Equal on all ranks."""
    return here(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def rng_state() -> torch.Tensor:
    """Of the generator from which modules on this rank's device draw."""
    return torch.cuda.get_rng_state() if rank_device().type == "cuda" else torch.get_rng_state()


def rejection(call: Callable[[], Any]) -> str:
    """The message that `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rejected(model: nn.Module, plan: Plan = "auto", sequence_parallel: bool = False, size: int = 2) -> str:
    """Why a model cannot be divided over `size` ranks; found by the first of them, before it looks for the others."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "localhost"}
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    tensor = {"size": size, "plan": plan, "sequence_parallel": sequence_parallel}
    config = {"parallel": {"tensor": tensor}, "timeout": 1.0}
    with mock.patch.dict("os.environ", place), pytest.raises(IncompatibleConfigError) as caught:
        halfmesh.initialize(model, make_optimizer, config=config, device="cpu")
    return str(caught.value)
