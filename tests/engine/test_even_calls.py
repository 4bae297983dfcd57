"""Data ranks that need each other in forward evaluate sets that they do not divide: each sample is seen once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import halfmesh
from halfmesh.distributed.rank_process import RankError
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
        "workers": lambda: DataLoader(data, 2, num_workers=1, multiprocessing_context="fork"),
        "drop last": lambda: DataLoader(data, 2, drop_last=True),
        "batches": lambda: DataLoader(data, batch_sampler=[[i] for i in range(rows)]),
        "stream": lambda: DataLoader(Stream(rows), 1),
        "own share": lambda: DataLoader(data, 1, sampler=Share(rows)),
    }
    config = {"parallel": parallel} if world_size > 1 else {}
    return halfmesh.initialize(
        Encoder(norm=nn.LayerNorm),
        sgd,
        nn.functional.cross_entropy,
        DataLoader(TensorDataset(*make_data(8)), 8 // halfmesh.load_config(config).parallel.dims(world_size).dp),
        config,
        eval_dataloader=loaders[kind](),
        device=rank_device(),
    )


def evaluated(rank: int, world_size: int, parallel: Any, rows: int, kind: str) -> list[Any]:
    """The sums of a loop that counts each batch it sees, and calls the engine twice for each; twice, with an epoch of
    training between them."""
    engine = make_engine(world_size, parallel, rows, kind)
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
    *((FSDP, 2, kind, rows) for kind in ("samples", "batches") for rows in (5, 8)),
    *((FSDP, 2, kind, 5) for kind in ("workers", "stream", "own share")),
    (PIPED, 4, "samples", 5),
    (FSDP, 4, "samples", 9),
    (FSDP, 2, "drop last", 7),
]


@pytest.mark.promise(
    "evaluation sets that ranks do not divide",
    "each sample once, under fsdp too; a set with no batch for some rank is refused",
    of="PyTorch",
    page="sharding.md",
)
@pytest.mark.parametrize(("parallel", "ranks", "kind", "rows"), CELLS)
def test_a_loop_sees_each_sample_once(parallel, ranks, kind, rows):
    if kind == "drop last":  # each rank drops its own
        assert [found[0][2] for found in run_ranks(evaluated, ranks, parallel, rows, kind)] == [6.0] * ranks
        return
    ((expected),) = run_ranks(evaluated, 1, parallel, rows, kind, init=False)
    assert [sums[2] for sums in expected] == [rows] * 2
    for found in run_ranks(evaluated, ranks, parallel, rows, kind):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_stream_without_a_batch_for_each_rank():
    with pytest.raises(RankError, match="the evaluation loader has no batch for some of the 2 data ranks"):
        run_ranks(evaluated, 2, FSDP, 1, "stream")


def refused(rank: int, world_size: int, parallel: Any, rows: int, kind: str) -> bool:
    """True if this rank is told, even if it would ask for one batch only; and it can train afterwards."""
    engine = make_engine(world_size, parallel, rows, kind)
    engine.eval()
    with pytest.raises(InputError, match=r"no batch for some of the 2 data ranks, .* evaluate more samples"):
        next(iter(engine.eval_dataloader))
    engine.train()
    train(engine)
    return True


@pytest.mark.parametrize(("ranks", "kind", "rows"), [(2, "samples", 1), (2, "batches", 1), (2, "drop last", 3)])
def test_a_loader_without_a_batch_for_each_rank_is_refused_on_all(ranks, kind, rows):
    assert all(run_ranks(refused, ranks, FSDP, rows, kind))


def replicated(rank: int, world_size: int) -> int:
    return sum(len(y) for _, y in make_engine(world_size, {}, 1, "samples").eval_dataloader)


def test_ranks_that_do_not_meet_may_have_no_batch():
    assert run_ranks(replicated, 2) == [1, 0]


def encoded(rank: int, world_size: int, parallel: Any, has_grad: bool) -> Any:
    engine = make_engine(world_size, parallel, 5, "samples")
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for x, _ in engine.eval_dataloader:
        with torch.set_grad_enabled(has_grad):  # not around the loop: the repeated calls need the same
            total += engine.call("encode", x, scale=2.0).sum().detach() + engine(x).sum().detach()
    engine.train()
    train(engine)
    return engine.context.all_reduce(total).item()


@pytest.mark.parametrize("has_grad", [False, True])
def test_other_methods_are_repeated(has_grad):
    (expected,) = run_ranks(encoded, 1, {}, has_grad, init=False)
    torch.testing.assert_close(run_ranks(encoded, 2, FSDP, has_grad), [expected] * 2, rtol=1e-4, atol=1e-4)


def kept(rank: int, world_size: int) -> int:
    """One batch is evaluated after each epoch of training; rank 1 has the fewer, and begins again."""
    engine = make_engine(world_size, FSDP, 5, "samples")
    batches, seen = iter(engine.eval_dataloader), 0
    for _ in range(5):
        engine.eval()
        with torch.no_grad():
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(engine.eval_dataloader)
                x, y = next(batches)
            engine(x)
        seen += len(y)
        engine.train()
        train(engine)
    return seen


def test_an_iterator_may_be_kept_while_the_engine_trains():
    assert run_ranks(kept, 2) == [2 + 1 + 2 + 1 + 2, 2 + 2 + 2 + 2 + 2]


def listed(rank: int, world_size: int) -> int:
    engine = make_engine(world_size, FSDP, 5, "samples")
    batches = list(engine.eval_dataloader)
    train(engine)
    return len(batches)


def test_batches_that_are_not_evaluated_need_no_calls():
    assert run_ranks(listed, 2) == [2, 1]
