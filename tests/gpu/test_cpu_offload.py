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
from tests.support.checkpoint_runs import whole_state
from tests.support.models import adamw
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_gpu(output, y):
    return nn.functional.cross_entropy(output, y.to(output.device))


def trains_alike(rank, world_size, port):
    torch.cuda.set_device(rank)
    address = f"tcp://localhost:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=world_size)
    runs = []
    for offload in (True, False):
        config = {"parallel": {"data": {"strategy": "fsdp", "cpu_offload": offload}}, "clip_grad_norm": 0.05}
        engine = halfmesh.initialize(Odd(), adamw, on_gpu, config=config, device=f"cuda:{rank}")
        engine.model.register_forward_pre_hook(lambda _, args: tuple(arg.cuda() for arg in args))
        norms = [take_step(engine, rank, step).grad_norm for step in range(3)]
        tensors = [*engine.model.parameters(), *engine.model.buffers()]
        places = [{t.device.type for t in tensors if isinstance(t, DTensor) == is_part} for is_part in (True, False)]
        runs.append((norms, places, {name: value.cpu() for name, value in whole_state(engine).items()}))
    dist.destroy_process_group()
    return runs


def test_trains_as_on_the_gpu():
    for ours, theirs in run_ranks(trains_alike, 2, free_port(), init=False, timeout=300):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert (ours[1], theirs[1]) == ([{"cpu"}, {"cuda"}], [{"cuda"}, {"cuda"}])
        torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=1e-5)
