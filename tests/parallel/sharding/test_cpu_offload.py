"""cpu_offload: fsdp's parts are in host memory. On a CPU they are there anyway, and nothing may change.

What a GPU shows is in tests/gpu; how updates keep to two devices is in tests/amp/test_two_devices.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import halfmesh
from halfmesh.parallel.sharding import wrap
from halfmesh.parallel.sharding.unwrap import Origin
from tests.support.ranks import run_ranks
from tests.support.sharding import MODES, differences, make_engine, take_step, train, whole

pytestmark = pytest.mark.distributed
CASES = [
    ("adamw", "fp32", {"clip_grad_norm": 0.05}),
    ("sgd", "torch_fp16", {}),
    ("unfused", "naive_fp16", {"gradient_accumulation": 2}),
    ("adamw", "naive_bf16", {"warm": 2}),
]


def trains_alike(rank, world_size):
    """What each strategy's `fully_shard` was given, how the two differ in the end, and where things are."""
    policies, found = [], {}
    inner = wrap.fully_shard
    wrap.fully_shard = lambda *args, **kwargs: policies.append(kwargs["offload_policy"]) or inner(*args, **kwargs)
    for optimizer, mode, options in CASES:
        runs = []
        for offload in (True, False):
            engine = make_engine({"strategy": "fsdp", "cpu_offload": offload}, optimizer, **MODES[mode], **options)
            results = train(engine, rank, steps=3, accumulation=options.get("gradient_accumulation", 1))
            runs.append((results, whole(engine)))
        (ours, weights), (theirs, other) = runs
        found[f"{optimizer} {mode}"] = max(differences(weights, other).values()), ours == theirs
    return found, [(type(policy), getattr(policy, "pin_memory", None)) for policy in policies]


def test_trains_as_without():
    for found, policies in run_ranks(trains_alike, 2, timeout=90):
        assert set(found.values()) == {(0.0, True)}, found
        units = len(policies) // (2 * len(CASES))
        # Without CUDA there is no memory to pin.
        assert policies == ([(CPUOffloadPolicy, False)] * units + [(OffloadPolicy, None)] * units) * len(CASES)


def stays(rank, world_size):
    """What is moved to the device, and where updates are decided."""
    engine = make_engine({"strategy": "fsdp", "cpu_offload": True})
    moved, to = set(), torch.Tensor.to
    torch.Tensor.to = lambda self, *args: moved.add(self.data_ptr()) or to(self, *args)
    engine._division.sharded.move(torch.device("cpu"))
    torch.Tensor.to = to
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    engine._division._context = SimpleNamespace(device=torch.device("cuda"))
    return {
        name for name, t in tensors if getattr(t, "_local_tensor", t).data_ptr() in moved
    }, engine._division.update_device


def test_parts_stay_when_the_model_moves():
    for moved, decided in run_ranks(stays, 2, timeout=60):
        statistics = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert moved == {"scale", "conv.weight"} | statistics
        assert decided == torch.device("cpu")


def test_close_gives_all_back_where_it_came_from(monkeypatch):
    params = [nn.Parameter(torch.full((3,), float(number))) for number in range(3)]
    optimizer = torch.optim.AdamW(params)
    optimizer.state[params[0]] = {"step": torch.tensor(1.0), "exp_avg": torch.full((3,), 5.0)}
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moved.append((self[0].item(), str(device))) or self)
    origin = Origin(nn.ParameterList(params))
    assert [device.type for device in origin._devices.values()] == ["cpu"] * 3
    origin._devices = dict(zip(params, map(torch.device, ("cuda:0", "cpu", "meta")), strict=True))
    origin.put_back(optimizer)
    assert moved == [(0.0, "cuda:0"), (5.0, "cuda:0"), (1.0, "cpu"), (2.0, "cpu")], "a deferred model came from nowhere"


def deferred(rank, world_size):
    """A model that is built without memory has its values on the host in the end."""
    runs = []
    for offload in (True, False):
        torch.manual_seed(0)  # engines leave the ranks with different ones
        with halfmesh.deferred_init():
            model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 4))
        engine = make_engine({"strategy": "fsdp", "cpu_offload": offload}, model=model)
        take_step(engine, rank, 0)
        runs.append(whole(engine))
    return max(differences(*runs).values()), {t.device.type for t in model.state_dict().values()}


def test_a_deferred_model():
    assert run_ranks(deferred, 2, timeout=60) == [(0.0, {"cpu"})] * 2


def hears(rank, world_size):
    import logging

    lines = []
    logging.getLogger("halfmesh").addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    for offload in (True, False):
        make_engine({"strategy": "fsdp", "cpu_offload": offload}).close()
    return [line for line in lines if "cpu_offload" in line], [line for line in lines if "in parts" in line]


def test_a_cpu_is_told():
    (warnings, plans), _ = run_ranks(hears, 2, timeout=60)
    assert warnings == ["[rank 0] parallel.data.cpu_offload is of no use here: weights are in host memory already"]
    assert ["in parts in host memory over 2 data ranks (fsdp)" in plan for plan in plans] == [True, False]


def test_one_process_is_told(caplog):
    make_engine({"strategy": "fsdp", "cpu_offload": True}).close()
    assert "parallel.data.cpu_offload is of no use here: one data rank holds all weights" in caplog.text
