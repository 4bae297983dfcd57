"""fsdp's parts in host memory, beside the same on the GPUs. Needs two of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from halfmesh.distributed.local_ranks import free_port
from tests.parallel.sharding.runs import MODES, Odd, differences, train, whole
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def make_engine(rank, mode, offload):
    model = Odd()
    data = {"strategy": "fsdp", "cpu_offload": offload}
    return halfmesh.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda output, y: nn.functional.cross_entropy(output, y.to(output.device)),
        config={"parallel": {"data": data}, "clip_grad_norm": 0.05, **MODES[mode]},
        device=f"cuda:{rank}",
    )


def trains_alike(rank, world_size, port):
    torch.cuda.set_device(rank)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=world_size)
    runs = []
    for offload in (True, False):
        engine = make_engine(rank, "fp32", offload)
        engine.model.register_forward_pre_hook(lambda _, args: tuple(arg.cuda() for arg in args))
        norms = [result[0] for result in train(engine, rank, steps=3)]
        if offload:
            tensors = [*engine.model.parameters(), *engine.model.buffers()]
            parts, rest = ({t.device.type for t in tensors if isinstance(t, DTensor) == is_part} for is_part in (1, 0))
        runs.append((norms, whole(engine)))
    (ours, weights), (theirs, other) = runs
    other = [{n: t.cpu() for n, t in other[0].items()}, _on_host(other[1]), other[2]]
    dist.destroy_process_group()
    return max(differences(weights, other).values()), ours, theirs, parts, rest


def _on_host(state):
    return {n: {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for n, s in state.items()}


def test_trains_as_on_the_gpu():
    for difference, ours, theirs, parts, rest in run_ranks(trains_alike, 2, free_port(), init=False, timeout=300):
        assert difference <= 1e-5
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert (parts, rest) == ({"cpu"}, {"cuda"})
