"""cpu_offload: fsdp's parts are in host memory. On a CPU they are there anyway, and nothing may change.

What a GPU shows is in tests/gpu; how updates keep to two devices is in tests/amp/test_two_devices.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import halfmesh
from tests.support.ranks import run_ranks
from tests.support.sharding import MODES, differences, make_engine, train, whole

pytestmark = [pytest.mark.distributed, pytest.mark.on_cpu("what a GPU shows of cpu_offload is in tests/gpu")]
CASES = {
    "clipped": ("adamw", "fp32", {"clip_grad_norm": 0.05}),
    "with state": ("adamw", "naive_bf16", {"warm": 2}),
    "deferred": ("adamw", "fp32", {}),
}


def deferred():
    torch.manual_seed(0)  # engines leave the ranks with different ones
    with halfmesh.deferred_init():
        return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 4))


def trains_alike(rank, world_size):
    """How a run with offloading and one without differ, and what was said."""
    found, lines = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("halfmesh").addHandler(handler)
    for name, (optimizer, mode, options) in CASES.items():
        runs = []
        for offload in (True, False):
            data = {"strategy": "fsdp", "cpu_offload": offload}
            model = deferred() if name == "deferred" else None
            with pytest.MonkeyPatch.context() as patch:
                given, init = [], CPUOffloadPolicy.__init__
                patch.setattr(CPUOffloadPolicy, "__init__", lambda *a, g=given, f=init, **k: g.append(a) or f(*a, **k))
                engine = make_engine(data, optimizer, model=model, **MODES[mode], **options)
            assert bool(given) == offload, "torch is told"
            runs.append((train(engine, rank, steps=3), whole(engine)))
        (ours, weights), (theirs, other) = runs
        found[name] = max(differences(weights, other).values()), ours == theirs
    return found, lines


def test_trains_as_without():
    results = run_ranks(trains_alike, 2, timeout=90)
    assert all(found == dict.fromkeys(CASES, (0.0, True)) for found, _ in results)
    lines = results[0][1]
    assert any("sharded in host memory over 2 data ranks (fsdp)" in line for line in lines)
