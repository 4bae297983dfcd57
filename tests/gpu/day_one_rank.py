"""Step 6 of `day.py`: NCCL with one rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import settle

if TYPE_CHECKING:
    from .day import Page

COLLECTIVES_FAILURE = "a case that raises or changes what one rank sends to itself, and a process that does not end "
COLLECTIVES_FAILURE += "with status 0 within the time."


def one_rank(page: Page) -> None:
    page.columns = ["with one rank over NCCL", "result"]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=run_one_rank, args=(str(page.device), f"{folder}/store", theirs))
        process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while mine.poll(page.left):
                name, error = mine.recv()
                page.add(name, error or "ok")
                if error:
                    page.fail(f"{name}: {error}")
        process.join(20)
        status = process.exitcode
        if status is None:
            process.kill()
    page.add("end of the process", f"status {status}")
    if status != 0:
        page.fail(f"the process ended with status {status}")


def run_one_rank(device: str, store: str, results: Any) -> None:
    place = torch.device(device)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
    bound = place if backend == "nccl" else None
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1, device_id=bound)
    for name, case in one_rank_cases(place).items():
        try:
            case()
            settle()
            results.send((name, ""))
        except Exception as error:
            results.send((name, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))
    dist.destroy_process_group()
    results.close()


def one_rank_cases(place: torch.device) -> dict[str, Callable[[], None]]:
    def same(send: Callable[[torch.Tensor, torch.Tensor], Any], dtype: torch.dtype) -> None:
        given = torch.arange(8, device=place).to(dtype)
        got = torch.zeros_like(given)
        send(got, given)
        assert torch.equal(got, given), f"{got} of {given}"

    def reduce(got: torch.Tensor, given: torch.Tensor) -> None:
        got.copy_(given)
        dist.all_reduce(got, async_op=True).wait()

    def broadcast(got: torch.Tensor, given: torch.Tensor) -> None:
        got.copy_(given)
        dist.broadcast(got, 0)

    def objects() -> None:
        found: list[Any] = [None]
        dist.all_gather_object(found, {"rank": 0})
        sent = ["text"]
        dist.broadcast_object_list(sent, 0, device=place)
        assert (found, sent) == ([{"rank": 0}], ["text"])

    def groups() -> None:
        for backend in (None, "gloo"):  # halfmesh makes groups of both, for tensors and for the host
            value = torch.ones(3, device=place if backend is None else "cpu")
            dist.all_reduce(value, group=dist.new_group([0], backend=backend))
            assert value.sum() == 3

    moves = {
        "all_reduce": (reduce, (torch.float64, torch.bfloat16)),
        "broadcast": (broadcast, (torch.bfloat16, torch.uint8)),
        "reduce_scatter_tensor": (dist.reduce_scatter_tensor, (torch.float16,)),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, (torch.bfloat16,)),
    }
    cases = {
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(same, send, dtype)
        for name, (send, dtypes) in moves.items()
        for dtype in dtypes
    }
    return {
        **cases,
        "objects": objects,
        "groups of both backends": groups,
        "Reducer": partial(reduced, place),
        "zero1's buckets": partial(sliced, place),
    }


def small_model(place: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)).to(place)


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def reduced(place: torch.device) -> None:
    """Gradients of one rank stay what they are."""
    from halfmesh.parallel.buckets import ReduceOptions
    from halfmesh.parallel.reducer import Reducer
    from halfmesh.utils.param_shard import ParamShard

    found = []
    for reduces in (False, True):
        model = small_model(place)
        shards = [ParamShard(name, param) for name, param in model.named_parameters()]
        reducer = Reducer(shards, dict(model.named_buffers()), dist.group.WORLD, ReduceOptions()) if reduces else None
        if reducer is not None:
            reducer.open(last=True)
        model(torch.ones(4, 8, device=place)).square().sum().backward()
        if reducer is not None:
            reducer.finish()
        found.append(grads_of(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@torch.no_grad()
def sliced(place: torch.device) -> None:
    """What one rank gathers is all of it; it scatters to nobody."""
    from halfmesh.parallel.sharding.zero1 import SliceBucket
    from halfmesh.utils.param_shard import ParamShard

    model = small_model(place)
    shards = [ParamShard(n, p) for n, p in model.named_parameters()]
    bucket = SliceBucket(shards, torch.float32, dist.group.WORLD, (), Counter())
    with torch.enable_grad():
        model(torch.ones(4, 8, device=place)).square().sum().backward()
    expected = grads_of(model)
    bucket.start(bucket.pack()).wait()
    bucket.assign_grads(bucket.sent, ())
    found = [part.param.grad for part in bucket.slices]
    assert all(torch.equal(one.flatten(), other) for one, other in zip(expected, found, strict=True))
    work, flat = bucket.gather([part.param for part in bucket.slices])
    work.wait()
    assert all(torch.equal(p, view) for p, view in zip(model.parameters(), bucket.views(flat), strict=True))
