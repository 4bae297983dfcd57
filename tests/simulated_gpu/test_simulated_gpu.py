"""What the simulated GPUs reject, as real ones do: without it, the tests that run on them would show nothing."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import here, ranks_on, run_ranks

pytestmark = pytest.mark.skipif("SIMULATED_GPU" not in os.environ, reason="needs make simulated-gpu")


def test_tensors_of_host_and_device_do_not_mix_and_a_read_by_the_host_can_be_an_error():
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).device == torch.device("cuda", 0)
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for read in (value.item, value.cpu, lambda: value == 1 and None):
            with pytest.raises(RuntimeError, match="waits for the device"):
                read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
