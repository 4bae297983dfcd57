"""What others write into masters, or into zero1's and fsdp's parts, is the model: in every mode and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import (
    MLP,
    MODES,
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
    reference,
    said,
    sgd,
    step_on,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)
NAIVE = MODES["naive_bf16"]


@torch.no_grad()
def fill(params: Any) -> None:
    for number, param in enumerate(params):
        param.fill_(0.01 * (number + 1))


def as_vector(params: Any) -> None:
    """`param.data = ...`, as `Optimizer.swap` and others do, too; twice, so that memory is used again."""
    params = list(params)
    for _ in range(2):
        vector = nn.utils.parameters_to_vector(params).detach()
        nn.utils.vector_to_parameters(vector * 0.5, params)


def last(params: Any) -> None:
    """Of which a rank of zero1 may hold nothing."""
    nn.init.constant_(list(params)[-1], 0.125)


def by_hand(write: Any, steps: int = 1) -> nn.Module:
    """In fp32: `steps` updates, the write, and two more updates."""
    model = MLP()
    optimizer = sgd(model.parameters())
    for step in range(steps + 2):
        if step == steps:
            write(model.parameters())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("mode", "write", "steps"), [("naive_bf16", last, 1), ("naive_fp16", fill, 0), ("apex_o2", as_vector, 1)]
)
def test_the_model_computes_with_it(mode, write, steps):
    engine = make_engine(MODES[mode])
    for _ in range(steps):
        step_on(engine, X, Y)
    write(engine.master_params())
    plain = MLP()
    for param, master in zip(plain.parameters(), engine.master_params(), strict=True):
        param.data = master.detach().clone()
    with torch.no_grad():
        torch.testing.assert_close(engine.eval()(X), plain(X), rtol=0.02, atol=0.02)
    for param, master in zip(engine.model.parameters(), engine.master_params(), strict=True):
        assert torch.equal(param, master.to(param.dtype))
    engine.train()
    for _ in range(2):
        step_on(engine, X, Y)
    assert difference(full_weights(engine), by_hand(write, steps)) < 2 * TOLERANCES[mode]


SAVES = {
    "model.state_dict": lambda engine, path: engine.model.state_dict(),
    "save_weights": lambda engine, path: (engine.save_weights(path, format="torch"), torch.load(path))[1],
    "close": lambda engine, path: (engine.close(), engine.model.state_dict())[1],
    "eval": lambda engine, path: full_weights(engine.eval()),
}


@pytest.mark.parametrize("save", SAVES)
def test_it_is_saved(save, tmp_path):
    engine = make_engine(NAIVE)
    step_on(engine, X, Y)
    fill(engine.master_params())
    held = [master.detach().clone() for master in engine.master_params()]
    found = SAVES[save](engine, tmp_path / "weights.pt")
    names = [name for name, _ in MLP().named_parameters()]
    assert all(torch.equal(found[name], master) for name, master in zip(names, held, strict=True))


def test_both_written():
    engine = make_engine(MODES["naive_fp16"])
    fill(engine.master_params())
    engine.model.load_state_dict(MLP(seed=5).state_dict())  # into masters, too
    step_on(engine, X, Y)
    for value, is_other in ((0.125, False), (0.25, True)):
        last(engine.master_params())
        nn.init.constant_(engine.model.last.bias, value)
        if not is_other:
            step_on(engine, X, Y)
    for call in (engine.eval, lambda: engine(X), engine.state_dict, engine.close):
        assert "both last.bias in the model and the fp32 master weights" in said(call)
    assert engine.model.last.bias[0].item() == 0.125, "closed, with the masters"


def test_writes_that_torch_does_not_count_are_told(caplog):
    engine = make_engine(NAIVE)
    step_on(engine, X, Y)
    for param in list(engine.master_params())[-1:]:
        param.data.mul_(2)
    for _ in range(2):
        engine.state_dict()
    assert caplog.text.count("last.bias in the model and their fp32 master weights differ") == 1


CELLS: list[tuple[dict[str, Any], str, Any]] = [
    *(({"data": "zero1"}, mode, write) for mode, write in (("none", as_vector), ("naive_bf16", last))),
    *(({"data": "fsdp"}, mode, write) for mode, write in (("none", as_vector), ("naive_bf16", fill))),
    ({"data": {"strategy": "fsdp", "reshard_after_forward": False}}, "none", as_vector),
    ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, "naive_bf16", as_vector),
]


def in_layouts(rank: int, world_size: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """By cell the whole weights, in the end."""
    found = []
    for parallel, mode, write in CELLS:
        engine = make_engine({**MODES[mode], "parallel": parallel})
        x, y = (full.chunk(engine.context.dp_size)[engine.context.dp_rank] for full in (X, Y))
        step_on(engine, x, y)
        data = parallel.get("data")
        if data not in (None, "zero1"):
            engine(here(X))  # and no backward: gathered weights stay, where they are kept until then
        write(engine.master_params())
        if rank == 1 or data != "zero1":  # else a rank may have nothing to evaluate
            with torch.no_grad():
                engine.eval()(here(X))
        engine.train()
        for _ in range(2):
            step_on(engine, x, y)
        engine.save_weights(folder / "weights.pt", format="torch")
        found.append(torch.load(folder / "weights.pt") if rank == 0 else {})
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_layouts_train_on_as_one_process(tmp_path):
    found = run_ranks(in_layouts, 2, tmp_path, timeout=120)[0]
    for (parallel, mode, write), weights in zip(CELLS, found, strict=True):
        assert difference(weights, by_hand(write)) < 2 * TOLERANCES[mode], (parallel, mode, write)


# -- written by forward ------------------------------------------------------------------------------------------------

SEEDED = torch.Generator().manual_seed(0)
IDS, LABELS = torch.randint(12, (3, 8, 3), generator=SEEDED), torch.randint(4, (3, 8), generator=SEEDED)
WRITES = {"copy": "weight", "data": "weight", "max_norm": "rows", "from the batch": "weight"}
UNLIKE = "max_norm", "from the batch"


class Writing(nn.Module):
    """Its forward writes into `weight`, or into `rows` those that a batch looks up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows, self.weight = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(4, 8))

    @torch.no_grad()
    def write(self, ids: torch.Tensor) -> None:
        if self.how == "copy":
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
        elif self.how == "data":
            self.weight.data.clamp_(-0.5, 0.5)
        elif self.how == "from the batch":
            self.weight.mul_(1 + 0.1 * ids.float().mean())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.write(ids)
        rows = F.embedding(ids, self.rows, max_norm=0.5 if self.how == "max_norm" else None)
        return F.linear(rows.mean(1), self.weight)


def make(how: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Writing(how), nn.Linear(4, 4))


def train(how: str, config: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    """The trained weights, or the rejection."""
    engine = make_engine(config, model=make(how))
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


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"parallel": {"data": "zero1"}},
    "naive": NAIVE,
    "fsdp": {"parallel": {"data": "fsdp"}},
    "naive fsdp": {"parallel": {"data": "fsdp"}, **NAIVE},
}


def on_data_ranks(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    return {(how, name): train(how, config) for how in WRITES for name, config in LAYOUTS.items()}


@pytest.mark.distributed
def test_data_ranks_keep_the_same_writes_and_reject_others():
    for found in run_ranks(on_data_ranks, 2):
        for (how, layout), result in found.items():
            if "fsdp" in layout:  # gathered weights are not kept
                words = f"step 1: the model's forward writes into 0.{WRITES[how]}, but under "
                assert result.startswith(words), result
            elif how in UNLIKE:
                assert result.startswith(f"step 1: the weights 0.{WRITES[how]} differ between ranks"), result
            elif layout == "naive" and how == "data":
                assert "wrote into 0.weight through .data, which bypasses the fp32 masters" in result, result
            else:
                expected = dict(reference(zip(IDS, LABELS, strict=True), model=make(how)).state_dict())
                close = 2e-2 if layout == "naive" else 1e-6
                torch.testing.assert_close(result, expected, rtol=close, atol=close)
