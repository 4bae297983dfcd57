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
    "not fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=False, foreach=False),
    "whole": lambda params: Whole(params, lr=0.01),
}


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_fp32_masters_do(name, same_ties):
    engines = [make_engine(config, optimizer=OPTIMIZERS[name]) for config in NAIVE.values()]
    for _ in range(20):
        results = [step_on(engine, X, Y) for engine in engines]
        weights, others = ([param.detach() for param in engine.model.parameters()] for engine in engines)
        assert all(map(torch.equal, weights, others))
    assert same(*map(full_weights, engines))
    assert results[0].skipped == results[1].skipped == 0
    fused, other = ([group.get("fused") for group in engine.optimizer.param_groups] for engine in engines)
    assert fused == other


def test_it_trains_as_fp32_masters_do_in_several_buckets(same_ties, monkeypatch):
    monkeypatch.setattr("halfmesh.amp.stepper.bucket_bytes", lambda *_: 300)
    engines = [make_engine(config, optimizer=adamw) for config in NAIVE.values()]
    for engine in engines:
        for _ in range(3):
            step_on(engine, X, Y)
    assert same(*map(full_weights, engines))


def memory(*tensors: torch.Tensor) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def held_bytes(engine: Any) -> int:
    """Of everything that is kept between updates, by its memory."""
    state = [x for values in engine.optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
    masters = [param.data for group in engine.optimizer.param_groups for param in group["params"]]
    kept = engine._update.master_weights.kept
    return memory(*engine.model.parameters(), *[x for x in state if x.dim()], *masters, *kept)


@pytest.mark.promise("fewer bytes per parameter (Megatron's bf16 weights and the low 16 bits of masters)")
@pytest.mark.parametrize(("masters", "expected"), [("split", 12), ("float32", 14)])
def test_bytes_between_updates(masters, expected):
    engine = make_engine(NAIVE[masters], optimizer=adamw)
    for _ in range(2):
        numel = sum(param.numel() for param in engine.model.parameters())
        step_on(engine, X, Y)
        engine.zero_grad()
        engine._update.stepper.used = []
        assert held_bytes(engine) - (4 if masters == "split" else 0) == expected * numel  # 4: of the stand-ins


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


def test_bytes_are_announced():
    engine = make_engine(SPLIT, optimizer=adamw)
    numel = sum(param.numel() for param in engine.model.parameters())
    assert state_bytes(engine.model, engine._update).masters == (2 + 4) * numel  # a small model is one bucket
    assert "fp32 masters, of which 16 bits are in the parameters" in str(engine.plan)


def test_a_skipped_update_changes_nothing():
    engine = make_engine({**SPLIT, "clip_grad_norm": 1.0, "on_nonfinite": "skip"}, optimizer=adamw)
    for _ in range(3):
        step_on(engine, X, Y)
    kept = copy.deepcopy(engine.state_dict())
    assert step_on(engine, X * float("inf"), Y).skipped
    found = engine.state_dict()
    assert same(found["model"], kept["model"])
    assert same(found["update"]["masters"], kept["update"]["masters"])
    assert torch.isfinite(torch.cat([value.flatten() for value in found["model"].values()])).all()


def test_an_error_within_an_update_leaves_masters_split():
    engine = make_engine(SPLIT, optimizer=OPTIMIZERS["whole"])

    def fails(*_: Any) -> None:
        raise KeyError("mine")

    before = full_weights(engine)
    hook = engine.optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        step_on(engine, X, Y)
    hook.remove()
    assert same(full_weights(engine), before)
    step_on(engine, X, Y)
    assert not same(full_weights(engine), before)


# -- others read and write ---------------------------------------------------------------------------------------------


def test_what_the_loop_writes_into_the_model_is_trained_on():
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    before = full_weights(engine)
    with torch.no_grad():
        engine.model.first.weight[0] = 0.0  # a mask
        engine.model.first.weight.data[1] *= 0  # through .data, too
        engine.model.last.bias.fill_(0.125)
    after = full_weights(engine)
    assert not after["first.weight"][:2].any()
    assert torch.equal(after["first.weight"][2:], before["first.weight"][2:]), "what was not written keeps all bits"
    torch.testing.assert_close(after["last.bias"], torch.full((4,), 0.125), rtol=2**-8, atol=0)
    assert torch.equal(after["last.bias"].bfloat16(), engine.model.last.bias)
    step_on(engine, X, Y)
    assert all(torch.isfinite(value).all() for value in full_weights(engine).values())


def test_weights_that_are_swapped_for_an_evaluation_keep_their_masters():
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    held, kept = full_weights(engine), [param.detach().clone() for param in engine.model.parameters()]
    with torch.no_grad():
        torch._foreach_zero_(list(engine.model.parameters()))
        engine.eval()(X)
        torch._foreach_copy_(list(engine.model.parameters()), kept)
    engine.train()(X)
    assert same(full_weights(engine), held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_is_loaded_exactly(dtype):
    state = MLP(seed=5).to(dtype).state_dict()
    state["last.bias"] = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 3.0]).to(dtype)  # ties, in fp32
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    engine.model.load_state_dict(state)
    assert same(full_weights(engine), {name: value.float() for name, value in state.items()})
    step_on(engine, X, Y)


def test_weights_are_loaded_from_a_file(tmp_path):
    engine, other = make_engine(SPLIT), make_engine(NAIVE["float32"], model=MLP(seed=5))
    step_on(other, X, Y)
    other.save_weights(tmp_path / "weights.safetensors")
    engine.load_weights(tmp_path / "weights.safetensors")
    assert same(full_weights(engine), full_weights(other))


@pytest.mark.parametrize("changed", [0, 2])
def test_another_memory_format(changed, same_ties):
    """Before initialize, and after two updates: fused optimizers go through memory, whatever the strides."""
    found = []
    for config in NAIVE.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
        images, targets = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 2, 3])
        if not changed:
            model.to(memory_format=torch.channels_last)
        engine = make_engine(config, model=model, optimizer=adamw)
        for step in range(4):
            if step == changed:
                model.to(memory_format=torch.channels_last)
            step_on(engine, images, targets)
        assert engine.optimizer.param_groups[0]["fused"]
        found.append(full_weights(engine))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-6, atol=1e-6)


def test_masters_are_read_without_a_trace():
    engine = make_engine(SPLIT)
    step_on(engine, X, Y)
    masters = engine._update.master_weights
    with masters.joined(writes=False):
        assert not masters.changed(), "or zero1 sends weights, which other ranks may not wait for"
    assert not masters.changed()


def test_masters_between_updates_are_no_numbers():
    engine = make_engine(SPLIT)
    assert "with masters='split' there are no fp32 masters between updates" in said(engine.master_params)
    param = engine.optimizer.param_groups[0]["params"][0]
    assert param.isnan().all()
    assert param.shape == engine.model.first.weight.shape
    step_on(engine, X, Y)
    held = full_weights(engine)
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
    step_on(engine, X, Y)
    assert not same(full_weights(engine), held)


def test_what_an_optimizer_gives_other_memory():
    """As some do in their step: `p.data = ...`."""

    class Replaces(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.data = param.data - 0.1 * param.grad

    by_masters = []
    for config in NAIVE.values():
        engine = make_engine(config, optimizer=lambda params: Replaces(params, lr=0.1))
        step_on(engine, X, Y)
        by_masters.append(full_weights(engine))
    assert same(*by_masters)


def test_an_average_is_that_of_the_masters(same_ties):
    values, engines = [], []
    for config in NAIVE.values():
        engine = make_engine(config)
        average = engine.averaged_model(0.5)
        for _ in range(3):
            step_on(engine, X, Y)
        before, weights = full_weights(engine), [param.detach().clone() for param in engine.model.parameters()]
        with average.applied():
            assert not torch.equal(engine.model.first.weight, weights[0])
            values.append([param.detach().clone() for param in engine.model.parameters()])
        assert all(map(torch.equal, weights, engine.model.parameters()))
        assert same(full_weights(engine), before)
        engines.append(engine)
    assert all(map(torch.equal, *values))
    assert same(*(engine.state_dict()["average"] for engine in engines))


def test_layers_that_are_unfrozen_later(same_ties):
    """Their masters are made when the update begins, after the forward."""
    by_masters = []
    for config in NAIVE.values():
        model = MLP()
        model.last.requires_grad_(False)
        engine = make_engine(
            config, model=model, optimizer=lambda _, m=model: adamw(p for p in m.parameters() if p.requires_grad)
        )
        step_on(engine, X, Y)
        before = full_weights(engine)
        model.last.requires_grad_(True)
        engine.optimizer.add_param_group({"params": list(model.last.parameters())})
        for _ in range(2):
            step_on(engine, X, Y)
        by_masters.append(full_weights(engine))
        assert not torch.equal(by_masters[-1]["last.weight"], before["last.weight"])
    assert same(*by_masters)


def test_close_gives_the_masters_back():
    engine = make_engine(SPLIT, optimizer=adamw)
    step_on(engine, X, Y)
    held = full_weights(engine)
    engine.close()
    assert same(dict(engine.model.state_dict()), held)
    assert {param.dtype for param in engine.model.parameters()} == {torch.float32}
    assert engine.optimizer.param_groups[0]["params"][0] is engine.model.first.weight


def test_convert_to_amp():
    plain = MLP()
    model, optimizer, _ = convert_to_amp(
        plain, adamw(plain.parameters()), None, "naive", {"masters": "split"}, dtype="bfloat16"
    )
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(X), Y))
        optimizer.step()
    assert "there are no fp32 masters between updates" in said(optimizer.master_params)
    state = copy.deepcopy(optimizer.state_dict())
    held = copy.deepcopy(model.state_dict())
    optimizer.backward(nn.functional.cross_entropy(model(X), Y))
    optimizer.step()
    optimizer.load_state_dict(state)
    assert same(dict(model.state_dict()), dict(held))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"fp16": {"mode": "naive", "masters": "split"}},
            "fp16.masters: 'split' needs weights that are the upper",
        ),
        ({"fp16": {"mode": "apex", "opt_level": "O2", "masters": "split"}}, "did you mean 'master_weights'?"),
        ({"bf16": {"mode": "torch", "masters": "split"}}, "mode 'naive' has it"),
        ({"bf16": {"mode": "naive", "masters": "both"}}, "'float32' or 'split'"),
    ],
)
def test_where_there_are_none(config, message):
    with pytest.raises(Exception, match="masters") as found:
        make_engine(config)
    assert message in str(found.value)
    assert isinstance(found.value, (IncompatibleConfigError, ValueError))


# -- layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}},
}


def muon(params: Any) -> list[torch.optim.Optimizer]:
    """Which steps whole matrices, beside AdamW."""
    params = list(params)
    matrices = [param for param in params if param.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.02), adamw([param for param in params if param.dim() != 2])]


def in_layout(rank: int, world_size: int, layout: str, optimizer: Any, folder: Path) -> dict[str, Any]:
    """By masters: losses, whole weights, and those after another engine has loaded the checkpoint of the other."""
    MasterWeights.publish, kept = round_ties_away, MasterWeights.publish  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    try:
        for masters, config in NAIVE.items():
            config = {**config, "parallel": LAYOUTS[layout], "clip_grad_norm": 1.0, "timeout": 30}
            engine = make_engine(config, optimizer=optimizer)
            size = len(X) // engine.context.dp_size
            own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
            x, y = here((X[own], Y[own]))
            update = partial(step_on, engine, x, y)
            norms = [update().grad_norm for _ in range(3)]
            engine.save(folder / masters)
            engine.averaged_model(0.5)
            norms += [update().grad_norm for _ in range(2)]
            found[masters] = norms, engine.full_state_dict()
            if layout == "fsdp":  # its shards are the masters, which nothing splits
                assert engine.plan.values["bytes"]["masters"] == 0
                assert ("fsdp's shards, not split" in engine.plan.rows["precision"]) == (masters == "split")
                assert len(list(engine.master_params())) == len(list(engine.model.parameters()))
            engine.load(folder / "float32")
            engine.save_weights(folder / f"loaded-{masters}.pt", format="torch")
            norms = [update().grad_norm for _ in range(2)]
            found[f"{masters}, resumed"] = norms, engine.full_state_dict()
            engine.close()
    finally:
        MasterWeights.publish = kept  # type: ignore[method-assign]
    return found


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


@pytest.mark.promise(
    "fewer bytes per parameter (Megatron's bf16 weights and the low 16 bits of masters)",
    '`masters="split"`: the same training, 12 bytes with Adam; checkpoints load both ways',
    of="PyTorch",
    page="precision.md",
)
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize(
    ("layout", "optimizer"), [*((layout, adamw) for layout in LAYOUTS), ("zero1", muon), ("tensor", muon)]
)
def test_layouts_train_as_with_fp32_masters(layout, optimizer, tmp_path, same_ties):
    found = run_ranks(in_layout, 2, layout, optimizer, tmp_path, timeout=120)[0]
    for masters in ("float32", "split"):
        norms, weights = found[masters]
        assert norms == found["float32"][0]
        assert same(weights, found["float32"][1])
        norms, weights = found[f"{masters}, resumed"]
        assert norms == found["float32"][0][3:]
        assert same(weights, found["float32"][1])
    for saved, config in (("split", NAIVE["float32"]), ("float32", SPLIT), ("split", SPLIT)):  # in one process
        engine = make_engine({**config, "clip_grad_norm": 1.0}, optimizer=optimizer)
        engine.load(tmp_path / saved)
        assert same(full_weights(engine), torch.load(tmp_path / "loaded-split.pt"))
        for _ in range(2):
            step_on(engine, X, Y)
        for name, value in full_weights(engine).items():
            torch.testing.assert_close(value, found["split"][1][name], rtol=0.02, atol=0.02)
