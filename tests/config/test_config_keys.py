"""Each key of precision, gradients and accumulation has an effect: a test here fails when its key is ignored."""

import math

import pytest
import torch
from torch import nn

from halfmesh import ConfigError, NonFiniteError
from tests.support.models import adamw, full_weights, make_data, make_engine, make_loader, reference, train
from tests.support.ranks import here, run_ranks

SMALL = {"initial_scale": 64.0}


def fp16(mode, **options):
    return {"fp16": {"mode": mode, **options}}


def backward(engine, factor=1.0):
    x, y = make_data(8)
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y) * factor)


@pytest.mark.parametrize(
    ("config", "overflows", "expected"),
    [
        (fp16("torch"), "1", [2.0**15]),
        (fp16("torch", init_scale=64.0, growth_interval=2, growth_factor=4.0), "000", [64, 256, 256]),
        (fp16("torch", init_scale=64.0, backoff_factor=0.25), "1", [16]),
        (fp16("torch", enabled=False), "1", [1]),
        (fp16("naive"), "111", [2.0**16, 2.0**15, 2.0**14]),
        (fp16("naive", loss_scale=128.0), "101", [128] * 3),
        (fp16("naive", **SMALL, hysteresis=3), "1111", [64, 64, 32, 16]),
        (fp16("naive", **SMALL, growth_interval=2, growth_factor=8.0), "00", [64, 512]),
        (fp16("naive", **SMALL, backoff_factor=0.125), "11", [64, 8]),
        (fp16("naive", **SMALL, min_scale=32.0), "1111", [64, 32, 32, 32]),
        (fp16("naive", **SMALL, max_scale=128.0, growth_interval=1), "000", [128] * 3),
    ],
    ids=str,
)
def test_keys_of_the_loss_scale(config, overflows, expected):
    """The scale after each step; "1" is a step that overflows."""
    engine = make_engine(config)
    found = []
    for bit in overflows:
        backward(engine, math.inf if bit == "1" else 1.0)
        engine.step()
        found.append(engine.loss_scale)
    assert found == expected


def test_clip_grad_norm_and_its_norm_type():
    moved = {}
    for name, clip in {"off": 0.0, "2": 0.01, "inf": {"max_norm": 0.01, "norm_type": "inf"}}.items():
        engine = make_engine({"clip_grad_norm": clip}, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        before = full_weights(engine)
        backward(engine)
        engine.step()
        deltas = torch.cat([(w - before[n]).flatten() for n, w in full_weights(engine).items() if n != "tied.weight"])
        moved[name] = (deltas.norm().item(), deltas.abs().max().item())
    assert moved["off"][0] > 0.1
    assert moved["2"][0] == pytest.approx(0.01, rel=1e-3)
    assert moved["inf"][1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", 512), ("float32", 575)])
def test_gradient_dtype(dtype, expected):
    """Many small gradients on top of a large one: lost in bf16, kept in fp32."""
    config = {"bf16": {"mode": "naive"}, "gradient_dtype": dtype, "gradient_accumulation": 64, "loss_reduction": "sum"}
    keys = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "criterion": lambda o: o.sum()}
    engine = make_engine(config, model=nn.Linear(1, 1, bias=False), **keys)
    before = full_weights(engine)["weight"].item()
    for step in range(64):
        engine.backward(engine.criterion(engine(torch.full((1, 1), 512.0 if step == 0 else 1.0))))
        assert (engine.step() is None) == (step < 63)
    assert before - full_weights(engine)["weight"].item() == pytest.approx(expected)


def summed_in_stages(rank, world_size):
    """The gradient of this stage's weight: of 64 microbatches the mean of 512 and many times 1."""
    model, config = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), {"bf16": {"mode": "naive"}}
    nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
    config |= {"gradient_dtype": "float32", "parallel": {"pipeline": {"size": 2, "microbatches": 64}}}
    engine = make_engine(config, model=model, criterion=torch.mean, loader=make_loader(64, 64))
    x = torch.tensor([[512.0]] + [[1.0]] * 63)
    engine.backward(engine.criterion(engine(here(x))))
    return engine.model[rank].weight.grad.item()


def test_gradient_dtype_of_microbatches():
    assert run_ranks(summed_in_stages, 2) == [pytest.approx(575 / 64)] * 2


def test_fused_on_nonfinite_track_grad_norm_and_log_num_zeros_in_grad():
    for fused, expected in (("auto", True), (False, None)):
        assert make_engine({"fused": fused}, optimizer=adamw).optimizer.param_groups[0]["fused"] is expected
    engine = make_engine({"on_nonfinite": "skip", "track_grad_norm": True})
    backward(engine)
    assert engine.step().grad_norm > 0
    backward(engine, math.nan)
    assert engine.step().skipped
    engine = make_engine({"on_nonfinite": "raise"})
    backward(engine, math.nan)
    with pytest.raises(NonFiniteError, match="gradients hold inf or nan"):
        engine.step()
    engine = make_engine(fp16("naive", log_num_zeros_in_grad=True))
    x, y = make_data(8)
    x[:, 0] = 0  # the first layer's weight has zero gradients for this feature
    engine.backward(engine.criterion(engine(x), y))
    assert engine.step().num_zeros == 16


@pytest.mark.promise(
    "keys of NAIVE and TORCH",
    "static and dynamic scales, `StepResult.num_zeros`; GradScaler's defaults",
    of="Colossal-AI",
    page="config.md",
)
@pytest.mark.parametrize(("mode", "skips"), [("naive", True), ("apex", False)])
def test_a_static_scale_of_naive_skips_as_colossalai_does_and_one_of_apex_steps_as_apex(mode, skips):
    engine = make_engine({"fp16": {"mode": mode, "loss_scale": 8.0}})
    before = full_weights(engine)
    backward(engine, math.inf)
    assert engine.step().skipped == skips
    assert (engine.skipped_steps, engine.loss_scale) == (int(skips), 8.0)
    after = full_weights(engine)
    assert all(torch.equal(value, before[name]) for name, value in after.items()) == skips
    assert all(value.isfinite().all() for value in after.values()) == skips


def test_each_half_precision_changes_the_weights():
    """By more than rounding in fp32 explains: a mode that does nothing would pass every test of parity."""
    expected = reference(make_loader())
    for config in (fp16("torch"), fp16("naive"), {"bf16": {"mode": "torch"}}, {"bf16": {"mode": "naive"}}):
        engine = make_engine(config)
        train(engine)
        weights = full_weights(engine)
        assert max((weights[n] - w).abs().max().item() for n, w in expected.state_dict().items()) > 1e-6


def updates(rank, world_size, config):
    """The engine's cycle, the plan's row, and how many updates 8 batches of 8 make on each data rank."""
    engine = make_engine(config, loader=make_loader(64, 8))
    count = sum(result is not None for result in train(engine))
    return engine.config.gradient_accumulation, engine.plan.rows["batch"], count


@pytest.mark.promise(
    "accumulation as a size, clipping, user constants",
    "`global_batch_size`, `clip_grad_norm`, UPPERCASE names",
    of="Colossal-AI",
    page="config.md",
)
@pytest.mark.distributed
def test_global_batch_size():
    text = "8 per rank x {} x 2 accumulated = {} samples per update (global_batch_size)"
    assert updates(0, 1, {"global_batch_size": 16}) == (2, text.format("1 data rank", 16), 4)
    expected = (2, text.format("2 data ranks", 32), 2)
    assert run_ranks(updates, 2, {"global_batch_size": 32}) == [expected] * 2


TOO_MANY = {"global_batch_size": 32, "gradient_accumulation": 2}


@pytest.mark.parametrize(
    ("config", "batch_size", "words"),
    [
        ({"global_batch_size": 20}, 8, "20 is not a multiple of batch size 8 x 1 data rank = 8; set it to 16 or 24"),
        (TOO_MANY, 8, "makes 16 samples; remove one of the two keys, or set gradient_accumulation=4"),
        ({"global_batch_size": 32}, None, "the loader has no batch_size"),
    ],
)
def test_a_global_batch_size_that_does_not_fit(config, batch_size, words):
    with pytest.raises(ConfigError, match=f"global_batch_size: .*{words}"):
        make_engine(config, loader=make_loader(batch_size=batch_size))
