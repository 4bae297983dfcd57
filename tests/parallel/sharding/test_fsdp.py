"""fsdp: what FSDP2 shards, how whole weights come in, and what is sent."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import halfmesh
from halfmesh.utils.torch_private import ALL_GATHER, REDUCE_SCATTER
from halfmesh.verify.models import mixture
from tests.parallel.sharding.runs import MODES, Blocks, make_engine, take_step
from tests.support.models import make_data
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import rank_device, run_ranks

pytestmark = pytest.mark.distributed


def local(param):
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def units_of(engine):
    return [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]


def held(rank, world_size):
    """Bytes of weights, masters and state per parameter; and which modules are sharded by themselves."""
    found = {}
    for mode in ("fp32", "naive_fp16"):
        model = Blocks(64)
        total = sum(p.numel() for p in model.parameters())
        engine = make_engine("fsdp", model=model, **MODES[mode])
        take_step(engine, rank, 0)
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        assert all(p.grad is None for p in engine.model.parameters())
        tensors = [local(param) for param in engine.model.parameters()] + list(engine.master_params())
        tensors += [v for state in engine.optimizer.state.values() for n, v in state.items() if n != "step"]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[mode] = sum(storages.values()) / total, units_of(engine)
        engine.close()
    return found


@pytest.mark.promise("optimizer state sharding")
def test_weights_and_state_are_one_part_of_it():
    """16 bytes a parameter / ranks: an fp32 weight, which is the master, and the three moments of amsgrad."""
    for found in run_ranks(held, 2):
        for bytes_held, units in found.values():
            assert bytes_held == pytest.approx(16 / 2, rel=0.02)
            assert units == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def groups(rank, world_size):
    """Over how many ranks each parameter is sharded; and the shape of a part of a hybrid."""
    config = {"parallel": {"data": "fsdp", "expert": 2}}
    engine = halfmesh.initialize(mixture()[0], torch.optim.SGD, config=config, device=rank_device())
    sizes = {name: param.device_mesh.size() for name, param in engine.model.named_parameters()}
    engine.close()
    engine = make_engine({"strategy": "fsdp", "hybrid": 2}, model=Blocks())
    return sizes, local(engine.model.end.weight).shape


def test_ranks_that_share_units():
    """Experts are sharded over the ranks that hold the same ones; of a hybrid there are two copies."""
    for ranks, part in run_ranks(groups, 4):
        assert ranks == {name: 2 if ".experts." in name else 4 for name in ranks}
        assert part == (2, 32)


def gathers_in_a_pipeline(rank, world_size):
    """By `reshard_after_forward`, the all-gathers of each batch, in cycles of two; and whether weights are shards after
    it."""
    found = {}
    for reshards in (None, False, True):
        config = pipe(microbatches=4, schedule="1f1b")
        config["parallel"]["data"] = {"strategy": "fsdp", "reshard_after_forward": reshards}
        layers = nn.Linear(8, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)
        engine = make(config | {"gradient_accumulation": 2}, nn.Sequential(*layers))
        found[reshards] = []
        with patch.object(dist, ALL_GATHER, wraps=getattr(dist, ALL_GATHER)) as gather:
            for _ in range(4):
                gather.reset_mock()
                step(engine, *make_data(8))
                is_freed = all(isinstance(param, DTensor) for param in engine.model.parameters())
                found[reshards].append((gather.call_count, is_freed))
        engine.close()
    return found


@pytest.mark.sends
def test_in_a_pipeline_a_unit_is_gathered_once_for_a_batch():
    """There are two linear layers in each stage."""
    for found in run_ranks(gathers_in_a_pipeline, 4):
        for reshards, times in ((None, 1), (False, 1), (True, 2 * 4)):
            assert found[reshards][1:] == [(2 * times, True)] * 3, reshards


def sums_apart(rank, world_size):
    """The groups of the gathers and of the sums of an update."""
    engine = make_engine({"strategy": "fsdp", "separate_reduce_group": True})
    found = []
    with (
        patch.object(dist, ALL_GATHER, wraps=getattr(dist, ALL_GATHER)) as gather,
        patch.object(dist, REDUCE_SCATTER, wraps=getattr(dist, REDUCE_SCATTER)) as scatter,
    ):
        take_step(engine, rank, 0)
        for calls in (gather, scatter):
            found.append({call.kwargs["group"].group_name for call in calls.mock_calls})
    engine.close()
    return found


def test_gradients_are_summed_in_a_group_of_their_own():
    for gathers, sums in run_ranks(sums_apart, 2):
        assert len(gathers) == len(sums) == 1
        assert gathers != sums
