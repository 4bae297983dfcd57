"""What is said before a model is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halfmesh import stage_checks
from halfmesh.config.schema import PipelineConfig
from halfmesh.stage_checks import make_partition


def make_model(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def loader_of(batch_size: int | None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(24, 4)), batch_size)


def problems_of(model: nn.Module, loader: Any = None, criterion: Any = None, **options: Any) -> list[str]:
    config = PipelineConfig.model_validate({"size": 2, "microbatches": 4, **options})
    return make_partition(model, criterion, loader, config)[1]


def test_nothing_is_wrong():
    config = PipelineConfig(size=2, microbatches=4)
    partition, problems = make_partition(make_model(), nn.MSELoss(), loader_of(8), config)
    assert problems == []
    assert partition is not None
    assert partition.names == ["0 to 1", "2 to 3"]


def test_problems_of_the_partition():
    (problem,) = problems_of(make_model(1))
    assert problem.startswith("parallel.pipeline: pipeline.size=2 needs 2 stages, but Sequential has 1 pieces only (0)")


def test_a_compiled_model():
    message = "the model is compiled, and cannot be cut any more; pass it uncompiled"
    assert message in problems_of(torch.compile(make_model()))
    model = make_model()
    model[1].compile()
    assert message in problems_of(model)


@pytest.mark.parametrize(
    ("batch_size", "microbatches", "advice"),
    [
        (10, 4, "use batch_size=8 or 12, or microbatches=5"),
        (3, 4, "use batch_size=4, or microbatches=3"),
        (7, 4, "use batch_size=4 or 8, or microbatches=1"),
        (8, 3, "use batch_size=6 or 9, or microbatches=2"),
    ],
)
def test_a_batch_size_that_microbatches_do_not_divide(batch_size, microbatches, advice):
    (problem,) = problems_of(make_model(), loader_of(batch_size), microbatches=microbatches)
    key = f"parallel.pipeline.microbatches={microbatches}"
    assert problem == f"{key} does not divide the dataloader's batch_size={batch_size}; {advice}"


@pytest.mark.parametrize("loader", [None, loader_of(None), loader_of(8), [1, 2, 3]])
def test_other_loaders_are_not_asked(loader):
    assert problems_of(make_model(), loader) == []


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_unknown_arguments():
    model, points = Net(*make_model()), ("2",)
    given = {"criterion": nn.MSELoss(), "partition": points}
    assert problems_of(model, **given, non_split=("mask", "target")) == []
    assert problems_of(model, **given, non_split=("maks", "mask")) == [
        "parallel.pipeline.non_split: neither Net.forward nor the criterion has an argument 'maks'; did you mean "
        "'mask'?; they have x, mask, input, target"
    ]
    assert problems_of(model, criterion=lambda *args: 0, partition=points, non_split=("maks",)) == []
    assert problems_of(model, criterion=None, partition=points, non_split=("target",)) != []


def test_what_cannot_be_timed():
    key = "parallel.pipeline.balance='time'"
    (problem,) = problems_of(make_model(), loader_of(8), partition=("2",), balance="time")
    assert problem.startswith(f"{key}: partition names where the stages begin, so there is nothing to balance")

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.zeros(8, 4))

    for loader in (None, [torch.zeros(8, 4)], DataLoader(Stream(), 8)):
        (problem,) = problems_of(make_model(), loader, balance="time")
        assert problem.startswith(
            f"{key} is measured on samples dataset[i] of the dataloader, which has no such dataset"
        )
    assert problems_of(make_model(), loader_of(8), balance="time") == []


def test_everything_at_once():
    assert len(problems_of(make_model(1), loader_of(10), non_split=("zzz",))) == 3


def test_layers_that_take_the_sequence_first_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(stage_checks, "_log", SimpleNamespace(warning=lambda text, *args: told.append(text % args)))
    for batch_first in (False, True):
        layers = (nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first) for _ in range(2))
        assert problems_of(nn.Sequential(*layers)) == []
    [words] = told
    assert words.startswith("0.self_attn, 1.self_attn take(s) [sequence, batch, ...] (batch_first=False)")


def test_settings_of_all_parameters():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert stage_checks.find_optimizer_problem(optimizer) is None
    for key in ("max_grad_norm", "d0"):
        optimizer.param_groups[0][key] = 1.0
        assert f"SGD has {key}=1.0, which it applies to all its parameters together" in (
            stage_checks.find_optimizer_problem(optimizer) or ""
        )
        optimizer.param_groups[0][key] = None
    assert stage_checks.find_optimizer_problem(optimizer) is None
