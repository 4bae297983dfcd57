"""How many bytes of a step a rank has sent before it is done computing: counts, the same in each run.

python -m benchmarks.overlap
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import Setup, make_halfmesh
from .counts import tensor_bytes
from .harness import on_ranks
from .machine import publish, table
from .works import Work

WIDTH, DEPTH = 1024, 16
"""64 MiB of weights: more than two buckets of 25 MiB."""
WORK = Work(
    f"{DEPTH} linear layers of {WIDTH} features",
    lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))),
    lambda: (torch.randn(64, WIDTH), torch.randn(64, WIDTH)),
    nn.functional.mse_loss,
)
COLUMNS = (
    "",
    "gradients, of them before backward's last product",
    "new weights, of them before the update's last part",
)
ROWS = [("zero1", 5.0), ("zero1", 25.0), ("replicate", 25.0)]
"""Strategies, and the size of a bucket in MiB."""

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
STEPS = ("aten::_fused_adam",)
REDUCING = ("allreduce", "_reduce_scatter_base", "reduce_scatter")
GATHERING = ("_allgather_base", "allgather", "broadcast")
TOLD = 4096
"""Collectives of at most so many bytes are norms and flags, not gradients or weights."""


class Order(TorchDispatchMode):
    """In which order a rank computes and sends. (On a CPU backward runs in the thread that calls it.)"""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        operation = name.partition("::")[2]
        if name.startswith(PRODUCTS):
            self._events.append(("product", 0))
        elif name.startswith(STEPS):
            self._events.append(("step", 0))
        elif name.startswith("c10d::") and operation.startswith((*REDUCING, *GATHERING)):
            kind = "reduce" if operation.startswith(REDUCING) else "gather"
            size = tensor_bytes(args[1] if operation == "_reduce_scatter_base_" else args[0])
            self._events += [(kind, size)] if size > TOLD else []
        return func(*args, **(kwargs or {}))

    def share_before(self, kind: str, end: str) -> tuple[int, float]:
        """Bytes sent, and which part of them before the last `end`."""
        last = max(place for place, (name, _) in enumerate(self._events) if name == end)
        sizes = [(size, place < last) for place, (name, size) in enumerate(self._events) if name == kind]
        total = sum(size for size, _ in sizes)
        return total, sum(size for size, early in sizes if early) / max(1, total)


def measure() -> list[list[str]]:
    """The rows of the table, on one rank."""
    rows = []
    for strategy, bucket_mb in ROWS:
        data = {"strategy": strategy, "bucket_mb": bucket_mb}
        setup = Setup.of(WORK, "fp32", seed=torch.distributed.get_rank())
        contender = make_halfmesh(setup, parallel={"data": data})
        contender.run(2)  # the first step makes the optimizer's state
        with Order() as order:
            contender.run(1)
        cells = []
        for kind, end in (("reduce", "product"), ("gather", "step")):
            total, early = order.share_before(kind, end)
            cells.append(f"{total / 2**20:.1f} MiB, {early:.0%}" if total else "none")
        rows.append([f"`{strategy}`, buckets of {bucket_mb:g} MiB", *cells])
    return rows


if __name__ == "__main__":
    publish(None, table(COLUMNS, on_ranks(2, measure)[0]))
