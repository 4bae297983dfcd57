"""What a rank sends in an update: collectives and the numbers in them, in each layout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfmesh
from tests.counts.test_walk import update
from tests.support.models import adamw
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.distributed

BLOCKS, TENSORS, OF_A_BLOCK = 4, 16, 280
NUMBERS = BLOCKS * OF_A_BLOCK
"""Of all parameters."""
PADDED = NUMBERS + 32
"""So that each of two ranks has a multiple of 32."""
ACTIVATION = 8 * 8
CLIPPED = {"gradient_accumulation": 2, "clip_grad_norm": 1.0}
TENSOR = {"tensor": {"size": 2, "plan": {"*.up": "colwise", "*.down": "rowwise"}}}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}
NORM = {"all_reduce float64": (1, 1)}
"""With the verdict, where there is one."""


class Sent(TorchDispatchMode):
    """Counts within: calls and numbers by kind and dtype. Of a scatter or gather, the whole counts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = func._schema.name.partition("::")
        if room in ("c10d", "_c10d_functional") and not name.startswith(("recv", "wait")):
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            name = name.strip("_").removesuffix("_base")
            kind = NAMES.get(name, name)
            key = f"{kind} {str(tensors[0].dtype).removeprefix('torch.')}"
            calls, numbers = self.found[key]
            self.found[key] = calls + 1, numbers + max(each.numel() for each in tensors)
        return func(*args, **(kwargs or {}))


NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def sent_in_an_update(rank: int, world_size: int, config: Any) -> dict[str, tuple[int, int]]:
    """Of the fourth: in the first ones ranks also compare what users may get wrong."""
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    engine = halfmesh.initialize(model, adamw, nn.MSELoss(), config=config | {"fused": False}, device=rank_device())
    batch = here(torch.randn(8, 8))
    for _ in range(4):
        with Sent() as sent:
            update(engine, batch)
    return dict(sent.found)


FLAGS = {"all_reduce float32": (1, TENSORS)}
"""Which parameters have a gradient on some rank."""
BF16 = CLIPPED | {"bf16": {"mode": "naive"}}


def fsdp(gathers: int, reduced: str = "float32") -> dict[str, tuple[int, int]]:
    """Blocks are gathered before a forward, and again before its backward unless they are kept."""
    gathered = {"all_gather bfloat16": (gathers, gathers * OF_A_BLOCK)}
    return {**gathered, f"reduce_scatter {reduced}": (BLOCKS, NUMBERS), **FLAGS, **NORM}


def data(strategy: str, **keys: Any) -> dict[str, Any]:
    return {"parallel": {"data": {"strategy": strategy, **keys}}}


def pipeline(dtype: str) -> dict[str, tuple[int, int]]:
    """Of two batches: half an activation for each microbatch, and the loss with its sum."""
    return {f"send {dtype}": (4, 4 * ACTIVATION // 2), "broadcast float64": (2, 4), **NORM}


AUTOCAST = CLIPPED | {"bf16": {"mode": "torch"}}
OF_TENSOR, OF_FP16 = 2 * (2 * BLOCKS - 1), BLOCKS - 1
ROWS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "replicate": (CLIPPED, {"all_reduce float32": (1, NUMBERS + TENSORS), **NORM}),
    "replicate, reduced in bf16, not clipped": (
        data("replicate", reduce_dtype="bfloat16"),
        {"all_reduce bfloat16": (1, NUMBERS + TENSORS)},
    ),
    "zero1": (
        CLIPPED | data("zero1"),
        {"reduce_scatter float32": (1, PADDED), "all_gather float32": (1, PADDED), **FLAGS, **NORM},
    ),
    "fsdp": (BF16 | data("fsdp"), fsdp(4 * BLOCKS)),
    "fsdp, kept": (BF16 | data("fsdp", reshard_after_forward=False), fsdp(2 * BLOCKS)),
    "fsdp, prefetched, reduced in bf16": (
        BF16 | data("fsdp", prefetch=2, reduce_dtype="bfloat16"),
        fsdp(4 * BLOCKS, "bfloat16"),
    ),
    "tensor": (
        CLIPPED | {"parallel": TENSOR},
        # an output of each block, and the gradient of each input but the first, in two batches
        {"all_reduce float32": (OF_TENSOR, OF_TENSOR * ACTIVATION), **NORM},
    ),
    "tensor, autocast": (
        # sums of products in fp16; a residual's gradient is in fp32
        {"fp16": {"mode": "torch"}, "clip_grad_norm": 1.0, "parallel": TENSOR},
        {
            "all_reduce float16": (BLOCKS, BLOCKS * ACTIVATION),
            "all_reduce float32": (OF_FP16, OF_FP16 * ACTIVATION),
            **NORM,
        },
    ),
    "pipeline, bf16": (BF16 | {"parallel": PIPELINE}, pipeline("bfloat16")),
    # a residual is in fp32
    "pipeline, autocast": (AUTOCAST | {"parallel": PIPELINE}, pipeline("float32")),
    "pipeline, autocast, sent in its dtype": (
        AUTOCAST | {"parallel": {"pipeline": PIPELINE["pipeline"] | {"send_dtype": "compute"}}},
        pipeline("bfloat16"),
    ),
}


@pytest.mark.promise("DDP, with accumulation and `no_sync`")
@pytest.mark.promise("FSDP mixed precision", "dtypes from the mode", of="PyTorch", page="sharding.md")
@pytest.mark.parametrize("name", ROWS)
def test_what_is_sent_in_an_update(name):
    config, expected = ROWS[name]
    assert run_ranks(sent_in_an_update, 2, config) == [expected] * 2
