"""The loop in one process: parity with plain torch, dtypes, misuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import (
    BF16_TORCH,
    COMPUTE_DTYPES,
    FP16_NAIVE,
    MLP,
    MODES,
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    said,
    sgd,
    step_on,
    train,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)


class MatmulDtypes(TorchDispatchMode):
    """Collects the dtypes in which matrix products run."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes.update(a.dtype for a in args if isinstance(a, torch.Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_parity_with_a_plain_fp32_loop(mode):
    """10 steps with a growth, an overflow, and clipping that bites in some steps and not in others."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()} | {"clip_grad_norm": 0.7}
    engine = make_engine(config, loader=make_loader(80))
    overflows = engine.loss_scale > 1
    norms, scales = [], []
    for step, (x, y) in enumerate(engine.dataloader):
        if step == 5 and overflows:  # one batch that overflows, between two good ones
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y) * math.inf)
            assert engine.step().skipped
        engine.zero_grad()
        result = step_on(engine, x, y)
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
    assert len(norms) == 10
    assert min(norms) < 0.7 < max(norms)
    if overflows:
        assert len(set(scales)) > 1
    assert difference(full_weights(engine), reference(make_loader(80), max_norm=0.7)) < TOLERANCES[mode]
    assert engine.skipped_steps == int(overflows)
    assert engine.global_step == 10 + int(overflows)


@pytest.mark.promise(
    "fp16, bf16, regions without autocast", "run in the dtype asked for", of="PyTorch", page="config.md"
)
@pytest.mark.parametrize("mode", MODES)
def test_matrix_products_run_in_the_dtype_asked_for(mode):
    engine = make_engine(MODES[mode])
    expected = COMPUTE_DTYPES[mode]
    with MatmulDtypes() as training:
        output = engine(X)
        engine.backward(engine.criterion(output, Y))
    assert training.dtypes == {expected}
    engine.eval()
    with torch.no_grad(), MatmulDtypes() as evaluating:
        engine(X)
    assert evaluating.dtypes == {expected}
    autocast = mode in ("torch_fp16", "torch_bf16", "apex_o1")
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32 if autocast else expected}
    assert output.dtype == (expected if autocast else torch.float32)
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu") == autocast


@pytest.mark.parametrize(
    ("loss", "reduction", "message"),
    [
        (lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"), "mean", r"but got shape \(8,\)"),
        (lambda o, y: (o.sum(), 8), "mean", r"got tuple; .* returns \(sum, weight\)"),
        (lambda o, y: o.sum(), "weighted", r"takes \(sum, weight\) from the criterion, but got a Tensor"),
    ],
)
def test_losses_that_cannot_be_used(loss, reduction, message):
    engine = make_engine({"loss_reduction": reduction}, criterion=loss)
    with pytest.raises(InputError, match=message):
        engine.backward(engine.criterion(engine(X), Y))


def test_misuse_of_the_engine():
    engine = halfmesh.initialize(MLP(), sgd, config={}, device="cpu")
    for call, message in [
        (lambda: engine.criterion(1, 2), "no criterion was given to initialize"),
        (engine.step, r"engine.step\(\) was called before engine.backward"),
        (lambda: engine.backward(torch.tensor(1.0), loss_id=1), "loss_id=1 is not allowed; allowed: 0 to 0"),
        (lambda: iter(engine.dataloader), "no dataloader was given to initialize"),
        (lambda: iter(engine.eval_dataloader), "no eval_dataloader was given to initialize"),
        (
            lambda: engine.model.load_state_dict(MLP(seed=3).state_dict(), assign=True),
            r"assign=True\) would replace the parameters that the optimizer",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            call()
    engine.close()
    assert "this engine is closed" in said(engine.call, "forward", X)


def full(*_, **__):
    raise torch.OutOfMemoryError("too much")


@pytest.mark.parametrize("where", ["criterion", "backward", "step"])
def test_an_error_of_memory_says_what_the_plan_needs_and_what_finds_less(where):
    optimizer = type("FullSGD", (torch.optim.SGD,), {"step": full} if where == "step" else {})
    fails = {"criterion": full, "backward": lambda output, y: output.register_hook(full) and output.sum()}
    config = {"fp16": {"mode": "naive", "loss_scale": 8.0}}
    criterion = fails.get(where, nn.functional.cross_entropy)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(make_engine(config, optimizer=lambda p: optimizer(p, lr=0.1), criterion=criterion))
    (note,) = raised.value.__notes__
    assert note.startswith("This engine needs 6.2 KiB per rank without activations: parameters 1.0 KiB, ")
    assert "`halfmesh plan`" in note


def test_a_close_after_an_error_frees_the_groups():
    """Which stayed, because the other ranks may have to hear of the error."""
    for fails_in_an_end in (False, True):
        engine = make_engine({"parallel": {"data": "fsdp"}})
        if fails_in_an_end:
            engine._ends.callback(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), engine:
            assert fails_in_an_end or 1 / 0
        assert dist.is_initialized()
        engine.close()
        assert not dist.is_initialized()


def test_a_step_has_ranges_in_order_and_all_of_an_update_is_in_its_range():
    engine = make_engine({"profile_ranges": True, "clip_grad_norm": 1.0, "fp16": {"mode": "naive", "loss_scale": 8.0}})
    train(engine, max_batches=2)  # in the first ones hooks look for writes
    x, y = next(iter(engine.dataloader))
    with profile(activities=[ProfilerActivity.CPU]) as before:
        engine.backward(engine.criterion(engine(x), y))
    with profile(activities=[ProfilerActivity.CPU]) as update:
        engine.step()
    events = [e for each in (before, update) for e in sorted(each.events(), key=lambda e: e.time_range.start)]
    names = ["forward", "criterion", "backward", "update", "grad_norm", "optimizer", "publish"]
    assert [event.name for event in events if "halfmesh." in event.name] == [f"halfmesh.{name}" for name in names]
    assert {event.name for event in update.events() if event.cpu_parent is None} == {"halfmesh.update"}


Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
APEX_O1: dict[str, Any] = {"fp16": {"mode": "apex", "opt_level": "O1"}}


class AutoEncoder(nn.Module):
    """`decode` uses a parameter of the model itself, and `generate` calls forward several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(8, 4)
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.full((8,), 0.5))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(z).tanh()) + self.shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(x))

    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def auto_encoder(config: dict[str, Any] | None = None) -> Any:
    return make_engine(config, model=AutoEncoder(), criterion=nn.functional.mse_loss)


def check_methods(rank: int, world_size: int, configs: list[dict[str, Any]]) -> None:
    """Methods train and compute as forward does."""
    for config in configs:
        engines = [auto_encoder(config), auto_encoder(config)]
        size = len(X) // engines[0].context.dp_size
        own, found = here(X[engines[0].context.dp_rank * size :][:size]), []
        for engine, by_methods in zip(engines, (True, False), strict=True):
            for _ in range(2):
                engine.zero_grad()
                output = engine.call("decode", engine.call("encoder", own)) if by_methods else engine(own)
                engine.backward(engine.criterion(output, own))
                engine.step()
            found.append(engine.full_state_dict(rank0_only=False))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4, msg=str(config))
        plain, engine = AutoEncoder(), engines[0].eval()
        plain.load_state_dict(found[0])
        with torch.no_grad():
            outputs = engine.call("decode", here(Z)), engine.call("generate", here(X), steps=3), engine(here(X))
            expected = here((plain.decode(Z), plain.generate(X, 3), plain(X)))
        assert len({output.dtype for output in outputs}) == 1, "outputs are cast as those of forward"
        close = 1e-5 if "parallel" in config and len(config) == 1 else 1e-2
        torch.testing.assert_close(outputs, expected, rtol=close, atol=close, check_dtype=False, msg=str(config))
        for engine in engines:
            engine.close()


def test_methods_compute_in_the_mode():
    check_methods(0, 1, [{}, BF16_TORCH, FP16_NAIVE, APEX_O1])


def of_layouts(rank: int, world_size: int) -> tuple[Any, str, str]:
    """Of a new engine a method may be called first. Under context methods only evaluate; a stage has none."""
    tensor = {"size": 2, "plan": {"first": "colwise", "second": "rowwise"}}
    check_methods(rank, world_size, [{"parallel": {"data": "fsdp"}, **FP16_NAIVE}, {"parallel": {"tensor": tensor}}])
    decoded = []
    for parallel in ({"data": "fsdp"}, {"context": {"size": 2}}):
        engine = auto_encoder({"parallel": parallel})
        with torch.no_grad():
            decoded.append(engine.eval().call("decode", here(Z)))
    engine.train()
    under_context = said(lambda: engine.call("decode", here(Z)))
    pipeline = {"size": 2, "partition": ["1"], "microbatches": 2}
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    piped = make_engine({"parallel": {"pipeline": pipeline}}, model=layers)
    return decoded, under_context, said(lambda: piped.call("decode", here(Z)))


@pytest.mark.distributed
def test_methods_compute_as_in_one_process_and_what_context_and_pipelines_cannot_do_is_said():
    for decoded, context, pipeline in run_ranks(of_layouts, 2):
        torch.testing.assert_close(decoded, [AutoEncoder().decode(Z).detach()] * 2)
        assert "under parallel.context only forward can be trained" in context
        assert "engine.call('decode'): under parallel.pipeline this rank holds one stage" in pipeline
