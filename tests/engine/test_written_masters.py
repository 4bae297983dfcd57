"""What others write into masters, or into zero1's and fsdp's parts, is the model: in every mode and layout."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.engine.convert_to_amp import convert_to_amp
from tests.support.models import (
    MLP,
    MODES,
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
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


@torch.no_grad()
def foreach(params: Any) -> None:
    torch._foreach_mul_(list(params), 0.5)


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


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "write", "steps"),
    [
        *(("naive_bf16", write, 1) for write in (fill, foreach, as_vector, last)),
        ("naive_bf16", as_vector, 0),
        ("naive_fp16", fill, 0),
        ("apex_o2", foreach, 1),
    ],
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


def resumed(folder: Path) -> dict[str, torch.Tensor]:
    again = make_engine(NAIVE)
    again.load(folder)
    return full_weights(again)


SAVES = {
    "model.state_dict": lambda engine, path: engine.model.state_dict(),
    "state_dict": lambda engine, path: engine.state_dict()["model"],
    "save_weights": lambda engine, path: (engine.save_weights(path, format="torch"), torch.load(path))[1],
    "save": lambda engine, path: (engine.save(path.parent), resumed(path.parent))[1],
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


def test_an_average_includes_it():
    engine = make_engine(NAIVE)
    fill(engine.master_params())
    average = engine.averaged_model(0.5)
    last(engine.master_params())
    with average.applied():
        assert torch.equal(engine.model.last.bias, torch.full((4,), 0.09).bfloat16())
    assert torch.equal(engine.model.last.bias, torch.full((4,), 0.125).bfloat16())


def test_what_an_optimizer_writes_into_masters_without_gradients():
    """As Lookahead does in its step, for all parameters."""

    class Halves(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            foreach(self.param_groups[0]["params"])

    engine = make_engine(NAIVE, optimizer=lambda params: Halves(params, lr=0.1))
    before = full_weights(engine)["last.bias"]
    engine.model.last.bias.requires_grad_(False)
    step_on(engine, X, Y)
    engine.eval()
    assert torch.equal(engine.model.last.bias, (before / 2).bfloat16())


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


@pytest.mark.parametrize(
    ("of", "then"), [("model", "evaluation"), ("masters", "evaluation"), ("masters", "state_dict")]
)
def test_writes_that_torch_does_not_count_are_told(of, then, caplog):
    engine = make_engine(NAIVE)
    step_on(engine, X, Y)
    use = partial(engine.eval(), X) if then == "evaluation" else engine.state_dict  # written after eval(), too
    engine(X)
    engine.train()
    step_on(engine, X, Y)
    engine.eval()
    for param in list(engine.model.parameters() if of == "model" else engine.master_params())[-1:]:
        param.data.mul_(2)
    assert "differ: one was written through `.data`" not in caplog.text
    for _ in range(2):
        use()
    assert caplog.text.count("last.bias in the model and their fp32 master weights differ") == 1


def test_an_average_of_the_users_in_the_model_leaves_masters_as_they_are():
    """Written into the model for an evaluation, and taken back: no master is rounded."""
    engine = make_engine(NAIVE)
    step_on(engine, X, Y)
    held, kept = full_weights(engine), [param.detach().clone() for param in engine.model.parameters()]
    fill(engine.model.parameters())
    engine.eval()(X)
    with torch.no_grad():
        torch._foreach_copy_(list(engine.model.parameters()), kept)
    engine.train()(X)
    torch.testing.assert_close(full_weights(engine), held, rtol=0, atol=0)


def test_convert_to_amp():
    plain = MLP()
    model, optimizer, _ = convert_to_amp(plain, sgd(plain.parameters()), None, "naive", dtype="bfloat16")
    fill(optimizer.master_params())
    model(X)
    assert [round(float(param.flatten()[0]), 2) for param in plain.parameters()] == [0.01 * (n + 1) for n in range(9)]
    last(optimizer.master_params())
    assert float(optimizer.state_dict()["masters"]["last.bias"][0]) == float(plain.last.bias[0]) == 0.125
    copied = copy.deepcopy(model)
    last(optimizer.master_params())
    assert torch.equal(copied(X), model(X))
    optimizer.close()
    assert float(plain.last.bias[0]) == 0.125


# -- layouts ----------------------------------------------------------------------------------------------------------

GATHERED = {"data": {"strategy": "fsdp", "reshard_after_forward": False}}
CELLS: list[tuple[dict[str, Any], str, Any]] = [
    *(({"data": "zero1"}, mode, write) for mode in ("none", "naive_bf16") for write in (foreach, as_vector, last)),
    *(({"data": "fsdp"}, mode, write) for mode in ("none", "naive_bf16") for write in (fill, as_vector)),
    *((GATHERED, "none", write) for write in (foreach, as_vector)),
    ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, "naive_bf16", as_vector),
    ({"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}}, "naive_bf16", foreach),
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
