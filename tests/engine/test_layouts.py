"""Engines on several ranks: what these have in common, rejections, criteria that communicate, uneven evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.composition.workloads import criterion, find_workload
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import (
    CLASSES,
    FEATURES,
    MLP,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    said,
    sgd,
    step_on,
    train,
)
from tests.support.proofs import FormatAlone, Row, prove, rows
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.distributed


def against_ddp(rank: int, world_size: int) -> float:
    engine = make_engine(optimizer=adamw, loader=make_loader(64, 4))
    train(engine)
    ddp = DistributedDataParallel(here(MLP()))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, fused=True)
    x, y = here(make_data(64))
    for begin in range(0, 64, 4 * world_size):
        part = slice(begin + rank, begin + 4 * world_size, world_size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x[part]), y[part]).backward()
        optimizer.step()
    return difference(full_weights(engine), ddp.module)


@pytest.mark.promise(
    "DDP, with accumulation and `no_sync`",
    "bitwise torch's gradients, one reduction per update",
    of="PyTorch",
    page="loop.md",
)
def test_bitwise_equal_to_torch_ddp():
    assert run_ranks(against_ddp, 2) == [0.0, 0.0]


class OddBuffers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.rand(1).expand(3, 4))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("rotation", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0))


def starts(rank: int, world_size: int) -> tuple[list[Any], str, torch.Tensor]:
    """The buffers; what is rejected; and what is dropped after a state that rank 0 saved, loaded by all."""
    torch.manual_seed(rank)
    model = OddBuffers()
    make_engine(model=model).close()
    buffers = [torch.view_as_real(b) if b.is_complex() else b.float() for b in model.buffers()]
    rejected = said(make_engine, {"gradient_accumulation": 1 + rank})
    engine = make_engine(optimizer=adamw, model=nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)))
    states: list[Any] = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return [buffer.tolist() for buffer in buffers], rejected, engine(here(torch.ones(16, FEATURES))) == 0


def test_ranks_start_with_equal_buffers_and_drop_differently():
    (first, rejected, dropped), (second, others, dropped_too) = run_ranks(starts, 2)
    assert first == second
    assert "the ranks have different configs" in rejected == others
    assert not torch.equal(dropped, dropped_too)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def in_a_tensor_group(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What is said of targets that the ranks have each for itself: unless they are trained with, of the first and of
    the tenth, and nothing between, where they are the same. And of a second engine, and of divided outputs."""
    (x, y), others = here((make_data(8), torch.arange(8).roll(rank) % CLASSES))
    config = {"parallel": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}}
    engine = make_engine(config, criterion=lambda output, *given: nn.functional.cross_entropy(output, given[-1]))
    found = [said(lambda: engine.criterion(engine(x), engine(x).softmax(-1)))]
    engine.eval()
    found.append(said(engine.criterion, engine(x), others))
    engine.train()
    with torch.no_grad():
        found.append(said(engine.criterion, engine(x), others))
    found += [said(step_on, engine, x, others if number in (0, 9) else y) for number in range(10)]
    divided = make_engine({"parallel": {"tensor": {"size": 2, "plan": {"last": "colwise"}}}})
    return found, [said(make_engine, model=engine.model), said(step_on, divided, x, y)]


def test_what_would_be_silently_wrong_in_a_tensor_group_is_rejected():
    differs = "the ranks of a tensor group got different targets"
    for found, (second, divided) in run_ranks(in_a_tensor_group, 2):
        assert [differs in text for text in found] == [*[False] * 3, True, *[False] * 8, True]
        assert {text for text in found if differs not in text} == {"nothing"}
        assert "model: another engine sharded it" in second
        assert "the model's output differs between the ranks of a tensor group" in divided


def gpt() -> Any:
    workload = find_workload("gpt")
    return workload.make(), workload.data(), criterion


def config(axes: Any = None, **more: Any) -> dict[str, Any]:
    tensor = {"size": 2, "plan": {"*": "auto", "head": "vocab_parallel"}}
    return {"parallel": {"tensor": tensor, **(axes or {})}, **more}


@pytest.mark.promise(
    "a vocabulary larger than the hidden states", "logits stay sharded", of="SageMaker", page="tensor-parallel.md"
)
@rows(
    Row("accumulated, bf16", gpt, config(bf16={"mode": "torch"}, gradient_accumulation=2), work=FormatAlone),
    Row("context", gpt, config({"context": 2}), 4),
    Row("pipeline", gpt, config({"pipeline": {"size": 2, "microbatches": 2}}), 4),
)
def test_gpt_is_verified(row):
    row.prove()


CUT = {"size": 2, "microbatches": 2, "schedule": "interleaved", "chunks": 2, "send_dtype": "compute"}


@rows(Row("sent in bf16", gpt, {"bf16": {"mode": "torch"}, "parallel": {"pipeline": CUT}}, work=FormatAlone))
def test_activations_that_are_sent_in_autocasts_dtype_train_as_in_one_process(row):
    row.prove()


# -- criteria that communicate -----------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Losses of outputs less their running mean over all data ranks, as DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.context: Any = None
        self.register_buffer("center", torch.zeros(4))

    def set_context(self, context: Any) -> None:
        assert self.context is None, "once"
        self.context = context

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output - self.center, target)
        mean = output.detach().mean(0)
        if self.context is not None:
            self.context.all_reduce(mean, "dp", op="mean")
        self.center = self.center * 0.5 + mean * 0.5
        return loss


def centred() -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, (torch.randn(16, 8), torch.randint(4, (16,))), Centred()


@rows(
    Row("replicate", centred, {}, updates=3),
    Row("tensor", centred, {"parallel": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}}, updates=3),
    Row("fp16, zero1", centred, {"fp16": {"mode": "naive"}, "parallel": {"data": "zero1"}}, work=FormatAlone),
)
def test_criteria_that_communicate_train_as_in_one_process(row):
    row.prove()


def test_a_pipeline_rejects_a_loss_that_depends_on_the_microbatch_before():
    pipeline = {"size": 2, "microbatches": 2, "partition": ["2"]}
    report = prove({"parallel": {"pipeline": pipeline}}, centred, 2)
    assert "for its 2 microbatches (loss_reduction=" in str(report)


# -- data ranks that need each other in forward, and evaluate sets that they do not divide -----------------------------


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from zip(*make_data(self.count), strict=True)


class Share(Sampler):
    """A sampler that shards itself, unevenly."""

    def __init__(self, rank: int, num_replicas: int, count: int) -> None:
        self.rank, self.num_replicas, self.count = rank, num_replicas, count

    def __len__(self) -> int:
        return len(range(self.rank, self.count, self.num_replicas))

    def __iter__(self) -> Any:
        return iter(range(self.rank, self.count, self.num_replicas))


class Encoder(Net):
    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.first(x) * scale  # one gather, where forward makes several


def start(rank: int, world_size: int, parallel: Any, count: int, kind: str) -> halfmesh.Engine:
    data = TensorDataset(*make_data(count))
    loaders = {
        "samples": lambda: DataLoader(data, 2),
        "drop last": lambda: DataLoader(data, 2, drop_last=True),
        "batches": lambda: DataLoader(data, batch_sampler=[[i] for i in range(count)]),
        "stream": lambda: DataLoader(Stream(count), 1),
        "own share": lambda: DataLoader(data, 1, sampler=Share(rank, world_size, count)),
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
    for number, (parallel, kind, count) in enumerate(cells):
        engine, by_epoch = start(rank, world_size, parallel, count, kind), []
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
    2: [(FSDP, kind, count) for kind, count in (("samples", 5), ("batches", 8), ("stream", 5), ("own share", 5))],
    4: [(PIPED, "samples", 5), (FSDP, "samples", 9)],
}


@pytest.mark.sends
@pytest.mark.parametrize("ranks", CELLS)
def test_a_loop_sees_each_sample_once(ranks):
    expected = evaluated(0, 1, CELLS[ranks])
    assert [[sums[2] for sums in cell] for cell in expected] == [[count] * 2 for _, _, count in CELLS[ranks]]
    for found in run_ranks(evaluated, ranks, CELLS[ranks]):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def limits(rank: int, world_size: int) -> tuple[int, int, float]:
    """A loader without a batch for some rank is rejected on all, who can train afterwards; not where ranks do not meet.
    With drop_last each rank drops its own. Batches that are not evaluated need no calls, nor does a kept iterator."""
    for kind, count in (("samples", 1), ("drop last", 3)):
        engine = start(rank, world_size, FSDP, count, kind)
        engine.eval()
        with pytest.raises(InputError, match=r"no batch for some of the 2 data ranks, .* use more samples"):
            next(iter(engine.eval_dataloader))  # also of a rank that would ask for one batch only
        engine.train()
        train(engine)
        engine.close()
    replicated = sum(len(y) for _, y in start(rank, world_size, {}, 1, "samples").eval_dataloader)
    engine = start(rank, world_size, FSDP, 5, "samples")
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
