"""What the simulated GPUs reject, as real ones do, and what they keep apart from the host."""

from __future__ import annotations

import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import here, ranks_on, run_ranks

pytestmark = pytest.mark.skipif("SIMULATED_GPU" not in os.environ, reason="needs make simulated-gpu")


def test_tensors_of_host_and_device_do_not_mix():
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).device == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_a_read_by_the_host_can_be_an_error():
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for read in (value.item, value.cpu, lambda: value == 1 and None):
            with pytest.raises(RuntimeError, match="waits for the device"):
                read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_storage_is_copied_to_the_host_as_torch_save_does():
    value = torch.arange(6, dtype=torch.float32, device="cuda")[2:]
    file = io.BytesIO()
    torch.save(value, file)
    assert torch.load(io.BytesIO(file.getvalue()), "cpu").tolist() == [2.0, 3.0, 4.0, 5.0]
    assert value.untyped_storage().cpu().nbytes() == 24


def test_its_random_numbers_are_its_own():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = nn.functional.dropout(torch.ones(64, device="cuda"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.cuda.manual_seed(0)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device="cuda")), first)


def reduce_on_host(rank, world_size):
    assert dist.get_backend() == "nccl"
    value = here(torch.ones(2))
    dist.all_reduce(value)
    with pytest.raises(RuntimeError, match="associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    return value


@pytest.mark.distributed
@pytest.mark.skipif(ranks_on() != "nccl", reason="asks about NCCL")
def test_nccl_takes_no_tensor_of_the_host():
    assert [found.tolist() for found in run_ranks(reduce_on_host, 2)] == [[2.0, 2.0]] * 2
