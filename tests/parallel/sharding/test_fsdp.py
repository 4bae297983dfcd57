"""fsdp: what FSDP2 shards, how whole weights come in, and what is sent; with one data rank, too."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from halfmesh.utils.torch_private import ALL_GATHER, REDUCE_SCATTER
from tests.parallel.sharding.runs import Blocks, make_engine, take_step
from tests.support.models import MODES, make_data
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import run_ranks
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


def held(rank, world_size):
    """Bytes of weights, masters and state per parameter; which modules are sharded by themselves; and the groups of the
    gathers and of the sums of an update."""
    found = {}
    data = {"strategy": "fsdp", "separate_reduce_group": True}
    for mode in ("none", "naive_fp16"):
        model = Blocks(64)
        total = sum(p.numel() for p in model.parameters())
        engine = make_engine(data, model=model, **MODES[mode])
        with (
            patch.object(dist, ALL_GATHER, wraps=getattr(dist, ALL_GATHER)) as gather,
            patch.object(dist, REDUCE_SCATTER, wraps=getattr(dist, REDUCE_SCATTER)) as scatter,
        ):
            take_step(engine, rank, 0)
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert all(p.grad is None for p in engine.model.parameters())
        tensors = [param.detach().to_local() for param in engine.model.parameters()] + list(engine.master_params())
        tensors += [v for state in engine.optimizer.state.values() for n, v in state.items() if n != "step"]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        units = [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]
        groups = [{call.kwargs["group"].group_name for call in calls.mock_calls} for calls in (gather, scatter)]
        found[mode] = sum(storages.values()) / total, units, groups
    return found


@pytest.mark.promise("optimizer state sharding")
def test_weights_and_state_are_one_part_of_it():
    """16 bytes a parameter / ranks: an fp32 weight, which is the master, and the three moments of amsgrad. Gradients
    are summed in a separate group."""
    for found in run_ranks(held, 2):
        for bytes_held, units, (gathers, sums) in found.values():
            assert len(gathers) == len(sums) == 1
            assert gathers != sums
            assert bytes_held == pytest.approx(16 / 2, rel=0.02)
            assert units == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def ranks_of_a_copy(rank, world_size):
    param = make_engine({"strategy": "fsdp", "hybrid": 2}, model=Blocks()).model.end.weight
    return len(param.to_local()), dist.get_process_group_ranks(param.device_mesh.get_group(1))


def test_of_a_hybrid_each_group_of_neighbours_has_a_copy():
    assert run_ranks(ranks_of_a_copy, 4) == [(2, [0, 1])] * 2 + [(2, [2, 3])] * 2


def gathers_in_a_pipeline(rank, world_size):
    """By `reshard_after_forward`: the all-gathers of each batch, in cycles of two; and whether weights are shards after
    it."""
    config, found = pipe(microbatches=4, schedule="1f1b") | {"gradient_accumulation": 2}, {None: [], True: []}
    for reshards, batches in found.items():
        config["parallel"]["data"] = {"strategy": "fsdp", "reshard_after_forward": reshards}
        layers = nn.Linear(8, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)
        engine = make(config, nn.Sequential(*layers))
        for _ in range(4):
            with patch.object(dist, ALL_GATHER, wraps=getattr(dist, ALL_GATHER)) as gather:
                step(engine, *make_data(8))
            batches.append((gather.call_count, all(isinstance(param, DTensor) for param in engine.model.parameters())))
        engine.close()
    return found


@pytest.mark.sends
def test_in_a_pipeline_a_unit_is_gathered_once_for_a_batch():
    """There are two linear layers in each stage."""
    for found in run_ranks(gathers_in_a_pipeline, 4):
        assert found[None][1:] == [(2, True)] * 3
        assert found[True][1:] == [(2 * 2 * 4, True)] * 3, "before each forward and backward"


@pytest.mark.parametrize("offload", [False, True])
def test_one_process_shards_and_resumes_as_with_whole_weights(offload, tmp_path):
    found = []
    for data in ({"strategy": "fsdp", "cpu_offload": offload}, {"strategy": "replicate"}):
        first = make_engine(data, model=Blocks())
        for number in range(2):
            take_step(first, 0, number)
        if data["strategy"] == "fsdp":
            assert all(isinstance(param, DTensor) for param in first.model.parameters())
            where = " in host memory" if offload else ""
            assert f"weights sharded{where} over 1 data rank (fsdp)" in str(first.plan)
        first.save(tmp_path / data["strategy"])
        first.close()
        second = make_engine(data, model=Blocks())
        second.load(tmp_path / data["strategy"])
        for number in range(2, 4):
            take_step(second, 0, number)
        found.append(close_whole(second))
    assert not dist.is_initialized()
    torch.testing.assert_close(*found)
