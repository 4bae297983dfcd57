"""Where ranks of tests can run: what is skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.support import ranks


@pytest.mark.parametrize(
    ("place", "gpus", "world_size", "sends", "expected"),
    [
        ("gloo-cpu", 0, 8, True, ""),
        ("gloo-cuda", 0, 2, False, "gloo-cuda: no CUDA device"),
        ("gloo-cuda", 1, 8, False, ""),
        ("gloo-cuda", 1, 1, True, "gloo-cuda: gloo sends no CUDA tensors from one rank to another"),
        ("nccl-one", 2, 2, False, "nccl-one: 2 ranks, and 1 may run here"),
        ("nccl", 2, 2, True, ""),
        ("nccl", 2, 4, False, "nccl: 4 ranks, and 2 may run here"),
    ],
)
def test_where_ranks_can_run(place, gpus, world_size, sends, expected, monkeypatch):
    monkeypatch.setenv("RANKS_ON", place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks.find_obstacle(world_size, sends) == expected
    monkeypatch.setattr(ranks, "_rank", 1)
    assert ranks.rank_device() == torch.device({"gloo-cpu": "cpu", "nccl": "cuda:1"}.get(place, "cuda:0"))
    if expected and not sends:
        with pytest.raises(pytest.skip.Exception, match=expected):
            ranks.run_ranks(print, world_size)
