"""The loop in one process: parity with plain torch, dtypes, misuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import (
    COMPUTE_DTYPES,
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    MatmulDtypes,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
    step_on,
)

X, Y = make_data(8)


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


def test_the_count_of_updates_can_be_set(tmp_path):
    """A run that continues the checkpoint of another program goes on counting there."""
    engine = make_engine({})
    engine.global_step = 100
    step_on(engine, X, Y)
    assert engine.global_step == 101
    assert engine.save(tmp_path).name == "step-00000101"


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


class Looks(nn.Module):
    """Notes its scopes, one of which is its own. Fails on zeros."""

    def __init__(self):
        super().__init__()
        self.careful, self.inner = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        if x.sum() == 0:
            raise LookupError("no data")
        with torch.autocast("cpu", enabled=False):
            self.dtype = self.careful(x).dtype
        self.cache = torch.is_autocast_cache_enabled()
        return self.inner(x)


@pytest.mark.promise("fp16, bf16, regions without autocast")
@pytest.mark.parametrize("mode", ["torch_fp16", "apex_o1"])
def test_scopes_of_autocast_are_honoured_and_left_as_they_were(mode):
    """The model's own; after a call, after an error, and within a scope of the user's."""
    engine = make_engine(MODES[mode], model=Looks())
    x = torch.ones(2, 4)
    assert engine(x).dtype == torch.float16
    assert engine.model.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(LookupError):
        engine(torch.zeros(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    assert engine.model.cache == (mode == "torch_fp16"), "O1 keeps no casts"
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        engine(x)
        assert not engine.model.cache


def test_the_criterion_runs_in_the_forward_scope():
    seen = []

    def criterion(output, target):
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(output, target)

    for config in (FP16_TORCH, FP16_NAIVE):
        engine = make_engine(config, criterion=criterion)
        assert engine.criterion(engine(X), Y).dtype == torch.float32
    assert seen == [True, False]


def test_a_scope_around_the_loop_does_not_keep_old_weights():
    engine = make_engine(FP16_TORCH)
    with engine.autocast():
        for _ in range(3):
            step_on(engine, X, Y)
            engine.zero_grad()
    assert difference(full_weights(engine), reference([(X, Y)] * 3)) < 2e-4
    engine = make_engine({"bf16": {"mode": "torch"}}, model=Looks())
    with torch.autocast("cpu", torch.bfloat16):
        engine(torch.ones(1, 4))
        engine.model.inner.weight.data.fill_(2.0)  # which torch does not count as a change
        engine.zero_grad()
        assert engine(torch.ones(1, 4)).tolist() == [[8.0] * 4]


class OwnLoss(MLP):
    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(super().forward(x), y)}


def test_a_scale_that_is_too_large_for_an_fp16_loss_backs_off_or_is_rejected():
    """A static one would make every gradient inf. Of the criterion's loss in fp32 any scale is fine."""
    engine = make_engine({"fp16": {"mode": "naive", "hysteresis": 1}}, model=OwnLoss())
    skipped = []
    for _ in range(3):
        engine.backward(engine(X, Y)["loss"])
        skipped.append(engine.step().skipped)
    assert (skipped, engine.loss_scale) == ([True, False, False], 2.0**15)
    config = {"fp16": {"mode": "naive", "loss_scale": 65536.0}}
    engine = make_engine(config, model=OwnLoss())
    with pytest.raises(InputError, match=r"the static loss_scale 65536 is too large.* largest .* 32768.*fp32"):
        engine(X, Y)
    with torch.no_grad():
        engine(X, Y)
    engine = make_engine(config)
    assert not step_on(engine, X, Y).skipped
    with pytest.raises(InputError, match="the static loss_scale 65536 is too large"):
        engine.backward(engine.criterion(engine(X), Y).half())


@pytest.mark.parametrize(
    ("loss", "reduction", "message"),
    [
        (lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"), "mean", r"scalar loss, .* is \(8,\)"),
        (lambda o, y: 1.0, "mean", "takes the loss tensor, but got a float"),
        (lambda o, y: (o.sum(), 8), "mean", r"a tuple; if the criterion returns \(sum, weight\)"),
        (lambda o, y: o.sum().detach(), "mean", "the loss has no graph to run backward through"),
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
        (lambda: engine.backward(torch.tensor(1.0), loss_id=1), "loss_id=1 is not allowed with 1 loss"),
        (lambda: iter(engine.dataloader), "no dataloader was given to initialize"),
        (lambda: iter(engine.eval_dataloader), "no eval_dataloader was given to initialize"),
        (
            lambda: engine.model.load_state_dict(MLP(seed=3).state_dict(), assign=True),
            r"assign=True\) would replace the parameters that the optimizer",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(TypeError, match="initialize returns one Engine"):
        _, *_ = engine
