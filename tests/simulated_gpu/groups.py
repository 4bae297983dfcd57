"""Groups of simulated devices: gloo sends, from one rank to another from the host only, and under the
name of NCCL it rejects tensors of the host, as NCCL does."""

from __future__ import annotations

import functools
import inspect

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

CALLS = "all_reduce broadcast all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor reduce gather "
CALLS += "scatter all_to_all all_to_all_single"
PAIRS = "send recv isend irecv"
BOTH = "cpu:gloo,cuda:gloo"
ON_DEVICES = set()
"""Names of groups that take no tensors of the host."""


def is_nccl(group=None):
    return getattr(group or dist.group.WORLD, "group_name", None) in ON_DEVICES


def replace(name, make):
    value = make(getattr(distributed_c10d, name))
    for module in (distributed_c10d, dist):
        setattr(module, name, value)


def init(original):
    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        ON_DEVICES.clear()  # names are used again
        original(BOTH if backend is None or "nccl" in backend else backend, *args, **kwargs)
        if backend in (None, "nccl") and dist.group.WORLD is not None:
            ON_DEVICES.add(dist.group.WORLD.group_name)

    return init_process_group


def new(original):
    def new_group(ranks=None, timeout=None, backend=None, *args, device_id=None, **kwargs):
        as_nccl = backend == "nccl" or (backend is None and is_nccl())
        made = original(ranks, timeout, BOTH if as_nccl else backend, *args, **kwargs)
        if as_nccl and isinstance(made, dist.ProcessGroup):
            ON_DEVICES.add(made.group_name)
        return made

    return new_group


def checked(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        devices = {leaf.device.type for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}
        as_nccl = is_nccl(given.get("group"))
        if as_nccl and "cpu" in devices:
            raise RuntimeError(f"No backend type associated with device type cpu ({original.__name__})")
        if not as_nccl and "cuda" in devices and original.__name__ in PAIRS.split():
            raise RuntimeError(f"gloo sends no CUDA tensors from one rank to another ({original.__name__})")
        if as_nccl and given.get("op") == dist.ReduceOp.AVG and "input_list" not in given:
            share = 1 / dist.get_world_size(given.get("group"))  # NCCL multiplies before it sums; gloo divides after
            if "input" in given:
                given["input"] = given["input"] * share
            else:
                given["tensor"].mul_(share)
            given["op"] = dist.ReduceOp.SUM
        return original(*bound.args, **bound.kwargs)

    return call


def install():
    """Replace what in torch.distributed would look for NCCL."""
    replace("init_process_group", init)
    replace("new_group", new)
    replace("is_nccl_available", lambda _: lambda: True)
    replace("get_backend", lambda original: lambda group=None: "nccl" if is_nccl(group) else original(group))
    distributed_c10d._get_object_coll_device = lambda group=None: (
        torch.device("cuda", torch.cuda.current_device()) if is_nccl(group) else "cpu"
    )
    for name in f"{CALLS} {PAIRS}".split():
        replace(name, checked)
