"""What counts as under way while a rank computes."""

import torch
import torch.distributed as dist

from benchmarks.harness import Result, Row
from benchmarks.overlap import ROWS, Order, Overlap, table
from halfmesh import torch_private

LARGE, SMALL = 2048, 8
"""Elements; few are numbers that ranks tell each other."""


def test_what_is_early():
    square, param = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones(2)
    with torch_private.fake_world(0, 2), Order() as order:
        dist.all_gather_into_tensor(torch.empty(2 * LARGE), torch.ones(LARGE))  # of a forward
        _ = square @ square
        dist.reduce_scatter_tensor(torch.empty(LARGE), torch.ones(2 * LARGE))
        dist.all_reduce(torch.ones(SMALL))
        _ = square @ square
        dist.all_reduce(torch.ones(3 * LARGE))
        optimizer.step()
        dist.all_gather_into_tensor(torch.empty(2 * LARGE), torch.ones(LARGE))
        optimizer.step()
        dist.all_gather_into_tensor(torch.empty(4 * LARGE), torch.ones(2 * LARGE))
    assert order.count() == Overlap(
        reduced=5 * LARGE * 4, reduced_early=2 * LARGE * 4, gathered=6 * LARGE * 4, gathered_early=2 * LARGE * 4
    )


def test_the_table():
    overlaps = [Overlap(2**20, 2**19, 0, 0)] * len(ROWS)
    lines = table(overlaps, None).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[2] == f"| {ROWS[0][0]} | 1.0 MiB | 0.5 MiB, 50% | 0.0 MiB | - |"
    rows = [
        Row(name, wall=[2.0, 2.0, 2.0] if number == 0 else [1.0, 1.0, 1.0]) for number, (name, _) in enumerate(ROWS)
    ]
    timed = table(overlaps, Result("overlap", "", "fp32", rows)).splitlines()
    assert timed[2].endswith("| - | 1.000 [1.000, 1.000] |")
    assert timed[3].endswith("| - | 0.500 [0.500, 0.500] |")
