"""fsdp's parts in host memory, beside the same on the GPUs. Needs two of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from halfmesh.distributed.local_ranks import free_port
from tests.parallel.sharding.runs import Odd, take_step
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def make_engine(rank, offload):
    model = Odd()
    data = {"strategy": "fsdp", "cpu_offload": offload}
    return halfmesh.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda output, y: nn.functional.cross_entropy(output, y.to(output.device)),
        config={"parallel": {"data": data}, "clip_grad_norm": 0.05},
        device=f"cuda:{rank}",
    )


def trains_alike(rank, world_size, port):
    torch.cuda.set_device(rank)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=world_size)
    norms, states = [], []
    for offload in (True, False):
        engine = make_engine(rank, offload)
        engine.model.register_forward_pre_hook(lambda _, args: tuple(arg.cuda() for arg in args))
        norms.append([take_step(engine, rank, step).grad_norm for step in range(3)])
        if offload:
            tensors = [*engine.model.parameters(), *engine.model.buffers()]
            parts, rest = ({t.device.type for t in tensors if isinstance(t, DTensor) == is_part} for is_part in (1, 0))
        full = engine.full_state_dict(optimizer=True, rank0_only=False)
        states.append((full["model"], full["optimizer"]["state"]))
        engine.close()
    torch.testing.assert_close(*states, rtol=0, atol=1e-5, check_device=False)
    dist.destroy_process_group()
    return *norms, parts, rest


def test_trains_as_on_the_gpu():
    for ours, theirs, parts, rest in run_ranks(trains_alike, 2, free_port(), init=False, timeout=300):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert (parts, rest) == ({"cpu"}, {"cuda"})
