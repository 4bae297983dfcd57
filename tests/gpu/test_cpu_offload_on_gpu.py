"""fsdp's parts in host memory, beside the same on the GPUs. Needs two of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from halfmesh.distributed.local_ranks import free_port
from tests.support.ranks import run_ranks
from tests.support.sharding import MODES, Odd, differences, train, whole

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
    found = {}
    for mode in MODES:
        runs, places = [], {}
        for offload in (True, False):
            engine = make_engine(rank, mode, offload)
            engine.model.register_forward_pre_hook(lambda _, args: tuple(arg.cuda() for arg in args))
            results = train(engine, rank, steps=3)
            if offload:
                tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
                states = [v for state in engine.optimizer.state.values() for n, v in state.items() if n != "step"]
                places = {
                    "parts": {t.device.type for _, t in tensors if isinstance(t, DTensor)},
                    "rest": {t.device.type for _, t in tensors if not isinstance(t, DTensor)},
                    "state": {value.device.type for value in states},
                }
            runs.append((results, whole(engine)))
        (ours, weights), (theirs, other) = runs
        other = [{n: t.cpu() for n, t in other[0].items()}, _on_host(other[1]), other[2]]
        norms = max(abs(mine[0] / its[0] - 1) for mine, its in zip(ours, theirs, strict=True))
        found[mode] = max(differences(weights, other).values()), norms, places
    dist.destroy_process_group()
    return found


def _on_host(state):
    return {n: {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for n, s in state.items()}


def test_trains_as_on_the_gpu():
    for found in run_ranks(trains_alike, 2, free_port(), init=False, timeout=300):
        for mode, (difference, norm, places) in found.items():
            assert difference <= (1e-5 if mode == "fp32" else 2e-3), mode
            assert norm <= (1e-5 if mode == "fp32" else 2e-3), mode
            assert places == {"parts": {"cpu"}, "rest": {"cuda"}, "state": {"cpu", "cuda"}}
