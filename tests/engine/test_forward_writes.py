"""A forward that writes into its weights: right where all ranks write the same, else refused in the first update."""

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
from tests.support.ranks import here, rank_device, run_ranks

SEEDED = torch.Generator().manual_seed(0)
IDS, LABELS = torch.randint(12, (3, 8, 3), generator=SEEDED), torch.randint(4, (3, 8), generator=SEEDED)


class Writing(nn.Module):
    """Its forward writes into `weight`, or into `rows` those that a batch looks up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows, self.weight = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(4, 8))
        if how == "pre-hook":
            self.register_forward_pre_hook(lambda module, _: module.write(lambda: module.weight.data.clamp_(-0.5, 0.5)))

    def write(self, call: Any) -> None:
        with torch.no_grad():
            call()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.how == "copy":
            self.write(lambda: self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5)))
        elif self.how == "other memory":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        elif self.how == "data":
            self.weight.data.clamp_(-0.5, 0.5)
        elif self.how == "from the batch":
            self.write(lambda: self.weight.mul_(1 + 0.1 * ids.float().mean()))
        rows = F.embedding(ids, self.rows, max_norm=0.5 if self.how == "max_norm" else None)
        return F.linear(rows.mean(1), self.weight)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Writing(how)])
        self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](ids))


SAME = "copy", "other memory", "data", "pre-hook"
UNLIKE = {"max_norm": "rows", "from the batch": "weight"}
BF16 = {"bf16": {"mode": "naive"}}


def make(how: str) -> Model:
    torch.manual_seed(0)
    return Model(how)


def train(model: nn.Module, config: dict[str, Any]) -> nn.Module | str:
    """The trained model, on the CPU, or the refusal."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, config, device=rank_device())
    size, rank = engine.context.dp_size, engine.context.dp_rank
    try:
        for ids, labels in zip(here(IDS), here(LABELS), strict=True):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(ids.chunk(size)[rank]), labels.chunk(size)[rank]))
            engine.step()
        trained.load_state_dict(engine.full_state_dict(rank0_only=False))
    except InputError as error:
        return f"step {engine.global_step + 1}: {error}"
    finally:
        engine.close()
    return trained


def by_hand(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, labels in zip(IDS, LABELS, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    return model


def of_data_ranks(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    layouts = {"replicate": {}, "zero1": {}, "naive": BF16}
    found: dict[tuple[str, str], Any] = {}
    for how in (*SAME, *UNLIKE):
        for name, mode in layouts.items():
            data = name if name == "zero1" else "replicate"
            result = train(make(how), {"parallel": {"data": data}, **mode})
            found[how, name] = result if isinstance(result, str) else dict(result.state_dict())
    return found


@pytest.mark.promise(
    "weights that forward writes",
    "kept where all ranks write the same, else an error with names",
    of="PyTorch",
    page="sharding.md",
)
@pytest.mark.distributed
def test_data_ranks_keep_the_same_writes_and_refuse_others():
    both = run_ranks(of_data_ranks, 2)
    for found in both:
        for (how, layout), result in found.items():
            if how in UNLIKE:
                assert isinstance(result, str), (how, layout)
                assert result.startswith(f"step 1: the weights blocks.0.{UNLIKE[how]} differ between ranks"), result
            elif layout == "naive" and how in ("data", "pre-hook"):
                assert "written into blocks.0.weight through .data, which torch does not count" in result, (how, result)
            else:
                tolerance = 2e-2 if layout == "naive" else 1e-6
                torch.testing.assert_close(
                    result, dict(by_hand(make(how)).state_dict()), rtol=tolerance, atol=tolerance
                )


def under_fsdp(rank: int, world_size: int) -> dict[tuple[str, int], Any]:
    kinds = (*SAME, *UNLIKE)
    return {
        (how, mode): train(make(how), {"parallel": {"data": "fsdp"}, **(BF16 if mode else {})})
        for how in kinds
        for mode in (0, 1)
    }


@pytest.mark.promise("weights that forward writes")
@pytest.mark.distributed
def test_fsdp_refuses_writes_into_gathered_weights():
    for found in run_ranks(under_fsdp, 2):
        for (how, _), result in found.items():
            name = UNLIKE.get(how, "weight")
            assert isinstance(result, str), how
            assert result.startswith(f"step 1: the model's forward writes into blocks.0.{name}, but under "), result


def test_masters_follow_counted_writes_and_others_are_refused():
    assert "through .data" in train(make("data"), BF16)
    expected = dict(by_hand(make("copy")).state_dict())
    torch.testing.assert_close(dict(train(make("copy"), BF16).state_dict()), expected, rtol=2e-2, atol=2e-2)


def limited_rows(rank: int, world_size: int) -> list[str]:
    said = []
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for data in ("replicate", "zero1", "fsdp"):
            model = nn.Sequential(kind(12, 8, max_norm=0.5), nn.Flatten(), nn.LazyLinear(4))
            with torch.no_grad():
                model(IDS[0])
            with pytest.raises(IncompatibleConfigError) as caught:
                train(model, {"parallel": {"data": data}})
            said.append(str(caught.value))
    return said


@pytest.mark.distributed
def test_max_norm_is_refused_where_ranks_look_up_other_rows():
    for said in run_ranks(limited_rows, 2):
        assert all(
            "1 problem in parallel.data with this model" in text and "0: max_norm makes" in text for text in said
        )
    alone = nn.Sequential(nn.EmbeddingBag(12, 8, max_norm=0.5), nn.Linear(8, 4))
    expected = by_hand(alone)  # one process trains it as ever
    torch.testing.assert_close(dict(train(alone, {}).state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_clamping_through_data_after_a_step_is_told_where_masters_would_undo_it(mode: str):
    model = make("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, BF16 if mode == "bf16" else {})

    def loop() -> None:
        for step in range(10):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(IDS[step % 3]), LABELS[step % 3]))
            engine.step()
            for param in engine.model.parameters():
                param.data.clamp_(-0.05, 0.05)

    if mode == "fp32":
        loop()
        assert all(bool((param.abs() <= torch.tensor(0.05)).all()) for param in model.parameters())
    else:
        with pytest.raises(
            InputError, match=r"^forward, or the loop, has written into blocks.0.rows, .* through .data"
        ):
            loop()
        assert engine.global_step == 9


def test_norms_are_made_where_ranks_compare_them():
    """Weights that are kept in host memory are not compared there: a group of GPUs sends from these."""
    gpu = torch.device("meta")
    found = norms([torch.ones(3), torch.ones(2, device=gpu), torch.ones(2, dtype=torch.int64)], gpu)
    assert (found.device, found.shape) == (gpu, (3,))
    assert norms([torch.ones(4), torch.full((2,), torch.nan)], torch.device("cpu")).tolist() == [2, -1]
