"""The loop in one process: parity with plain torch, accumulation, resume, misuse."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from models import (
    BF16_NAIVE,
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    MatmulDtypes,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    sgd,
    train,
)
from torch import nn, optim

import halfmesh
from halfmesh.errors import InputError, NonFiniteError


@pytest.mark.parametrize("mode", MODES)
def test_parity_with_a_plain_fp32_loop(mode):
    """10 steps with a growth, an overflow, and clipping that bites in some steps and not in others."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()} | {"clip_grad_norm": 0.7}
    engine = make_engine(config, loader=make_loader(80))
    overflows = engine.loss_scale > 1
    norms, scales, step = [], [], 0
    for x, y in engine.dataloader:
        if step == 5 and overflows:  # one batch that overflows, between two good ones
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y) * math.inf)
            assert engine.step().skipped
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        result = engine.step()
        norms.append(result.grad_norm)
        scales.append(result.loss_scale)
        step += 1
    assert step == 10
    assert min(norms) < 0.7 < max(norms)
    if overflows:
        assert len(set(scales)) > 1
    expected = reference(make_loader(80), max_norm=0.7)
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]
    assert engine.skipped_steps == int(overflows)
    assert engine.global_step == 10 + int(overflows)


@pytest.mark.parametrize("mode", MODES)
def test_matrix_products_run_in_the_dtype_asked_for(mode):
    engine = make_engine(MODES[mode])
    expected = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[mode.rpartition("_")[2]]
    x, y = next(iter(engine.dataloader))
    with MatmulDtypes() as training:
        output = engine(x)
        engine.backward(engine.criterion(output, y))
    assert training.dtypes == {expected}
    engine.eval()
    with torch.no_grad(), MatmulDtypes() as evaluating:
        engine(x)
    assert evaluating.dtypes == {expected}
    weights = {"torch_fp16": torch.float32, "torch_bf16": torch.float32}.get(mode, expected)
    assert {p.dtype for p in engine.model.parameters()} == {weights}
    autocast = mode.startswith("torch")
    assert output.dtype == (expected if autocast else torch.float32)
    with engine.autocast():
        assert torch.is_autocast_enabled("cpu") == autocast


def test_custom_regions_are_honoured():
    class Careful(MLP):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.first(x)
                self.seen = x.dtype
            return self.last(self.norm(x))

    engine = make_engine(FP16_TORCH, model=Careful())
    assert engine(torch.randn(2, 8)).dtype == torch.float16
    assert engine.model.seen == torch.float32


def test_the_criterion_runs_in_the_forward_scope():
    seen = []

    def criterion(output, target):
        seen.append(torch.is_autocast_enabled("cpu"))
        return nn.functional.cross_entropy(output, target)

    for config in (FP16_TORCH, FP16_NAIVE):
        engine = make_engine(config, criterion=criterion)
        x, y = next(iter(engine.dataloader))
        assert engine.criterion(engine(x), y).dtype == torch.float32
    assert seen == [True, False]


# -- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_accumulation_equals_the_big_batch(mode, max_norm):
    """7 batches of 4 in cycles of 3: the last cycle has a single one, and counts as a batch of its own."""
    config = MODES[mode] | {"gradient_accumulation": 3, "clip_grad_norm": max_norm}
    engine = make_engine(config, loader=make_loader(28, 4))
    results = train(engine, epochs=2)
    assert [r is not None for r in results] == [False, False, True, False, False, True, True] * 2
    x, y = make_data(28)
    big = list(zip(x.split(12), y.split(12), strict=True))
    assert [len(b) for b, _ in big] == [12, 12, 4]
    expected = reference(big * 2, max_norm=max_norm)
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]


def test_own_loader_closes_a_cycle_early():
    engine = make_engine({"gradient_accumulation": 3})
    x, y = make_data(16)
    for i in range(4):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[i * 4 : i * 4 + 4]), y[i * 4 : i * 4 + 4]))
        result = engine.step(last=i == 3)
        assert (result is None) == (i in (0, 1))
    expected = reference([(x[:12], y[:12]), (x[12:], y[12:])])
    assert difference(full_weights(engine), expected) < 1e-5
    assert engine.global_step == 2


def test_own_loader_carries_a_cycle_over_an_epoch():
    engine = make_engine({"gradient_accumulation": 2})
    loader = list(make_loader(12, 4))  # 3 batches
    closed = []
    for _ in range(2):
        for x, y in loader:
            engine.backward(engine.criterion(engine(x), y))
            closed.append(engine.step() is not None)
            engine.zero_grad()
    assert closed == [False, True, False, True, False, True]


def test_zero_grad_inside_a_cycle_does_nothing_also_the_optimizers_own():
    engine = make_engine({"gradient_accumulation": 2})
    x, y = make_data(8)
    for half in (slice(0, 4), slice(4, 8)):
        engine.zero_grad()
        engine.optimizer.zero_grad()
        engine.backward(engine.criterion(engine(x[half]), y[half]))
        engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_the_optimizers_zero_grad_reaches_working_and_master_gradients(mode):
    engine = make_engine(MODES[mode])
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.optimizer.zero_grad()
    assert all(p.grad is None for p in engine.model.parameters())
    assert all(p.grad is None for group in engine.optimizer.param_groups for p in group["params"])
    with pytest.raises(InputError, match=r"engine.step\(\) was called before engine.backward"):
        engine.step()


def test_a_forgotten_zero_grad_does_no_harm():
    x, y = make_data(8)
    for config in (FP16_TORCH, FP16_NAIVE):
        engine = make_engine(config)
        for _ in range(3):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        assert difference(full_weights(engine), reference([(x, y)] * 3)) < 4e-4


def test_gradients_older_than_the_engine_do_not_count():
    x, y = make_data(8)
    model = MLP()
    nn.functional.cross_entropy(model(x), y).backward()
    engine = make_engine(FP16_TORCH, model=model)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 2e-4


def test_a_backward_of_the_users_own_before_the_engines_counts():
    def run(with_engine):
        model = MLP()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        engine = make_engine(model=model, optimizer=optimizer) if with_engine else None
        x, y = make_data(8)
        for _ in range(3):
            optimizer.zero_grad()
            model.first.weight.square().sum().backward()
            loss = nn.functional.cross_entropy(model(x), y)
            engine.backward(loss) if engine else loss.backward()
            engine.step() if engine else optimizer.step()
        return dict(model.state_dict())

    torch.testing.assert_close(run(True), run(False))


def test_two_backwards_before_a_step_add_up():
    engine = make_engine()
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y) * 0.25)
    engine.backward(engine.criterion(engine(x), y) * 0.75)
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_loss_reduction_sum():
    engine = make_engine(
        {"loss_reduction": "sum", "gradient_accumulation": 2},
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        loader=make_loader(24, 4),
    )
    train(engine)
    x, y = make_data(24)
    big = zip(x.split(8), y.split(8), strict=True)
    assert difference(full_weights(engine), reference(big, reduction="sum")) < 1e-5


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_loss_reduction_weighted(mode):
    """Batches of 5 and 3 samples: equal to one batch of 8, which the mean of two means is not."""

    def criterion(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    config = MODES[mode] | {"loss_reduction": "weighted", "gradient_accumulation": 2, "clip_grad_norm": 0.8}
    engine = make_engine(config, criterion=criterion)
    x, y = make_data(24)
    for begin in range(0, 24, 8):
        for part in (slice(begin, begin + 5), slice(begin + 5, begin + 8)):
            engine.backward(engine.criterion(engine(x[part]), y[part]))
            engine.step()
    big = zip(x.split(8), y.split(8), strict=True)
    assert difference(full_weights(engine), reference(big, max_norm=0.8)) < TOLERANCES[mode]


def test_weighted_with_nothing_to_count():
    engine = make_engine({"loss_reduction": "weighted"}, criterion=lambda o, t: (o.sum() * 0, 0))
    before = full_weights(engine)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)


# -- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_clip_grad_norm_on_the_engine(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, loader=make_loader(24, 4))
    x, y = make_data(24)
    expected = reference([])
    optimizer = sgd(expected.parameters())
    for i, (a, b) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(a), b))
        if i % 2 == 0:
            with pytest.raises(InputError, match="on microbatch 1 of 2, where gradients are incomplete"):
                engine.clip_grad_norm_(0.3)
        else:
            optimizer.zero_grad()
            part = slice((i - 1) * 4, (i + 1) * 4)
            nn.functional.cross_entropy(expected(x[part]), y[part]).backward()
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            assert engine.clip_grad_norm_(0.3).item() == pytest.approx(norm.item(), rel=5e-3)
            optimizer.step()
        engine.step()
    assert difference(full_weights(engine), expected) < TOLERANCES[mode]


def test_clip_grad_norm_before_backward():
    with pytest.raises(InputError, match=r"clip_grad_norm_ was called before engine.backward"):
        make_engine().clip_grad_norm_(1.0)


# -- schedulers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_lr_of_every_update_skips_not_counted(mode):
    engine = make_engine(MODES[mode], lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    rates = []
    for i in range(6):
        loss = engine.criterion(engine(x), y)
        engine.zero_grad()
        engine.backward(loss * math.inf if i in (0, 3) and mode != "none" else loss)
        rates.append(engine.step().lr)
    if mode == "none":
        expected = [0.05 * 0.5**i for i in range(6)]
    else:
        expected = [0.05 * 0.5**taken for taken in (0, 0, 1, 2, 2, 3)]
    assert rates == pytest.approx(expected)
    engine.state_dict()  # settles the last one
    assert engine.lr_scheduler.get_last_lr()[0] == pytest.approx(0.05 * 0.5 ** (6 if mode == "none" else 4))


def test_without_skips_the_scheduler_advances_at_once():
    engine = make_engine(lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize(("interval", "advanced"), [("step", 12), ("epoch", 2), ("manual", 0)])
def test_lr_interval(interval, advanced):
    engine = make_engine(
        FP16_TORCH | {"lr_interval": interval}, lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
    )
    train(engine, epochs=2)
    assert engine.lr_scheduler.last_epoch == advanced


def test_a_scheduler_given_as_an_object_keeps_working_on_masters():
    model = MLP()
    optimizer = adamw(model.parameters())
    scheduler = halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=10)
    loader = make_loader()
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, FP16_NAIVE, lr_scheduler=scheduler)
    rates = [r.lr for r in train(engine)]
    assert len(set(rates)) == 6
    assert engine.lr_scheduler is scheduler


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_bitwise_resume(mode):
    """Dropout, shuffling, accumulation, a growth ahead; through torch.save."""
    growing = {"growth_interval": 3} if "fp16" in mode else {}
    config = {key: {**value, **growing} for key, value in MODES[mode].items()}
    config |= {"gradient_accumulation": 2, "clip_grad_norm": 1.0}

    def make():
        return make_engine(
            config,
            model=MLP(dropout=0.3),
            optimizer=adamw,
            loader=make_loader(40, 4, shuffle=True),
            lr_scheduler=lambda o: halfmesh.CosineAnnealingWarmupLR(o, total_steps=50, warmup_steps=3),
        )

    torch.manual_seed(11)
    engine = make()
    train(engine, epochs=2)
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    expected_results = [repr(r) for r in train(engine, epochs=2)]
    torch.manual_seed(12)
    other = make()
    train(other, epochs=1)  # state of its own, to be overwritten
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [repr(r) for r in train(other, epochs=2)] == expected_results
    torch.testing.assert_close(full_weights(other), full_weights(engine), rtol=0, atol=0)
    torch.testing.assert_close(other.model.state_dict(), engine.model.state_dict(), rtol=0, atol=0)
    assert other.global_step == engine.global_step
    assert other.dataloader.epoch == engine.dataloader.epoch == 3


def test_state_holds_full_precision_weights_of_tied_parameters_too():
    engine = make_engine(FP16_NAIVE)
    train(engine)
    weights = engine.state_dict()["model"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert weights["tied.weight"] is weights["again.weight"] or torch.equal(
        weights["tied.weight"], weights["again.weight"]
    )


def test_state_refusals():
    engine = make_engine(FP16_TORCH | {"gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    with pytest.raises(InputError, match=r"state_dict\(\) was called after microbatch 1 of 2"):
        engine.state_dict()
    with pytest.raises(InputError, match=r"not the state of an engine: model, update, .* missing"):
        engine.load_state_dict({"epoch": 1})
    state = make_engine().state_dict()
    with pytest.raises(InputError, match="saved without a loss scale, but this engine trains with a loss scale"):
        engine.load_state_dict(state)


def test_loading_the_model_reaches_the_masters():
    engine = make_engine(FP16_NAIVE)
    saved = MLP(seed=5).state_dict()
    engine.model.load_state_dict(saved)
    torch.testing.assert_close(full_weights(engine), dict(saved), rtol=0, atol=0)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)], model=MLP(seed=5))) < 4e-4


EDITS = {
    "in place": lambda model: nn.init.constant_(model.last.weight, 3.0),
    "submodule loaded": lambda model: model.last.load_state_dict(
        {"weight": torch.full_like(model.last.weight, 3.0), "bias": model.last.bias.detach()}
    ),
    "new data": lambda model: setattr(model.last.weight, "data", torch.full_like(model.last.weight, 3.0)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16"])
def test_weights_written_by_others_are_not_undone(mode, edit):
    engine = make_engine(MODES[mode], optimizer=lambda p: optim.SGD(p, lr=1e-3))
    train(engine)
    before = full_weights(engine)
    EDITS[edit](engine.model)
    assert full_weights(engine)["last.weight"].unique().tolist() == [3.0]
    torch.testing.assert_close(full_weights(engine)["last.bias"], before["last.bias"], rtol=0, atol=0)
    train(engine, max_batches=1)
    assert (full_weights(engine)["last.weight"] - 3.0).abs().max().item() < 0.05
    assert not torch.equal(full_weights(engine)["last.weight"], torch.full_like(before["last.weight"], 3.0))


def test_copies_of_the_model_are_independent():
    """As an average of the weights (EMA) makes one, and torch.save of the whole module."""
    engine = make_engine(FP16_NAIVE)
    file = io.BytesIO()
    torch.save(engine.model, file)
    file.seek(0)
    before = full_weights(engine)
    for other in (copy.deepcopy(engine.model), torch.load(file, weights_only=False)):
        other.load_state_dict(MLP(seed=5).state_dict())
        torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)
        torch.testing.assert_close(other.last.bias, MLP(seed=5).last.bias.half(), rtol=0, atol=0)
    assert copy.deepcopy(engine.optimizer).param_groups[0]["lr"] == 0.05


# -- what is refused or stopped --------------------------------------------------------------------------------------


def test_nan_from_the_first_step_stops_with_a_diagnosis():
    class Broken(MLP):
        def forward(self, x):
            return super().forward(x) * self.norm.weight.new_tensor(math.nan)

    engine = make_engine(FP16_NAIVE | {"max_consecutive_skips": 12}, model=Broken())
    with pytest.raises(NonFiniteError) as caught:
        train(engine, epochs=10)
    message = str(caught.value)
    assert "12 updates in a row had gradients with inf or nan" in message
    assert "first parameter with a non-finite gradient is 'first.weight'" in message
    assert "has reached its floor, min_scale=1" in message
    assert engine.global_step == 11


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"), r"scalar loss, but its shape is \(8,\)"),
        (lambda o, y: 1.0, "takes the loss tensor, but a float was given"),
        (lambda o, y: (o.sum(), 8), r"a tuple was given; for a criterion that returns \(sum, weight\)"),
        (lambda o, y: o.argmax(), "floating-point loss, but its dtype is torch.int64"),
        (lambda o, y: o.sum().detach(), "the loss has no graph to run backward through"),
    ],
)
def test_losses_that_are_not_scalars_with_a_graph(loss, message):
    engine = make_engine(criterion=loss)
    x, y = make_data(8)
    with pytest.raises(InputError, match=message):
        engine.backward(engine.criterion(engine(x), y))


def test_weighted_needs_a_pair():
    engine = make_engine({"loss_reduction": "weighted"})
    x, y = make_data(8)
    with pytest.raises(InputError, match=r"takes \(sum, weight\) from the criterion, but a Tensor was given"):
        engine.backward(engine.criterion(engine(x), y))


def test_misuse_of_the_engine():
    engine = make_engine(criterion=None)
    with pytest.raises(TypeError, match="initialize returns one Engine, not Colossal-AI's tuple"):
        _model, _optimizer, *_ = engine
    with pytest.raises(InputError, match="no criterion was given to initialize"):
        engine.criterion(1, 2)
    with pytest.raises(InputError, match=r"engine.step\(\) was called before engine.backward"):
        engine.step()
    with pytest.raises(InputError, match="loss_id=1 was given, but only mode='apex' has several losses"):
        engine.backward(torch.tensor(1.0), loss_id=1)
    with pytest.raises(NotImplementedError, match=r"engine.save is not built yet; use torch.save"):
        engine.save("here")
    with pytest.raises(NotImplementedError, match=r"engine.load is not built yet; use engine.load_state_dict"):
        engine.load("here")


def test_a_cycle_that_was_left_early_can_be_closed():
    engine = make_engine({"gradient_accumulation": 4}, loader=make_loader(16, 4))
    for _i, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        assert engine.step() is None
        if _i == 1:
            break
    assert engine.step(last=True) is not None
    x, y = make_data(16)
    assert difference(full_weights(engine), reference([(x[:8], y[:8])])) < 1e-5
    assert [r is not None for r in train(engine)] == [False, False, False, True]


def test_evaluation_over_the_training_loader_inside_an_epoch():
    engine = make_engine(
        {"gradient_accumulation": 3, "lr_interval": "epoch"},
        loader=make_loader(32, 4),
        lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1),
    )
    closed = []
    for i, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        if i in (2, 7):
            with torch.no_grad():
                for a, _ in engine.dataloader:
                    engine(a)
        closed.append(engine.step() is not None)
    assert [i for i, done in enumerate(closed) if done] == [2, 5, 7]
    assert engine.lr_scheduler.last_epoch == 1


def test_an_error_in_step_does_not_spoil_the_next():
    engine = make_engine({"on_nonfinite": "raise", "gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    with pytest.raises(NonFiniteError):
        engine.step()
    before = full_weights(engine)
    torch.testing.assert_close(before, dict(MLP().state_dict()), rtol=0, atol=0)
    for half in (slice(0, 4), slice(4, 8)):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[half]), y[half]))
        result = engine.step()
    assert result is not None
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_an_error_in_backward_leaves_no_half_gradient():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("out of memory")

    engine = make_engine({"gradient_accumulation": 2})
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    broken = engine.model.last(Fails.apply(engine.model.norm(engine.model.first(x)))).sum()
    with pytest.raises(MemoryError):
        engine.backward(broken)
    for half in (slice(0, 4), slice(4, 8)):
        engine.backward(engine.criterion(engine(x[half]), y[half]))
        engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_a_discarded_weighted_loss_does_not_count():
    def criterion(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)

    engine = make_engine({"loss_reduction": "weighted"}, criterion=criterion)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_clip_in_a_short_last_cycle():
    engine = make_engine(
        {"gradient_accumulation": 3}, loader=make_loader(16, 4), optimizer=lambda p: optim.SGD(p, lr=1.0)
    )
    x, y = make_data(16)
    for i, (a, b) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(a), b))
        if i == 3:
            before = MLP()
            before.load_state_dict(engine.model.state_dict())
            nn.functional.cross_entropy(before(x[12:]), y[12:]).backward()
            expected = nn.utils.clip_grad_norm_(before.parameters(), 0.1)
            assert engine.clip_grad_norm_(0.1).item() == pytest.approx(expected.item(), rel=1e-4)
            optim.SGD(before.parameters(), lr=1.0).step()
        engine.step()
    assert difference(full_weights(engine), before) < 1e-5


def test_loading_inside_a_cycle_begins_a_new_one():
    engine = make_engine({"gradient_accumulation": 2})
    state = copy.deepcopy(engine.state_dict())
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y) * 100)
    engine.step()
    engine.load_state_dict(state)
    for half in (slice(0, 4), slice(4, 8)):
        engine.backward(engine.criterion(engine(x[half]), y[half]))
        engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5
    with pytest.raises(InputError, match=r"engine.load_state_dict takes what engine.state_dict\(\) gave"):
        engine.load_state_dict(None)


def test_resume_repeats_no_epoch_with_a_generator_of_the_loader():
    def orders(engine, epochs):
        return [[y.tolist() for _, y in engine.dataloader] for _ in range(epochs)]

    def make():
        data = make_loader(24).dataset
        return make_engine(loader=halfmesh.get_dataloader(data, batch_size=8, shuffle=True))

    whole = orders(make(), 3)
    first = make()
    orders(first, 1)
    state = copy.deepcopy(first.state_dict())
    second = make()
    second.load_state_dict(state)
    assert orders(second, 2) == whole[1:]


def test_a_scheduler_stepped_by_hand_as_well():
    engine = make_engine(lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.lr_scheduler.step()
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(
        InputError, match=r"lr_scheduler.step\(\) was called outside the engine, .* lr_interval='manual'"
    ):
        engine.step()


def test_two_engines_on_one_model_do_not_clear_each_others_gradients():
    def run(with_engines):
        model = MLP()
        parts = [list(model.first.parameters()), list(model.last.parameters())]
        optimizers = [optim.SGD(part, lr=0.1) for part in parts]
        engines = [make_engine(model=model, optimizer=o) for o in optimizers] if with_engines else []
        x, y = make_data(8)
        for _ in range(2):
            for i, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                engines[i].backward(loss) if with_engines else loss.backward()
            for i, optimizer in enumerate(optimizers):
                engines[i].step() if with_engines else optimizer.step()
        return model.state_dict()

    torch.testing.assert_close(run(True), run(False))


def test_retain_graph():
    engine = make_engine()
    x, y = make_data(8)
    loss = engine.criterion(engine(x), y)
    engine.backward(loss * 0.5, retain_graph=True)
    engine.backward(loss * 0.5)
    engine.step()
    assert difference(full_weights(engine), reference([(x, y)])) < 1e-5


def test_assigning_parameters_is_refused():
    engine = make_engine()
    with pytest.raises(InputError, match=r"load_state_dict\(..., assign=True\) has replaced the model's parameters"):
        engine.model.load_state_dict(MLP(seed=3).state_dict(), assign=True)


def test_loaders_that_were_not_given():
    engine = halfmesh.initialize(MLP(), sgd, config={})
    with pytest.raises(InputError, match="no dataloader was given to initialize"):
        iter(engine.dataloader)
    with pytest.raises(InputError, match="no eval_dataloader was given to initialize"):
        iter(engine.eval_dataloader)


def test_a_closed_engine_and_a_second_one_over_the_same_objects():
    model = MLP()
    optimizer = adamw(model.parameters())
    for _ in range(2):
        engine = halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), FP16_NAIVE)
        with pytest.raises(InputError, match="optimizer: it belongs to another engine; close that one first"):
            halfmesh.initialize(model, optimizer, config=FP16_NAIVE)
        train(engine)
        weights = full_weights(engine)
        engine.close()
        engine.close()
        torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    x, y = make_data(8)
    for call in (lambda: engine(x), lambda: engine.backward(engine.criterion(model(x), y)), engine.step):
        with pytest.raises(InputError, match="this engine is closed; call the model itself, or make a new engine"):
            call()


def test_close_gives_model_and_optimizer_back():
    engine = make_engine()
    optimizer = engine.optimizer
    with pytest.raises(InputError, match="called outside the engine"):
        optimizer.step()
    with engine:
        train(engine)
    optimizer.zero_grad()
    optimizer.step()
    assert "zero_grad" not in vars(optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_close_within_a_cycle_leaves_nothing_behind(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, optimizer=adamw)
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    engine.close()
    group = engine.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, None)
    assert all(p.grad is None for p in engine.model.parameters())
    before = copy.deepcopy(engine.model.state_dict())
    engine.optimizer.step()
    torch.testing.assert_close(engine.model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_model_given_in_half_precision_goes_on_after_close(make):
    model = MLP().bfloat16()
    optimizer = make(model.parameters())
    with halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, make_loader(), BF16_NAIVE) as engine:
        train(engine)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    before = copy.deepcopy(model.state_dict())
    x, y = make_data(8)
    nn.functional.cross_entropy(model(x.bfloat16()), y).backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved >= {"first.weight", "again.weight", "last.weight"}  # what is near 1 moves by less than bf16 can show


def test_two_engines_in_one_process():
    first, second = make_engine(FP16_NAIVE), make_engine({"gradient_accumulation": 2})
    for (x, y), _ in zip(first.dataloader, range(4), strict=False):
        for engine in (first, second):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    assert (first.global_step, second.global_step) == (4, 2)
    assert (first.loss_scale, second.loss_scale) == (256.0, 1.0)


# -- a model's own fp16 loss -----------------------------------------------------------------------------------------


class OwnLoss(MLP):
    def forward(self, x, y):
        return {"loss": nn.functional.cross_entropy(super().forward(x), y)}


def test_a_models_own_fp16_loss_caps_the_scale(caplog):
    engine = make_engine({"fp16": {"mode": "naive"}}, model=OwnLoss())
    x, y = make_data(8)
    with caplog.at_level("WARNING", "halfmesh"):
        for _ in range(2):
            engine.backward(engine(x, y)["loss"])
            assert not engine.step().skipped
            engine.zero_grad()
    assert engine.loss_scale == 2.0**15
    assert caplog.text.count("the loss scale is kept at or below 32768: the loss itself is fp16") == 1
    static = make_engine({"fp16": {"mode": "naive", "loss_scale": 65536.0}}, model=OwnLoss())
    with pytest.raises(InputError, match="the static loss_scale 65536 cannot be used"):
        static.backward(static(x, y)["loss"])
    untouched = make_engine({"fp16": {"mode": "naive"}})
    untouched.backward(untouched.criterion(untouched(x), y))
    assert untouched.loss_scale == 2.0**16


# -- autocast's cache ------------------------------------------------------------------------------------------------


def test_a_scope_around_the_loop_does_not_keep_old_weights():
    engine = make_engine(FP16_TORCH)
    x, y = make_data(8)
    with engine.autocast():
        for _ in range(3):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            engine.zero_grad()
    assert difference(full_weights(engine), reference([(x, y)] * 3)) < 2e-4


def test_parameters_frozen_and_added_later():
    model = MLP()
    model.last.requires_grad_(False)
    engine = make_engine(FP16_NAIVE, model=model, optimizer=lambda _: sgd([*model.first.parameters()]))
    before = copy.deepcopy(model.state_dict())
    x, y = make_data(8)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {"first.weight", "first.bias"}
    model.last.requires_grad_(True)
    engine.optimizer.add_param_group({"params": list(model.last.parameters())})
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    assert not torch.equal(model.last.weight, before["last.weight"])
    assert {p.dtype for g in engine.optimizer.param_groups for p in g["params"]} == {torch.float32}
