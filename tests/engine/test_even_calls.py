"""Data ranks that need each other in forward evaluate sets that they do not divide: each sample is seen once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import make_data, sgd, train
from tests.support.ranks import rank_device, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


class Stream(IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        yield from zip(*make_data(self.rows), strict=True)


class Share(Sampler):
    """A sampler that shards itself, unevenly."""

    def __init__(self, rows: int) -> None:
        is_spread = dist.is_initialized()
        self.rank, self.num_replicas = (dist.get_rank(), dist.get_world_size()) if is_spread else (0, 1)
        self.rows = rows

    def __len__(self) -> int:
        return len(range(self.rank, self.rows, self.num_replicas))

    def __iter__(self) -> Any:
        return iter(range(self.rank, self.rows, self.num_replicas))


class Encoder(Net):
    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.first(x) * scale  # one gather, where forward makes several


def make_engine(world_size: int, parallel: Any, rows: int, kind: str) -> halfmesh.Engine:
    data = TensorDataset(*make_data(rows))
    loaders = {
        "samples": lambda: DataLoader(data, 2),
        "drop last": lambda: DataLoader(data, 2, drop_last=True),
        "batches": lambda: DataLoader(data, batch_sampler=[[i] for i in range(rows)]),
        "stream": lambda: DataLoader(Stream(rows), 1),
        "own share": lambda: DataLoader(data, 1, sampler=Share(rows)),
    }
    config = {"parallel": parallel} if world_size > 1 else {}
    torch.manual_seed(0)
    return halfmesh.initialize(
        Encoder(norm=nn.LayerNorm),
        sgd,
        nn.functional.cross_entropy,
        DataLoader(TensorDataset(*make_data(8)), 8 // halfmesh.load_config(config).parallel.dims(world_size).dp),
        config,
        eval_dataloader=loaders[kind](),
        device=rank_device(),
    )


def evaluated(rank: int, world_size: int, cells: Any) -> list[list[list[float]]]:
    """By cell the sums of a loop that counts each batch it sees, and calls the engine and another method for each;
    twice, with an epoch of training between them."""
    found = []
    for number, (parallel, kind, rows) in enumerate(cells):
        engine, by_epoch = make_engine(world_size, parallel, rows, kind), []
        for _ in range(2):
            engine.eval()
            sums = torch.zeros(3, device=engine.device)
            for x, y in engine.eval_dataloader:
                with torch.set_grad_enabled(number == 0):  # not around the loop: the repeated calls need the same
                    output = engine(x)
                    again = engine(2 * x) if "pipeline" in parallel else engine.call("encode", x, scale=2.0)
                if engine.context.counts_outputs:
                    sums += torch.tensor([output.sum().item(), again.sum().item(), len(y)]).to(sums)
            by_epoch.append(engine.context.all_reduce(sums).tolist())
            engine.train()
            train(engine)
        found.append(by_epoch)
        engine.close()
    return found


FSDP = {"data": "fsdp"}
PIPED = {**LAYOUTS["pp2"][1], **FSDP}
CELLS: dict[int, list[tuple[dict[str, Any], str, int]]] = {
    2: [(FSDP, kind, rows) for kind, rows in (("samples", 5), ("batches", 8), ("stream", 5), ("own share", 5))],
    4: [(PIPED, "samples", 5), (FSDP, "samples", 9)],
}


@pytest.mark.parametrize("ranks", CELLS)
def test_a_loop_sees_each_sample_once(ranks):
    expected = evaluated(0, 1, CELLS[ranks])
    assert [[sums[2] for sums in cell] for cell in expected] == [[rows] * 2 for _, _, rows in CELLS[ranks]]
    for found in run_ranks(evaluated, ranks, CELLS[ranks]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def limits(rank: int, world_size: int) -> tuple[int, int, float]:
    """A loader without a batch for some rank is rejected on all, who can train afterwards; not where ranks do not meet.
    With drop_last each rank drops its own. And batches that are
    not evaluated need no calls, nor does an iterator that is kept."""
    for kind, rows in (("samples", 1), ("drop last", 3)):
        engine = make_engine(world_size, FSDP, rows, kind)
        engine.eval()
        with pytest.raises(InputError, match=r"no batch for some of the 2 data ranks, .* use more samples"):
            next(iter(engine.eval_dataloader))  # also of a rank that would ask for one batch only
        engine.train()
        train(engine)
        engine.close()
    replicated = sum(len(y) for _, y in make_engine(world_size, {}, 1, "samples").eval_dataloader)
    engine = make_engine(world_size, FSDP, 5, "samples")
    listed = len(list(engine.eval_dataloader))
    train(engine)
    kept = iter(engine.eval_dataloader)  # while the engine trains
    with torch.no_grad():
        engine.eval()(next(kept)[0].to(engine.device))
    train(engine.train())
    listed += len(list(kept))
    [[dropped, _]] = evaluated(rank, world_size, [(FSDP, "drop last", 7)])
    return replicated, listed, dropped[2]


def test_what_is_rejected_and_what_needs_no_calls():
    assert run_ranks(limits, 2) == [(1, 3, 6.0), (0, 1, 6.0)]
