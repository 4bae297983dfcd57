"""Every key of the config has an effect: each test here fails when its key is ignored.

Keys of the layout that need several ranks are in tests/engine/test_data_parallel.py, those of schedulers in
tests/engine/test_scheduling.py, those of accumulation in test_cycle.py, compile in
test_compile.py, those of activations in test_saved_activations.py, those of checkpoints in
tests/checkpoint/test_automatic.py, debug in test_sync_check.py; the list at the end keeps this complete.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.amp.naive_amp import NaiveOptions
from halfmesh.amp.torch_amp import TorchOptions
from halfmesh.config.schema import Settings
from halfmesh.errors import ConfigError, NonFiniteError
from tests.support.models import (
    BF16_NAIVE,
    FP16_NAIVE,
    MLP,
    adamw,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
    train,
)
from tests.support.ranks import free_port, run_ranks


def scales(config, pattern: str) -> list[float]:
    """The loss scale after each step; "1" in `pattern` is a step that overflows."""
    engine = make_engine(config)
    x, y = make_data(8)
    found = []
    for bit in pattern:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss * math.inf if bit == "1" else loss)
        engine.step()
        found.append(engine.loss_scale)
    return found


def fp16(mode: str, **options):
    return {"fp16": {"mode": mode, **options}}


@pytest.mark.parametrize(
    ("config", "pattern", "expected"),
    [
        pytest.param(fp16("torch"), "1", [2.0**15], id="torch.defaults"),
        pytest.param(fp16("torch", init_scale=64.0), "0", [64], id="torch.init_scale"),
        pytest.param(
            fp16("torch", init_scale=64.0, growth_interval=2), "0000", [64, 128, 128, 256], id="torch.interval"
        ),
        pytest.param(
            fp16("torch", init_scale=64.0, growth_interval=1, growth_factor=4.0), "0", [256], id="torch.growth"
        ),
        pytest.param(fp16("torch", init_scale=64.0, backoff_factor=0.25), "1", [16], id="torch.backoff"),
        pytest.param(fp16("torch", enabled=False), "1", [1], id="torch.enabled"),
        pytest.param(fp16("naive"), "111", [2.0**16, 2.0**15, 2.0**14], id="naive.defaults"),
        pytest.param(fp16("naive", initial_scale=64.0), "0", [64], id="naive.initial_scale"),
        pytest.param(fp16("naive", loss_scale=128.0), "101", [128] * 3, id="naive.loss_scale"),
        pytest.param(fp16("naive", initial_scale=64.0, hysteresis=3), "1111", [64, 64, 32, 16], id="naive.hysteresis"),
        pytest.param(fp16("naive", initial_scale=64.0, growth_interval=2), "00", [64, 128], id="naive.interval"),
        pytest.param(
            fp16("naive", initial_scale=64.0, growth_interval=1, growth_factor=8.0), "0", [512], id="naive.growth"
        ),
        pytest.param(fp16("naive", initial_scale=64.0, backoff_factor=0.125), "11", [64, 8], id="naive.backoff"),
        pytest.param(fp16("naive", initial_scale=64.0, min_scale=32.0), "1111", [64, 32, 32, 32], id="naive.min_scale"),
        pytest.param(
            fp16("naive", initial_scale=64.0, max_scale=128.0, growth_interval=1),
            "000",
            [128] * 3,
            id="naive.max_scale",
        ),
    ],
)
def test_keys_of_the_loss_scale(config, pattern, expected):
    assert scales(config, pattern) == expected


def test_a_first_scale_outside_its_bounds():
    for options in ({"initial_scale": 2.0, "min_scale": 4.0}, {"initial_scale": 2.0**20, "max_scale": 2.0**10}):
        with pytest.raises(ConfigError, match=r"initial_scale=.* must lie between min_scale=.* and max_scale="):
            make_engine(fp16("naive", **options))


def test_a_static_scale_does_not_skip():
    engine = make_engine(fp16("naive", loss_scale=128.0))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    assert not engine.step().skipped
    assert engine.model.last.bias.isnan().all()


def test_naive_log_num_zeros_in_grad():
    engine = make_engine(fp16("naive", log_num_zeros_in_grad=True))
    x, y = make_data(8)
    x[:, 0] = 0  # the first layer's weight has zero gradients for this feature
    engine.backward(engine.criterion(engine(x), y))
    assert engine.step().num_zeros == 16
    assert train(make_engine(FP16_NAIVE), max_batches=1)[0].num_zeros is None


def test_naive_verbose(caplog):
    with caplog.at_level("INFO", "halfmesh"):
        scales(fp16("naive", initial_scale=64.0, growth_interval=1, verbose=True), "0")
        assert "loss scale 64 -> 128" in caplog.text
        caplog.clear()
        scales(fp16("naive", initial_scale=64.0, growth_interval=1), "0")
        assert "loss scale 64 -> 128" not in caplog.text


def test_bf16_is_not_fp16():
    assert make_engine({"bf16": {"mode": "naive"}}).model.last.weight.dtype == torch.bfloat16


def test_clip_grad_norm_and_its_norm_type():
    x, y = make_data(8)
    moved = {}
    for name, clip in {"off": 0.0, "2": 0.01, "inf": {"max_norm": 0.01, "norm_type": "inf"}}.items():
        engine = make_engine({"clip_grad_norm": clip}, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        before = full_weights(engine)
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        deltas = torch.cat([(w - before[n]).flatten() for n, w in full_weights(engine).items() if n != "tied.weight"])
        moved[name] = (deltas.norm().item(), deltas.abs().max().item())
    assert moved["off"][0] > 0.1
    assert moved["2"][0] == pytest.approx(0.01, rel=1e-3)
    assert moved["inf"][1] == pytest.approx(0.01, rel=1e-3)


def test_gradient_dtype():
    """Many small gradients on top of a large one: lost in bf16, kept in fp32."""
    moved = {}
    for dtype in ("auto", "float32"):
        engine = make_engine(
            BF16_NAIVE | {"gradient_dtype": dtype, "gradient_accumulation": 64, "loss_reduction": "sum"},
            model=nn.Linear(1, 1, bias=False),
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
            criterion=lambda o: o.sum(),
        )
        before = full_weights(engine)["weight"].item()
        for step in range(64):
            engine.backward(engine.criterion(engine(torch.full((1, 1), 512.0 if step == 0 else 1.0))))
            engine.step()
        moved[dtype] = before - full_weights(engine)["weight"].item()
    assert moved["auto"] == pytest.approx(512)
    assert moved["float32"] == pytest.approx(575)


def test_fused():
    for fused, expected in (("auto", True), (False, None)):
        engine = make_engine({"fused": fused}, optimizer=adamw)
        assert engine.optimizer.param_groups[0]["fused"] is expected


@pytest.mark.parametrize("choice", ["auto", "skip", "raise"])
def test_on_nonfinite(choice):
    engine = make_engine({"on_nonfinite": choice})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    if choice == "raise":
        with pytest.raises(NonFiniteError, match="gradients hold inf or nan"):
            engine.step()
    else:
        assert engine.step().skipped == (choice == "skip")
        assert bool(engine.model.last.bias.isnan().any()) == (choice == "auto")


def test_max_consecutive_skips():
    engine = make_engine(fp16("torch") | {"max_consecutive_skips": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    engine.step()
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    with pytest.raises(NonFiniteError, match=r"max_consecutive_skips=2"):
        engine.step()
    assert engine.global_step == 1


def test_track_grad_norm():
    assert train(make_engine(), max_batches=1)[0].grad_norm is None
    engine = make_engine({"track_grad_norm": True})
    assert engine.grad_norm is None
    (result,) = train(engine, max_batches=1)
    model = MLP()
    x, y = next(iter(make_loader()))
    nn.functional.cross_entropy(model(x), y).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert result.grad_norm == engine.grad_norm == pytest.approx(norm, rel=1e-5)


def time_limit(rank: int, world_size: int, port: int, timeout: float) -> float:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with make_engine({"timeout": timeout}) as engine:
        group = engine.context.dp_group
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=group)  # nobody else comes
            return 1.0
    return 0.0


@pytest.mark.distributed
def test_timeout():
    assert run_ranks(time_limit, 2, free_port(), 1.5, init=False, timeout=20) == [1.0, 0.0]


def test_gradient_accumulation_and_seed_are_keys_of_the_engine():
    assert [r is None for r in train(make_engine({"gradient_accumulation": 2}))] == [True, False] * 3


TESTED_HERE = {"fp16", "bf16", "clip_grad_norm", "gradient_dtype", "fused", "on_nonfinite", "max_consecutive_skips"}
TESTED_HERE |= {"track_grad_norm", "timeout", "gradient_accumulation"}
TESTED_ELSEWHERE = {
    "parallel",
    "loss_reduction",
    "lr_interval",
    "seed",
    "compile",
    "activation_checkpoint",
    "activation_offload",
    "checkpoint",
    "resume",
    "debug",
}


def test_every_key_is_tested():
    assert set(Settings.model_fields) == TESTED_HERE | TESTED_ELSEWHERE
    assert set(TorchOptions.model_fields) == {
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "enabled",
    }
    naive = {
        "loss_scale",
        "log_num_zeros_in_grad",
        "initial_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
    }
    assert set(NaiveOptions.model_fields) == naive | {"hysteresis", "max_scale", "min_scale", "verbose"}


def test_switching_amp_off_would_be_seen():
    """The weights of a half-precision run differ from fp32's by more than rounding in fp32 explains."""
    expected = reference(make_loader())
    for config in (fp16("torch"), fp16("naive"), {"bf16": {"mode": "torch"}}, {"bf16": {"mode": "naive"}}):
        engine = make_engine(config, optimizer=sgd)
        train(engine)
        weights = full_weights(engine)
        assert max((weights[n] - w).abs().max().item() for n, w in expected.state_dict().items()) > 1e-6
