"""Data ranks that need each other in forward evaluate sets that they do not divide: each sample is seen once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halfmesh
from halfmesh.distributed.rank_process import RankError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_data, sgd, train
from tests.support.ranks import rank_device, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


class Stream(IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        yield from zip(*make_data(self.rows), strict=True)


def evaluated(rank: int, world_size: int, parallel: Any, rows: int, kind: str) -> list[Any]:
    """The sums of a loop that counts each batch it sees, and calls the engine twice for each; twice, with an epoch of
    training between them."""
    data = TensorDataset(*make_data(rows))
    loaders = {
        "samples": lambda: DataLoader(data, 2),
        "workers": lambda: DataLoader(data, 2, num_workers=1, multiprocessing_context="fork"),
        "drop last": lambda: DataLoader(data, 2, drop_last=True),
        "batches": lambda: DataLoader(data, batch_sampler=[[i] for i in range(rows)]),
        "stream": lambda: DataLoader(Stream(rows), 1),
    }
    config = {"parallel": parallel} if world_size > 1 else {}
    engine = halfmesh.initialize(
        Net(norm=nn.LayerNorm),
        sgd,
        nn.functional.cross_entropy,
        DataLoader(TensorDataset(*make_data(8)), 8 // halfmesh.load_config(config).parallel.dims(world_size).dp),
        config,
        eval_dataloader=loaders[kind](),
        device=rank_device(),
    )
    found = []
    for _ in range(2):
        engine.eval()
        sums = torch.zeros(3, device=engine.device)
        with torch.no_grad():
            for x, y in engine.eval_dataloader:
                output, again = engine(x), engine(2 * x)
                if engine.context.counts_outputs:
                    sums += torch.stack([output.sum(), again.sum(), torch.tensor(float(len(y)))])
        found.append(engine.context.all_reduce(sums).tolist())
        engine.train()
        train(engine)
    return found


FSDP = {"data": "fsdp"}
PIPED = {**LAYOUTS["pp2"][1], **FSDP}
CELLS = [
    *((FSDP, 2, kind, rows) for kind in ("samples", "batches") for rows in (1, 5, 8)),
    *((FSDP, 2, kind, 5) for kind in ("workers", "stream")),
    (PIPED, 4, "samples", 5),
    (FSDP, 4, "samples", 3),
    (FSDP, 4, "samples", 9),
    (FSDP, 2, "drop last", 3),
]


@pytest.mark.parametrize(("parallel", "ranks", "kind", "rows"), CELLS)
def test_a_loop_sees_each_sample_once(parallel, ranks, kind, rows):
    if kind == "drop last":  # each rank drops its own
        assert [found[0][2] for found in run_ranks(evaluated, ranks, parallel, rows, kind)] == [2.0] * ranks
        return
    ((expected),) = run_ranks(evaluated, 1, parallel, rows, kind, init=False)
    assert [sums[2] for sums in expected] == [rows] * 2
    for found in run_ranks(evaluated, ranks, parallel, rows, kind):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_stream_without_a_batch_for_each_rank():
    with pytest.raises(RankError, match="this data rank has no batch to evaluate, and others have one"):
        run_ranks(evaluated, 2, FSDP, 1, "stream")
