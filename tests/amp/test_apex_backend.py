"""backend="apex": what is refused, what is called, and that it trains as backend="native" does.

Most of it runs against a stand-in for apex.amp. What is at the end wants the real one.
"""

import copy
import gc
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import halfmesh
from halfmesh.amp import apex_backend
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError, NonFiniteError
from tests.support.apex_reference import Scaler
from tests.support.apex_runs import LEVELS, SHAPES, BatchNormMLP, make_batches, make_optimizer, train
from tests.support.apex_stand_in import close_live, install
from tests.support.ranks import run_ranks

CUDA = torch.device("cuda")
BATCHES = make_batches(SHAPES["mlp"], 14)
RNN_FUNCTIONS = vars(nn.modules.rnn)["_VF"]
OVERFLOWS = {2: 1e9, 5: math.inf, 6: math.nan}


@pytest.fixture
def amp(monkeypatch):
    yield install(monkeypatch)
    close_live()


def rounded(model):
    """With weights that half precision can hold: apex makes its masters from those."""
    for param in model.parameters():
        param.data = param.data.half().float()
    return model


def make_engine(level, backend="apex", model=None, optimizer=None, config=None, scheduler=None, device="cpu", **keys):
    model = rounded(BatchNormMLP()) if model is None else model
    optimizer = optimizer or make_optimizer("sgd")(model)
    fp16 = {"mode": "apex", "opt_level": level, "backend": backend, **keys}
    config = {"fp16": fp16, "fused": False} | (config or {})
    return halfmesh.initialize(model, optimizer, F.cross_entropy, None, config, lr_scheduler=scheduler, device=device)


def on_both(run):
    """What `run(backend)` returns for both."""
    mine = run("apex")
    close_live()
    return mine, run("native")


def assert_close(mine, theirs, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)


def state_of(engine):
    """A copy of the model's entry."""
    return {name: value.clone() for name, value in engine.state_dict()["model"].items()}


# -- what is refused -------------------------------------------------------------------------------------------


def test_an_apex_that_is_missing_too_new_or_broken(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "apex", None)
    problem = apex_backend.find_problem(CUDA)
    assert "NVIDIA's apex is not installed; build it from https://github.com/NVIDIA/apex at tag 25.05" in problem
    assert problem.endswith("or use backend='native', which needs no apex")
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.delitem(sys.modules, "apex.amp", raising=False)
    assert "has no amp, which NVIDIA removed in May 2025" in apex_backend.find_problem(CUDA)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("import module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex")
    assert "cannot be imported (ModuleNotFoundError: No module named 'module_that" in apex_backend.find_problem(CUDA)


def test_what_apex_cannot_do_is_refused_before_anything_is_changed(amp, monkeypatch):
    model = BatchNormMLP()
    with pytest.raises(ConfigError, match=r"num_losses=2 with backend='apex'.*remove it, or use backend='native'"):
        make_engine("O2", model=model, num_losses=2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "enabled", False)
        assert "cudnn.enabled=False; set it to True" in apex_backend.find_problem(CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(apex_backend, "DEVICES", frozenset({"cuda"}))
        with pytest.raises(IncompatibleConfigError, match="takes CUDA tensors only, and the device is cpu; train on a"):
            make_engine("O2", model=model)
    with pytest.raises(InputError, match=r"float32 only, but first.weight, .* are not; call model.float\(\)"):
        make_engine("O1", model=BatchNormMLP().double())
    assert all(param.dtype == torch.float32 for param in model.parameters())
    assert not amp.calls


def test_a_second_engine_while_there_is_a_first(amp):
    first = make_engine("O2")
    with pytest.raises(IncompatibleConfigError, match="another engine uses; close that one first"):
        make_engine("O2")
    make_engine("O2", backend="native").close()
    first.close()
    make_engine("O2").close()
    linear = F.linear
    engine = make_engine("O1")
    assert F.linear is not linear
    del engine  # not closed, but nobody has it any more
    make_engine("O1").close()
    assert F.linear is linear


def test_a_parameter_that_is_unfrozen_later(amp):
    """apex makes no master of it, and would step it with a gradient that is still scaled."""
    model = BatchNormMLP()
    model.last.weight.requires_grad_(False)
    engine = make_engine("O2", model=model)
    train(engine, BATCHES[:1])
    model.last.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"last.weight were frozen at initialize"):
        train(engine, BATCHES[:1])


# -- training --------------------------------------------------------------------------------------------------


def test_what_apex_is_asked_for(amp):
    make_engine("O2", keep_batchnorm_fp32=False, cast_model_outputs="float16", verbosity=2).close()
    make_engine("O3", loss_scale=64.0).close()
    nothing = dict.fromkeys(("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights"))
    rest = nothing | {"loss_scale": None, "cast_model_outputs": None, "min_loss_scale": None, "max_loss_scale": 2.0**24}
    assert amp.calls == [
        ("O2", 2, rest | {"keep_batchnorm_fp32": False, "cast_model_outputs": torch.float16}),
        ("O3", 0, rest | {"loss_scale": 64.0}),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("optimizer", "scale"), [("sgd", None), ("adam", "dynamic"), ("sgd", 128.0)])
def test_training(amp, level, optimizer, scale):
    def run(backend):
        model = rounded(BatchNormMLP())
        engine = make_engine(level, backend, model, make_optimizer(optimizer)(model), loss_scale=scale)
        dynamic = scale == "dynamic" or (scale is None and level in ("O1", "O2"))
        curve = train(engine, BATCHES, OVERFLOWS if dynamic else {})
        return curve, engine.skipped_steps, engine.loss_scale, engine.global_step, state_of(engine)

    (mine, *my_counts, my_weights), (theirs, *their_counts, their_weights) = on_both(run)
    assert (mine.skipped, mine.scales, my_counts) == (theirs.skipped, theirs.scales, their_counts)
    assert_close(mine.losses, theirs.losses)
    assert_close(my_weights, their_weights)


@pytest.mark.parametrize(("level", "reduction"), [("O0", "mean"), ("O1", "mean"), ("O2", "weighted"), ("O3", "mean")])
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_accumulation_with_a_short_last_cycle(amp, level, reduction, clip):
    """apex reads gradients in fp16 only; what that loses of their sum reaches the masters' gradients all the same."""

    def run(backend):
        config = {"gradient_accumulation": 4, "loss_reduction": reduction, "clip_grad_norm": clip}
        engine = make_engine(level, backend, config=config, loss_scale=1024.0)
        results = []
        for i, (x, y) in enumerate(BATCHES):
            total = F.cross_entropy(engine(x).float(), y, reduction="sum")
            engine.backward((total, torch.tensor(float(len(y)))) if reduction == "weighted" else total / len(y))
            results.append(engine.step(last=i == len(BATCHES) - 1))
        results = [result for result in results if result is not None]
        return [r.grad_norm for r in results], [r.loss_scale for r in results], state_of(engine)

    mine, theirs = on_both(run)
    assert len(mine[0]) == 4
    assert mine[1] == theirs[1]
    # The norm that clips is that of the gradients as apex gets them, in half precision.
    assert_close(
        [mine[0], mine[2]], [theirs[0], theirs[2]], *((1e-4, 1e-4) if level == "O2" and clip else (1e-6, 1e-7))
    )


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_verdict_is_that_of_apex(amp, level, monkeypatch):
    """Without its kernels apex adds gradients up to find inf, and the sum may be inf where no gradient is."""
    engine = make_engine(level)
    before = state_of(engine)
    monkeypatch.setattr(amp.scaler, "judge", lambda overflow: Scaler.judge(amp.scaler, True))
    assert train(engine, BATCHES[:2]).skipped == [True, True]
    assert (engine.skipped_steps, engine.loss_scale) == (2, 2.0**14)
    weights = {name: value for name, value in state_of(engine).items() if name.endswith(("weight", "bias"))}
    assert_close(weights, {name: before[name] for name in weights}, 0, 0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_added_later_and_weights_written_by_others(amp, level):
    def run(backend):
        model = rounded(BatchNormMLP())
        for x, y in BATCHES[:2]:  # the optimizer has state already
            optimizer = optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.05, momentum=0.9)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        engine = make_engine(level, backend, rounded(model), optimizer, {"track_grad_norm": True})
        train(engine, BATCHES[:3])
        engine.optimizer.add_param_group({"params": [model.again.weight, model.last.weight], "lr": 0.01})
        train(engine, BATCHES[3:8])
        with torch.no_grad():
            engine.model.first.weight.clamp_(-0.1, 0.1)
        engine.model.load_state_dict(engine.model.state_dict() | {"last.bias": torch.full((4,), 0.5)})
        engine.backward(engine.criterion(engine(BATCHES[8][0]), BATCHES[8][1]))
        norm = engine.step().grad_norm
        masters = sorted(engine.state_dict()["update"]["masters"])
        return masters, [p.dtype for p in engine.master_params()], norm, state_of(engine)

    mine, theirs = on_both(run)
    assert mine[:2] == theirs[:2]
    assert_close(mine[2:], theirs[2:])


def test_o1_reaches_the_criterion_and_is_off_within_autocast_false_and_after_an_error(amp):
    cross_entropy = F.cross_entropy  # looked up before apex exchanges it
    engine = make_engine("O1", config={"on_nonfinite": "raise"})
    x, y = BATCHES[0]
    output = engine(x)
    assert (cross_entropy(output, y).dtype, engine.criterion(output, y).dtype) == (torch.float16, torch.float32)
    with engine.autocast(enabled=False):
        assert engine(x).dtype == torch.float32
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    with pytest.raises(NonFiniteError):
        engine.step()
    assert engine(x).dtype == torch.float16


# -- state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("first", "second"), [("apex", "native"), ("native", "apex")])
def test_a_checkpoint_of_one_loads_in_the_other(amp, level, first, second):
    def run(first, second):
        scale = {"loss_scale": "dynamic", "min_loss_scale": 2.0**15}
        engine = make_engine(level, first, **scale)
        train(engine, BATCHES[:7], OVERFLOWS)
        state = copy.deepcopy(engine.state_dict())
        engine.close()
        state["update"]["scalers"][0]["growth_tracker"] = 1997
        engine = make_engine(level, second, BatchNormMLP(3), **scale)
        engine.load_state_dict(state)
        assert engine.global_step == 7
        curve = train(engine, BATCHES[7:])
        state = copy.deepcopy(engine.state_dict()["update"])
        weights = state_of(engine)
        engine.close()
        return curve.scales, curve.skipped, state["scalers"], state["skips"], weights, state["masters"]

    *mine, my_weights, my_masters = run(first, second)
    *theirs, their_weights, their_masters = run("native", "native")
    assert mine == theirs
    assert mine[0][-1] > mine[0][0]
    assert_close([my_weights, my_masters], [their_weights, their_masters])


@pytest.mark.parametrize("level", LEVELS)
def test_close_gives_everything_back(amp, level):
    model = BatchNormMLP()
    optimizer = make_optimizer("adam")(model)
    before = dict(vars(optimizer)), F.linear, F.cross_entropy
    engine = make_engine(level, model=model, optimizer=optimizer)
    train(engine, BATCHES[:4], {1: math.inf} if engine.loss_scale > 1 else {})
    weights = state_of(engine)
    engine.close()
    assert "forward" not in vars(model)
    assert vars(optimizer).keys() == before[0].keys()
    assert (F.linear, F.cross_entropy, vars(nn.modules.rnn)["_VF"]) == (*before[1:], RNN_FUNCTIONS)
    assert not any(module._state_dict_hooks for module in model.modules())
    assert_close(model.state_dict(), weights, 0, 0)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(mine is theirs for mine, theirs in zip(held, model.parameters(), strict=True))
    F.cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    optimizer.step()
    del engine
    gc.collect()
    assert (F.linear, F.cross_entropy, vars(nn.modules.rnn)["_VF"]) == (*before[1:], RNN_FUNCTIONS)


# -- ranks -----------------------------------------------------------------------------------------------------


def train_rank(rank, world_size, level, backend):
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        config = {"gradient_accumulation": 2, "clip_grad_norm": 1000.0}
        engine = make_engine(level, backend, config=config, loss_scale="dynamic")
        mine = [(x[rank::world_size], y[rank::world_size]) for x, y in BATCHES]
        curve = train(engine, mine, {5: math.inf} if rank == world_size - 1 else {})
        weights = {name: value for name, value in state_of(engine).items() if "running" not in name}
        engine.close()
        return curve.scales, curve.skipped, weights


@pytest.mark.distributed
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_ranks_come_to_one_verdict(level):
    mine, theirs = (run_ranks(train_rank, 2, level, backend) for backend in ("apex", "native"))
    assert mine[0][1].count(True) == 1
    for scales, skipped, weights in mine:
        assert (scales, skipped) == theirs[0][:2]
        assert_close(weights, mine[0][2], 0, 0)
        assert_close(weights, theirs[0][2])


# -- NVIDIA's apex ---------------------------------------------------------------------------------------------

REAL = torch.cuda.is_available() and apex_backend.find_problem(CUDA) is None


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs NVIDIA apex with apex.amp (tag 25.05 or earlier) and a CUDA device")
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_the_real_apex(level, accumulation):
    """The same training, and nothing of it is left in torch after close."""
    batches = [(x.cuda(), y.cuda()) for x, y in BATCHES[:12]]
    before = {(place, name): getattr(place, name) for place in (torch, torch.Tensor, F) for name in dir(place)}

    def run(backend):
        model = rounded(BatchNormMLP())
        config = {"gradient_accumulation": accumulation, "clip_grad_norm": 1.0}
        engine = make_engine(level, backend, model, make_optimizer("adam")(model), config, device=CUDA)
        curve = train(engine, batches, OVERFLOWS if level in ("O1", "O2") else {})
        state = copy.deepcopy(engine.state_dict())
        engine.close()
        return curve.scales, curve.skipped, state

    mine, theirs = on_both(run)
    assert mine[:2] == theirs[:2]
    assert mine[2]["update"]["scalers"] == theirs[2]["update"]["scalers"]
    half = level in ("O2", "O3")
    assert_close(mine[2]["model"], theirs[2]["model"], *((2e-3, 2e-3) if half else (1e-4, 1e-5)))
    after = {key: getattr(*key) for key in before}
    assert [key for key, value in before.items() if not (after[key] is value or after[key] == value)] == []
    assert vars(nn.modules.rnn)["_VF"] is RNN_FUNCTIONS
