"""masters="split": the training of fp32 masters, with 2 bytes less a parameter."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.amp.master_weights import MasterWeights
from halfmesh.amp.split_masters import split_
from halfmesh.amp.stepper import Stepper
from halfmesh.engine.convert_to_amp import convert_to_amp
from halfmesh.engine.summary import state_bytes
from halfmesh.errors import IncompatibleConfigError
from tests.support.models import FEATURES, MLP, adamw, full_weights, make_data, make_engine, said, sgd, step_on
from tests.support.optimizers import muon_and_adamw
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
NAIVE: dict[str, Any] = {name: {"bf16": {"mode": "naive", "masters": name}} for name in ("float32", "split")}
SPLIT = NAIVE["split"]


@torch.no_grad()
def round_ties_away(self: MasterWeights, shards: Any) -> None:
    """As split masters are rounded; torch rounds ties to even."""
    for shard in shards:
        if shard.param in self.masters:
            value = self.masters[shard.param].detach().clone()
            split_(value)
            shard.param.copy_(value)


@pytest.fixture
def same_ties(monkeypatch):
    monkeypatch.setattr(MasterWeights, "publish", round_ties_away)


def same(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)


class Whole(torch.optim.AdamW):
    """Which is not stepped in buckets, because nobody knows it."""


OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adamw": adamw,
    "whole": lambda params: Whole(params, lr=0.01),
}

# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bucket"), [*((name, None) for name in OPTIMIZERS), ("adamw", 300)])
def test_it_trains_as_fp32_masters_do(name, bucket, same_ties, monkeypatch):
    """Also a layer that is unfrozen later; and an average is that of the masters."""
    if bucket:
        monkeypatch.setattr("halfmesh.amp.stepper.bucket_bytes", lambda *_: bucket)
    found = []
    for config in NAIVE.values():
        model = MLP()
        last = list(model.last.requires_grad_(False).parameters())
        others = [param for param in model.parameters() if param.requires_grad]
        engine = make_engine(config, model=model, optimizer=OPTIMIZERS[name](others))
        average = engine.averaged_model(0.5)
        for step in range(8):
            if step == 2:
                model.last.requires_grad_(True)
                engine.optimizer.add_param_group({"params": last})
            assert not step_on(engine, X, Y).skipped
        weights = full_weights(engine)
        with average.applied():
            applied = [param.detach().clone() for param in model.parameters()]
        assert same(full_weights(engine), weights)
        fused = engine.optimizer.param_groups[0].get("fused")
        found.append((weights, applied, [param.detach() for param in model.parameters()], fused))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not torch.equal(found[0][0]["last.weight"], MLP().last.weight)


def memory(*tensors: torch.Tensor) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def held_bytes(engine: Any) -> int:
    """Of everything that is kept between updates, by its memory."""
    state = [x for values in engine.optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    masters = [param.data for group in engine.optimizer.param_groups for param in group["params"]]
    kept = engine._update.master_weights.kept
    return memory(*engine.model.parameters(), *[x for x in state if x.dim()], *masters, *kept)


@pytest.mark.parametrize(("masters", "expected"), [("split", 12), ("float32", 14)])
def test_bytes_between_updates(masters, expected):
    engine = make_engine(NAIVE[masters], optimizer=adamw)
    numel = sum(param.numel() for param in engine.model.parameters())
    for _ in range(2):
        step_on(engine, X, Y)
        engine.zero_grad()
        engine._update.stepper.used = []
        assert held_bytes(engine) - (4 if masters == "split" else 0) == expected * numel  # 4: of the stand-ins
    if masters == "split":
        assert state_bytes(engine.model, engine._update).masters == (2 + 4) * numel  # a small model is one bucket
        assert "fp32 masters, of which 16 bits are in the parameters" in str(engine.plan)


def test_bytes_within_an_update_are_those_of_one_bucket(monkeypatch):
    monkeypatch.setattr("halfmesh.amp.stepper.bucket_bytes", lambda *_: 1024)
    joined, step = list[int](), Stepper.step
    engine = make_engine(
        SPLIT, optimizer=adamw, model=nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(5)])
    )

    def look(self: Any, *args: Any) -> None:
        masters = engine._update.master_weights.masters.values()
        joined.append(memory(*[master.data for master in masters]))
        step(self, *args)

    monkeypatch.setattr(Stepper, "step", look)
    step_on(engine, X, Y)
    assert len(joined) > 1
    assert max(joined) <= 1024 + 4, "and a stand-in"


def test_an_update_that_is_skipped_or_fails_changes_nothing():
    def fails(*_: Any) -> None:
        raise KeyError("mine")

    engine = make_engine({**SPLIT, "clip_grad_norm": 1.0, "on_nonfinite": "skip"}, optimizer=OPTIMIZERS["whole"])
    step_on(engine, X, Y)
    before = full_weights(engine)
    assert step_on(engine, X * float("inf"), Y).skipped
    assert same(full_weights(engine), before)
    hook = engine.optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        step_on(engine, X, Y)
    hook.remove()
    assert same(full_weights(engine), before)
    step_on(engine, X, Y)
    assert not same(full_weights(engine), before)


def test_another_memory_format(same_ties):
    """After two updates: fused optimizers go through memory, whatever the strides."""
    found = []
    for config in NAIVE.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
        engine = make_engine(config, model=model, optimizer=adamw)
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            step_on(engine, torch.ones(4, 3, 4, 4), torch.tensor([0, 1, 2, 3]))
        assert engine.optimizer.param_groups[0]["fused"]
        found.append(full_weights(engine))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


# -- others read and write ---------------------------------------------------------------------------------------------


def test_what_the_loop_writes_into_the_model_is_trained_on():
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    before, kept = full_weights(engine), [param.detach().clone() for param in engine.model.parameters()]
    with torch.no_grad():  # swapped for an evaluation
        torch._foreach_zero_(list(engine.model.parameters()))
        engine.eval()(X)
        torch._foreach_copy_(list(engine.model.parameters()), kept)
        engine.train()(X)
    assert same(full_weights(engine), before)
    with torch.no_grad():
        engine.model.first.weight[0] = 0.0  # a mask
        engine.model.first.weight.data[1] *= 0  # through .data, too
        engine.model.last.bias.fill_(0.125)
    after = full_weights(engine)
    assert not after["first.weight"][:2].any()
    assert torch.equal(after["first.weight"][2:], before["first.weight"][2:]), "what was not written keeps all bits"
    assert torch.equal(after["last.bias"].bfloat16(), engine.model.last.bias)
    step_on(engine, X, Y)
    assert all(torch.isfinite(value).all() for value in full_weights(engine).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_loaded_exactly(dtype, tmp_path):
    state = MLP(seed=5).to(dtype).state_dict()
    state["last.bias"] = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 3.0]).to(dtype)  # ties, in fp32
    torch.save(state, tmp_path / "weights.pt")
    for load in (lambda engine: engine.model.load_state_dict(state), lambda e: e.load_weights(tmp_path / "weights.pt")):
        engine = make_engine(SPLIT)
        step_on(engine, X, Y)
        load(engine)
        assert same(full_weights(engine), {name: value.float() for name, value in state.items()})


def test_masters_between_updates_are_no_numbers():
    engine = make_engine(SPLIT)
    assert "with masters='split' there are no fp32 masters between updates" in said(engine.master_params)
    param = engine.optimizer.param_groups[0]["params"][0]
    assert param.isnan().all()
    assert param.shape == engine.model.first.weight.shape
    step_on(engine, X, Y)
    held, masters = full_weights(engine), engine._update.master_weights
    with masters.joined(writes=False):
        assert not masters.changed(), "or zero1 sends weights, which other ranks may not wait for"
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="single memory location"):
            param.mul_(2.0)
        param.fill_(1.0)
    assert "a write into parameters of the optimizer: with masters='split'" in said(engine, X)
    assert same(full_weights(engine), held)
    assert param.isnan().all()
    for own in engine.optimizer.param_groups[0]["params"]:  # as an optimizer that swaps weights outside of its step
        own.data = torch.ones(own.shape)
    assert "a write into parameters of the optimizer: with masters='split'" in said(engine, X)
    assert same(full_weights(engine), held)
    engine.close()  # gives the masters back
    assert same(dict(engine.model.state_dict()), held)
    assert {param.dtype for param in engine.model.parameters()} == {torch.float32}
    assert engine.optimizer.param_groups[0]["params"][0] is engine.model.first.weight


def test_convert_to_amp():
    plain = MLP()
    model, optimizer, _ = convert_to_amp(
        plain, adamw(plain.parameters()), None, "naive", {"masters": "split"}, dtype="bfloat16"
    )

    def update() -> None:
        optimizer.backward(nn.functional.cross_entropy(model(X), Y))
        optimizer.step()

    update()
    assert "there are no fp32 masters between updates" in said(optimizer.master_params)
    state, held = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    update()
    optimizer.load_state_dict(state)
    assert same(dict(model.state_dict()), dict(held))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"fp16": {"mode": "naive", "masters": "split"}},
            IncompatibleConfigError,
            "fp16.masters: 'split' needs bf16 weights",
        ),
        ({"bf16": {"mode": "torch", "masters": "split"}}, ValueError, "bf16.masters: unknown key"),
        ({"bf16": {"mode": "naive", "masters": "both"}}, ValueError, "'float32' or 'split'"),
    ],
)
def test_where_there_are_none(config, error, message):
    with pytest.raises(error, match=message):
        make_engine(config)


# -- layouts -----------------------------------------------------------------------------------------------------------


CELLS: dict[str, tuple[dict[str, Any], Any]] = {
    "zero1": ({"data": "zero1"}, adamw),
    "fsdp": ({"data": "fsdp"}, adamw),
    "tensor": ({"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}, muon_and_adamw),
    "pipeline": ({"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}}, adamw),
}


def in_layout(rank: int, world_size: int, layout: str, folder: Path) -> dict[str, Any]:
    """By masters: norms, whole weights, and those of another engine that has loaded the checkpoint of the other."""
    MasterWeights.publish, kept = round_ties_away, MasterWeights.publish  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    try:
        for masters, config in NAIVE.items():
            parallel, optimizer = CELLS[layout]
            engine = make_engine({**config, "parallel": parallel, "clip_grad_norm": 1.0}, optimizer=optimizer)
            size = len(X) // engine.context.dp_size
            own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
            update = partial(step_on, engine, *here((X[own], Y[own])))
            norms = [update().grad_norm for _ in range(2)]
            engine.save(folder / masters)
            engine.averaged_model(0.5)
            norms += [update().grad_norm for _ in range(2)]
            found[masters] = norms, engine.full_state_dict()
            if layout == "fsdp":  # its shards are the masters, which nothing splits
                assert engine.plan.values["bytes"]["masters"] == 0
                assert ("not split: they are fsdp's shards" in engine.plan.rows["precision"]) == (masters == "split")
                assert len(list(engine.master_params())) == len(list(engine.model.parameters()))
            engine.load(folder / "float32")
            engine.save_weights(folder / "loaded.pt", format="torch")
            found[f"{masters}, resumed"] = [update().grad_norm for _ in range(2)], engine.full_state_dict()
            engine.close()
    finally:
        MasterWeights.publish = kept  # type: ignore[method-assign]
    return found


@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("layout", CELLS)
def test_layouts_train_as_with_fp32_masters(layout, tmp_path):
    found = run_ranks(in_layout, 2, layout, tmp_path)[0]
    norms, weights = found["float32"]
    assert found["split"][0] == norms
    assert same(found["split"][1], weights)
    for masters in NAIVE:
        resumed = found[f"{masters}, resumed"]
        assert resumed[0] == norms[2:]
        assert same(resumed[1], weights)
    for saved, config in (("split", NAIVE["float32"]), ("float32", SPLIT), ("split", SPLIT)):  # in one process
        engine = make_engine({**config, "clip_grad_norm": 1.0}, optimizer=CELLS[layout][1])
        engine.load(tmp_path / saved)
        assert same(full_weights(engine), torch.load(tmp_path / "loaded.pt"))


def with_ties(rank: int, world_size: int) -> list[torch.Tensor]:
    """The model's weights after `initialize`, and after an update that is checked."""
    model = MLP()
    nn.init.constant_(model.last.weight, 1 + 2**-8)
    engine = make_engine({**SPLIT, "parallel": {"data": "zero1"}, "debug": "sync", "timeout": 30}, model=model)
    before = [param.detach().clone() for param in model.parameters()]
    step_on(engine, X, Y)
    return [*before, *(param.detach() for param in model.parameters())]


@pytest.mark.distributed
@pytest.mark.sends
def test_all_ranks_of_zero1_round_ties_alike():
    first, second = run_ranks(with_ties, 2)
    assert all(map(torch.equal, first, second))
    assert (first[-len(first) // 2 - 2] == 1 + 2**-7).all(), "away from 0"
