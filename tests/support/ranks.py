"""Run a test function on several processes, which serve all calls of a test file.

`pytest --ranks-on nccl` (or RANKS_ON in the environment) gives the ranks GPUs: see `PLACES`. So ranks make what they
make `here`, or on `rank_device()`. Marks: `sends` for tests whose ranks send to each other, as pipelines do;
`on_cpu("why")` for those that say nothing about a GPU. What cannot run where it is asked to is skipped, and says so.
"""

from __future__ import annotations

import gc
import io
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from halfmesh.distributed.env import find_process
from halfmesh.distributed.local_ranks import ENGINE, LAUNCH_VARIABLES, LocalRanks

PRELOAD = [*ENGINE, "halfmesh.parallel.sharding.zero1", "halfmesh.checkpoint.dcp", "pytest"]
"""Imported once, by the server that forks ranks; none of them starts a thread."""
PLACES = {
    "gloo-cpu": "gloo, all ranks on the CPU",
    "gloo-cuda": "gloo, all ranks on cuda:0",
    "nccl-one": "NCCL, one rank",
    "nccl": "NCCL, a GPU for each rank",
}
"""Where ranks run, and what they talk over."""
_rank: int | None = None
"""Of this process, if it is a rank."""


def ranks_on() -> str:
    """The one of `PLACES` that was chosen."""
    place = os.environ.get("RANKS_ON", "gloo-cpu")
    if place not in PLACES:
        raise ValueError(f"RANKS_ON={place!r} is none of {', '.join(PLACES)}")
    return place


def rank_device() -> Any:
    """The device of this rank; the CPU in a process that is none."""
    place = ranks_on()
    if _rank is None or place == "gloo-cpu":
        return torch.device("cpu")
    return torch.device("cuda", _rank if place == "nccl" else 0)


def here(value: Any) -> Any:
    """A module or tensors, also within lists, tuples and dicts, on this rank's device."""
    device = rank_device()
    return tree_map(lambda one: one.to(device) if isinstance(one, (torch.Tensor, torch.nn.Module)) else one, value)


def find_obstacle(world_size: int, sends: bool = False) -> str:
    """Why so many ranks cannot run where they are asked to; "" if they can. `sends`: they send to each other."""
    place = ranks_on()
    if place == "gloo-cpu":
        return ""
    found = torch.cuda.device_count()
    if not found:
        return f"{place}: no CUDA device"
    if place == "gloo-cuda":
        return "gloo-cuda: gloo sends no CUDA tensors from one rank to another" if sends else ""
    allowed = 1 if place == "nccl-one" else found
    return f"{place}: {world_size} ranks, and {allowed} may run here" if world_size > allowed else ""


def run_ranks(fn, world_size, *args, timeout=60, init=True, fresh=False, **kwargs) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` processes; return the results in order of rank.

    With `init` a process group exists during the call; without, `fn` makes its own (`free_port` helps). No launch
    variable is set. Arguments and results go through plain pickle: tensors are copied, not shared.
    `fresh` is for calls that need processes without a past, or spoil them: theirs are started and ended for this call.

    Raises:
        RankError: a rank raised, died or did not end within `timeout` seconds. All processes of the team are killed.
        Skipped: `find_obstacle` has found one.
    """
    if obstacle := find_obstacle(world_size):
        pytest.skip(obstacle)
    team = _team(world_size) if fresh else _teams.setdefault(world_size, _team(world_size))
    try:
        results = team.call(_run, (fn, args, kwargs), timeout=timeout, group=init)
    finally:
        if fresh:
            team.end()
    return [torch.load(io.BytesIO(result), "cpu", weights_only=False) for result in results]


def meet(rank: int, world_size: int, folder: str | Path) -> None:
    """Wait until all ranks are here: before a group whose time limit also limits how long they may take to start."""
    Path(folder, f"here-{rank}").touch()
    while not all(Path(folder, f"here-{other}").exists() for other in range(world_size)):
        time.sleep(0.01)


def _team(world_size: int) -> LocalRanks:
    """Ranks where they were asked to run."""
    return LocalRanks(world_size, "cuda" if ranks_on().startswith("nccl") else "cpu", PRELOAD)


_teams: dict[int, LocalRanks] = {}


def end_teams() -> None:
    """End the processes of all teams. Called when a test file is done."""
    while _teams:
        _teams.popitem()[1].end()


def _run(fn, args, kwargs) -> bytes:
    """What `fn` returns on this rank."""
    global _rank
    place = find_process()
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    _rank = place.rank
    torch.manual_seed(0)
    random.seed(0)
    device = rank_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with fp32 ones
    result = io.BytesIO()
    torch.save(fn(place.rank, place.world_size, *args, **kwargs), result)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what holds a group; ranks that wait for this one hear at once that it is gone
    return result.getvalue()
