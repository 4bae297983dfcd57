"""A forward that writes into its weights: right where all ranks write the same, else rejected in the first update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.parallel.comm import norms
from tests.support.models import full_weights, step_on
from tests.support.ranks import rank_device, run_ranks

SEEDED = torch.Generator().manual_seed(0)
IDS, LABELS = torch.randint(12, (3, 8, 3), generator=SEEDED), torch.randint(4, (3, 8), generator=SEEDED)
SAME = "copy", "other memory", "data", "pre-hook"
UNLIKE = {"max_norm": "rows", "from the batch": "weight"}
BF16 = {"bf16": {"mode": "naive"}}


class Writing(nn.Module):
    """Its forward writes into `weight`, or into `rows` those that a batch looks up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows, self.weight = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(4, 8))
        if how == "pre-hook":
            self.register_forward_pre_hook(lambda module, _: module.clamp())

    def clamp(self) -> None:
        self.weight.data.clamp_(-0.5, 0.5)

    @torch.no_grad()
    def write(self, ids: torch.Tensor) -> None:
        if self.how == "copy":
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
        elif self.how == "other memory":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        elif self.how == "data":
            self.clamp()
        elif self.how == "from the batch":
            self.weight.mul_(1 + 0.1 * ids.float().mean())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.write(ids)
        rows = F.embedding(ids, self.rows, max_norm=0.5 if self.how == "max_norm" else None)
        return F.linear(rows.mean(1), self.weight)


def make(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Writing(how), nn.Linear(4, 4))


def start(model: nn.Module, config: dict[str, Any]) -> halfmesh.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, config, device=rank_device())


def train(model: nn.Module, config: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    """The trained weights, or the rejection."""
    engine = start(model, config)
    size, rank = engine.context.dp_size, engine.context.dp_rank
    try:
        for ids, labels in zip(IDS, LABELS, strict=True):
            engine.zero_grad()
            step_on(engine, ids.chunk(size)[rank], labels.chunk(size)[rank])
        return engine.full_state_dict(rank0_only=False)
    except InputError as error:
        return f"step {engine.global_step + 1}: {error}"
    finally:
        engine.close()


def by_hand(model: nn.Module) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, labels in zip(IDS, LABELS, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    return dict(model.state_dict())


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"parallel": {"data": "zero1"}},
    "naive": BF16,
    "fsdp": {"parallel": {"data": "fsdp"}},
    "naive fsdp": {"parallel": {"data": "fsdp"}, **BF16},
}


def on_data_ranks(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    return {(how, name): train(make(how), config) for how in (*SAME, *UNLIKE) for name, config in LAYOUTS.items()}


@pytest.mark.distributed
def test_data_ranks_keep_the_same_writes_and_reject_others():
    for found in run_ranks(on_data_ranks, 2):
        for (how, layout), result in found.items():
            if "fsdp" in layout:  # gathered weights are not kept
                name = UNLIKE.get(how, "weight")
                assert result.startswith(f"step 1: the model's forward writes into 0.{name}, but under "), result
            elif how in UNLIKE:
                assert result.startswith(f"step 1: the weights 0.{UNLIKE[how]} differ between ranks"), result
            elif layout == "naive" and how in ("data", "pre-hook"):
                assert "wrote into 0.weight through .data, which bypasses the fp32 masters" in result, result
            else:
                close = 2e-2 if layout == "naive" else 1e-6
                torch.testing.assert_close(result, by_hand(make(how)), rtol=close, atol=close)


def limited_rows(rank: int, world_size: int) -> list[str]:
    said = []
    for kind, data in ((nn.Embedding, "replicate"), (nn.EmbeddingBag, "zero1"), (nn.Embedding, "fsdp")):
        model = nn.Sequential(kind(12, 8, max_norm=0.5), nn.Flatten(), nn.LazyLinear(4))
        with torch.no_grad():
            model(IDS[0])
        with pytest.raises(IncompatibleConfigError) as caught:
            train(model, {"parallel": {"data": data}})
        said.append(str(caught.value))
    return said


@pytest.mark.distributed
def test_max_norm_is_rejected_where_ranks_look_up_other_rows():
    for text in run_ranks(limited_rows, 2)[0]:
        assert "1 problem in parallel.data with this model" in text
        assert "0: max_norm makes" in text
    alone = nn.Sequential(nn.EmbeddingBag(12, 8, max_norm=0.5), nn.Linear(8, 4))
    expected = by_hand(alone)  # one process trains it as ever
    torch.testing.assert_close(train(alone, {}), expected)


def test_clamping_through_data_after_a_step_is_told_where_masters_would_undo_it():
    for config in ({}, BF16):
        engine = start(make(""), config)

        def loop(engine: halfmesh.Engine = engine) -> None:
            for step in range(10):
                engine.zero_grad()
                step_on(engine, IDS[step % 3], LABELS[step % 3])
                for param in engine.model.parameters():
                    param.data.clamp_(-0.05, 0.05)

        if not config:
            loop()
            assert all(bool((value.abs() <= 0.051).all()) for value in full_weights(engine).values())
        else:
            with pytest.raises(InputError, match=r"^forward, or the loop, wrote into 0.rows, .* through .data"):
                loop()
            assert engine.global_step == 9


def test_norms_are_made_where_ranks_compare_them():
    """Weights that are kept in host memory are not compared there: a group of GPUs sends from these."""
    gpu = torch.device("meta")
    found = norms([torch.ones(3), torch.ones(2, device=gpu), torch.ones(2, dtype=torch.int64)], gpu)
    assert (found.device, found.shape) == (gpu, (3,))
    assert norms([torch.ones(4), torch.full((2,), torch.nan)], torch.device("cpu")).tolist() == [2, -1]


def test_a_step_that_is_captured_in_a_cuda_graph_does_not_look(monkeypatch):
    """It would read the device. The tenth step does, otherwise."""
    looks = []
    monkeypatch.setattr("halfmesh.amp.master_weights.MasterWeights.uncounted", lambda _: looks.append("looked") or [])
    for captured in (False, True):
        engine = halfmesh.initialize(make(""), torch.optim.SGD, nn.CrossEntropyLoss(), None, BF16, device=rank_device())
        for step in range(10):
            monkeypatch.setattr("halfmesh.engine.guards.is_captured", lambda _, now=captured and step == 9: now)
            step_on(engine, IDS[0], LABELS[0])
        engine.close()
        assert len(looks) == (1 if captured else 2)
        looks.clear()
