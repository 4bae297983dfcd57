"""Models that mix the rows of a batch are rejected before the first update of a pipeline; of others nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import compiling
from tests.support.models import CLASSES, FEATURES, make_data, said
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


class Does(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        return self.how(x, self.training if table is None else table)


class Counts(nn.Module):
    """Adds how often it was called, in a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.calls += 1
        return x + 0.1 * self.calls * self.number


MIXED: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Does(lambda x, training: (x @ x.T).softmax(-1) @ x),
    "mean": lambda: Does(lambda x, training: x - x.mean(0)),
    "in training": lambda: Does(lambda x, training: x / x.std(0) if training else x),
    "with dropout": lambda: nn.Sequential(nn.Dropout(), Does(lambda x, training: F.normalize(x, dim=0))),
    "with noise": lambda: Does(lambda x, training: F.dropout(x, 0.5, training) - x.mean(0)),
    "capacity": lambda: Does(lambda x, training: x * (torch.arange(len(x), device=x.device) < 3)[:, None]),
}


class Sized(nn.Module):
    """Written for microbatches of two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1)


class TrainedOnly(nn.Module):
    """Its evaluation cannot be computed without values, and is never run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x) if self.training else x[x[:, 0] > 0]


OWN: dict[str, Callable[[], nn.Module]] = {
    "dropout": nn.Dropout,
    "noise": lambda: Does(lambda x, training: x + torch.randn_like(x)),
    "batch_norm": lambda: nn.BatchNorm1d(16),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
    "counts": Counts,
    "sized": Sized,
    "trained only": TrainedOnly,
    "half": lambda: Does(lambda x, training: x.bfloat16().float()),
}


def deep(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), *between, nn.Linear(16, CLASSES))


def train(rank: int, world_size: int) -> dict[str, Any]:
    x, y = here(make_data(8))
    found: dict[str, Any] = {}
    for name, layer in MIXED.items():
        found[name] = said(step, make(pipe(microbatches=4), deep(layer())), x, y)
    for name, layer in OWN.items():
        engine = make(pipe(microbatches=4), deep(layer()))
        step(engine, x, y)
        found[name] = {name: value for name, value in engine.model.state_dict().items() if "weight" not in name}
        assert all(module.training for module in engine.model.modules())
    return found


# -- graphs ----------------------------------------------------------------------------------------------------------


class Graph(nn.Module):
    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.mix, self.b = nn.Linear(FEATURES, 16), Does(mix), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.b(self.mix(self.a(x), table))


def by_matrix(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table @ x


def by_edges(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, table[1], x[table[0]])


def by_prototypes(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x + (x[:, : table.shape[1]] @ table.T).softmax(1) @ F.pad(table, (0, 16 - table.shape[1]))


LATE = torch.block_diag(torch.eye(4), torch.full((4, 4), 0.25))  # the first four nodes have no neighbours
EDGES = torch.tensor([[0, 1, 1], [1, 0, 1]])
WHOLE: dict[str, Any] = {"non_split": ("table",)}
ONE: dict[str, Any] = {"microbatches": 1, "schedule": "gpipe"}
GRAPHS: list[tuple[Any, torch.Tensor, dict[str, Any], str]] = [
    (by_matrix, LATE, WHOLE, "failed on the tensors without data"),
    (by_edges, EDGES, WHOLE, "with microbatches=1 and schedule='gpipe'"),
    (by_prototypes, torch.eye(8, 6), {}, "name it in parallel.pipeline.non_split"),
]
RIGHT = [(by_prototypes, torch.eye(8, 6), WHOLE), (by_matrix, LATE, ONE), (by_edges, EDGES, WHOLE | ONE)]


def train_graph(how: Any, table: torch.Tensor, **options: Any) -> float:
    x, y, table = here((*make_data(8), table))
    engine = make(pipe(partition=("b",), **({"microbatches": 4} | options)), Graph(how))
    loss = engine.criterion(engine(x, table), y)
    engine.backward(loss)
    return loss.item()


def train_graphs(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    told = [said(train_graph, how, table, **options) for how, table, options, _ in GRAPHS]
    return told, [train_graph(how, table, **options) for how, table, options in RIGHT]


def test_a_graph_is_rejected_and_the_ways_out_train_on_the_loss_of_one_process():
    x, y = make_data(8)
    expected = [F.cross_entropy(Graph(how)(x, table), y).item() for how, table, _ in RIGHT]
    for told, losses in run_ranks(train_graphs, 2):
        for (*_, message), found in zip(GRAPHS, told, strict=True):
            assert message in found
        assert losses == pytest.approx(expected, rel=1e-5)


# -- later batches, compiled models ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def train_later(rank: int, world_size: int) -> tuple[str, int]:
    x, y = here(make_data(8))
    engine = make(pipe(microbatches=4, schedule="gpipe"), deep(MIXED["mean"]()))
    step(engine, x[:1], y[:1])  # cannot be split
    later = said(step, engine, x, y)
    with compiling.watched() as compiled:
        engine = make(pipe(microbatches=4) | {"compile": {"backend": compiling.NAME}}, deep(Block(), Block()))
        step(engine, x, y)
    return later, compiled.graphs


def test_the_first_batch_that_is_split_is_tried_and_nothing_is_compiled_for_it():
    for later, graphs_compiled in run_ranks(train_later, 2):
        assert "computes different outputs" in later
        assert graphs_compiled == 1


def test_mixed_rows_are_rejected_and_rows_by_themselves_are_trained():
    first, second = run_ranks(train, 2)
    for name in MIXED:
        for found in (first, second):
            message = "computes different outputs for the first 2 microbatches together and one by one"
            assert message in found[name], name
            assert "The first module whose output differs is 2" in found[name], name
    assert (first["batch_norm"] | second["batch_norm"])["2.num_batches_tracked"] == 4
    assert (first["counts"] | second["counts"])["2.calls"] == 4
