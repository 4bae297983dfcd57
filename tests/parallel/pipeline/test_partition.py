"""Pieces dealt out to stages, and why a model cannot be cut."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.partition import (
    all_entries,
    count_parameters,
    divide,
    find_pieces,
    resolve,
)
from tests.support.pipeline_parts import check_pieces


def row(count: int, **more: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    for name, module in more.items():
        model.add_module(name, module)
    return model


# -- divide ----------------------------------------------------------------------------------------------------------


def runs(costs, bounds):
    return [sum(costs[begin:end]) for begin, end in pairwise(bounds)]


def by_trying_all(costs, count):
    """(largest, sum of squares) of the best division."""
    options = []
    for inner in combinations(range(1, len(costs)), count - 1):
        found = runs(costs, [0, *inner, len(costs)])
        options.append((max(found), sum(cost * cost for cost in found)))
    return min(options)


def test_divide_is_the_best_division():
    numbers = random.Random(0)
    for _ in range(400):
        costs = [float(numbers.choice([0, 1, 1, 2, 3, 7, 20])) for _ in range(numbers.randint(1, 9))]
        count = numbers.randint(1, len(costs))
        bounds = divide(costs, count)
        assert bounds == sorted(set(bounds)), "no stage is empty"
        assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), count + 1)
        found = runs(costs, bounds)
        assert (max(found), sum(cost * cost for cost in found)) == by_trying_all(costs, count), (costs, count)


def test_divide_evens_out_what_the_largest_leaves():
    # The last run decides the largest sum; the two before it are still as equal as can be.
    assert divide([3.0, 1.0, 4.0, 2.0, 9.0], 3) in ([0, 2, 4, 5], [0, 3, 4, 5])
    assert divide([5, 1, 1, 1, 1, 1, 20], 3) == [0, 1, 6, 7]


@pytest.mark.parametrize("costs", [[0.0] * 6, [1.0] * 6])
def test_divide_equal_costs_in_equal_runs(costs):
    assert divide(costs, 6) == [0, 1, 2, 3, 4, 5, 6]
    if any(costs):
        assert divide(costs, 3) == [0, 2, 4, 6]


# -- resolve ---------------------------------------------------------------------------------------------------------


def test_stages_of_a_row():
    partition, problems = resolve(row(6), 3, 1)
    assert problems == []
    assert partition.names == ["0 to 1", "2 to 3", "4 to 5"]
    assert partition.costs == (40.0, 40.0, 40.0)
    assert [partition.of_rank(rank) for rank in range(3)] == [[0], [1], [2]]
    assert [piece.name for piece in partition.pieces] == list("012345")


def test_chunks_are_dealt_in_turn():
    partition, problems = resolve(row(6), 2, 3)
    assert problems == []
    assert partition.names == list("012345")
    assert [partition.of_rank(rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_stages_balanced_by_parameters_and_by_time():
    partition, _ = resolve(row(3, big=nn.Linear(4, 40), end=nn.Linear(40, 1)), 2, 1)
    assert partition.names == ["0 to 2", "big to end"]
    assert partition.rebalanced({"0": 9.0, "1": 1, "2": 1, "big": 1, "end": 1}).names == ["0", "1 to end"]
    assert partition.rebalanced({"0": 9.0, "1": 1, "2": 1, "big": 1, "end": 1}).costs == (9.0, 4.0)


def test_too_few_blocks():
    assert resolve(row(3), 2, 2)[1] == [
        "pipeline.size=2 x chunks=2 needs 4 stages, but Sequential has 3 pieces only (0, 1, 2); use fewer stages "
        "(3 at most), or a model with more blocks"
    ]
    assert "pipeline.size=4 needs 4 stages" in resolve(row(3), 4, 1)[1][0]


def test_a_wrong_number_of_split_points():
    assert resolve(row(3), 2, 1, ("1", "2")) == (
        None,
        [
            "partition: 2 split point(s) make 3 stages, but pipeline.size=2 needs 2; name the 1 modules with which "
            "stages 1 to 1 begin"
        ],
    )
    assert (
        "1 split point(s) make 2 stages, but pipeline.size=2 x chunks=2 needs 4; name the 3 modules"
        in (resolve(row(5), 2, 2, ("1",))[1][0])
    )


def test_split_points_of_a_model_that_a_partitioner_knows():
    partition, problems = resolve(row(4), 2, 1, ("3",))
    assert problems == []
    assert partition.names == ["the beginning", "3"]


def test_a_wrong_split_point():
    partition, problems = resolve(row(4), 2, 1, ("33",))
    assert partition is None
    assert problems == ["parallel.pipeline.partition: '33' is not a module of the model; did you mean '3'?"]


def test_an_unknown_partitioner():
    problem = resolve(row(4), 2, 1, "sequentiel")[1][0]
    assert re.match(r"no partitioner named 'sequentiel'; did you mean 'sequential'", problem), problem
    with pytest.raises(InputError, match="no partitioner named"):
        find_pieces(row(4), "sequentiel")


def test_a_partitioner_that_does_not_know_the_model():
    problem = resolve(row(4), 2, 1, "timm_vit")[1][0]
    assert problem.startswith(
        "the partitioner 'timm_vit' does not know Sequential; name the modules that begin a stage"
    )


# -- suggestions -----------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A model that no partitioner knows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(count))})
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body["blocks"]:
            x = x + block(x)
        return self.head(x)


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Blocks(4), 2),
        (Blocks(5), 4),
        (Blocks(2), 2),
        (Residual(*row(5)), 3),
        (nn.Sequential(*row(2), *[nn.Tanh()] * 3), 3),
    ],
)
def test_suggested_points_can_be_used(model, count):
    problem = resolve(model, count, 1, "timm_vit")[1][0]
    match = re.search(r"for example partition=\((.*)\); or register a partitioner$", problem)
    assert match, problem
    points = tuple(eval(f"({match[1]})"))
    assert len(points) == count - 1
    partition, problems = resolve(model, count, 1, points)
    assert problems == []
    assert len(partition.stages) == count
    check_pieces(model, [torch.randn(2, 4)], partition=points)


def test_no_row_to_suggest_points_from():
    problem = resolve(Blocks(2), 4, 1)[1][0]
    assert problem == (
        "no partitioner knows Blocks; name the 3 module(s) that begin a stage in parallel = "
        "dict(pipeline=dict(size=..., partition=(...))); it has stem, body, head"
    )
    assert resolve(nn.Module(), 2, 1)[1][0].endswith("it has no modules")


# -- what cannot be cut ----------------------------------------------------------------------------------------------


def test_sparse_embeddings():
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    assert resolve(model, 2, 1)[1] == [
        "0: sparse gradients do not work under a pipeline; build the embedding with sparse=False"
    ]
    model = nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True), nn.Linear(4, 4))
    assert resolve(model, 2, 1)[1][0].startswith("0: sparse gradients")


def test_shared_batch_norm():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    (problem,) = resolve(model, 2, 1)[1]
    assert problem.startswith("1.running_mean, 1.running_var, 3.running_mean, 3.running_var: running statistics that")
    assert resolve(model, 1, 2)[1] == [], "both stages are on one rank"
    without = nn.BatchNorm1d(4, track_running_stats=False)
    assert resolve(nn.Sequential(nn.Linear(4, 4), without, nn.Linear(4, 4), without), 2, 1)[1] == []


def test_a_batch_norm_called_in_two_stages():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.b(self.norm(self.a(x))))

    (problem,) = resolve(Twice(), 2, 1, ("b",))[1]
    assert problem.startswith("norm.running_mean, norm.running_var: running statistics that several stages would keep")


# -- entries ---------------------------------------------------------------------------------------------------------


def test_entries_of_stages():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model.register_buffer("odd", torch.zeros(1))
    partition, _ = resolve(model, 2, 1)
    assert partition.names == ["0", "1 to 2"]
    entries = partition.entries(model)
    assert entries == {
        ("", "odd"): [0],  # what no piece uses is in the first stage
        ("0", "weight"): [0],
        ("0", "bias"): [0],
        **{("1", name): [1] for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")},
        ("2", "weight"): [1],
    }
    assert list(dict(all_entries(model))) == list(entries)


def test_entries_of_tied_weights():
    model = row(4)
    model[3].weight = model[0].weight
    partition, _ = resolve(model, 2, 1)
    entries = partition.entries(model)
    assert entries["0", "weight"] == [0]
    assert entries["3", "weight"] == [1]
    assert dict(all_entries(model))["0", "weight"] is dict(all_entries(model))["3", "weight"]


def test_entries_of_a_module_in_two_stages():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.middle(self.embed(ids)), self.embed.weight)

    model = Tied()
    partition, problems = resolve(model, 2, 1, ("middle",))
    assert problems == []
    assert partition.entries(model)["embed", "weight"] == [0, 1]
    assert [count_parameters(model, piece) for piece in partition.pieces] == [20.0, 40.0]


def test_names_that_begin_alike_are_not_mixed_up():
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a1, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a1(self.a(x)))

    model = Alike()
    partition, _ = resolve(model, 2, 1, ("a1",))
    entries = partition.entries(model)
    assert [entries[name, "weight"] for name in ("a", "a1", "b")] == [[0], [1], [1]]
