"""backend="apex": what is refused, what is called, and that it trains as backend="native" does.

Most of it runs against a stand-in for apex.amp, written from its rules. Those at the end want the real one.
"""

import contextlib
import copy
import gc
import logging
import math
import sys
import types
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import halfmesh
from halfmesh.amp import apex_backend
from halfmesh.errors import ConfigError, IncompatibleConfigError, InputError, NonFiniteError
from tests.support.apex_reference import LEVELS as APEX_LEVELS
from tests.support.apex_reference import Scaler, cast_floats, cast_model
from tests.support.apex_runs import LEVELS, SHAPES, BatchNormMLP, make_batches, make_optimizer, train
from tests.support.ranks import run_ranks

CUDA = torch.device("cuda")
BATCHES = make_batches(SHAPES["mlp"], 14)
RNN_FUNCTIONS = vars(nn.modules.rnn)["_VF"]
OVERFLOWS = {2: 1e9, 5: math.inf, 6: math.nan}


# -- the stand-in ----------------------------------------------------------------------------------------------


class Handle:
    """O1: two of apex's casts, in place of torch's functions for the whole process."""

    def __init__(self):
        self._is_active, self._enable_caching, self._all_wrappers = True, True, []
        for name, dtype in (("linear", torch.float16), ("linear", torch.float16), ("cross_entropy", torch.float32)):
            original = getattr(F, name)
            self._all_wrappers.append((F, name, original))
            setattr(F, name, self._cast(original, dtype))
        vars(nn.modules.rnn)["_VF"] = "patched"

    def _cast(self, original, dtype):
        def function(*args, **kwargs):
            assert not self._enable_caching
            return original(*(cast_floats(args, dtype) if self._is_active else args), **kwargs)

        return function

    def _deactivate(self):
        for place, name, original in self._all_wrappers:
            setattr(place, name, original)


class StandIn(ModuleType):
    """apex.amp by its rules, as the module `apex.amp`, for one model and one optimizer on any device."""

    def __init__(self):
        super().__init__("apex.amp")
        self._amp_state = SimpleNamespace(handle=None)
        self.calls = []

    def initialize(self, model, optimizer, opt_level, enabled, num_losses, verbosity, **keys):
        assert enabled
        assert num_losses == 1
        self.calls.append((opt_level, verbosity, keys))
        overrides = {"cast": keys["cast_model_type"]} | {key: keys[key] for key in APEX_LEVELS["O0"] if key in keys}
        level = APEX_LEVELS[opt_level] | {key: value for key, value in overrides.items() if value is not None}
        self.keeps_masters = bool(level["master_weights"])
        self.scaler = Scaler(level["loss_scale"], keys["min_loss_scale"], keys["max_loss_scale"], 2000)
        if level["cast"]:
            assert all(p.dtype == torch.float32 for p in model.parameters())
            cast_model(model, level["cast"], level["keep_batchnorm_fp32"])
            forward = model.forward
            model.forward = lambda *args: cast_floats(forward(*cast_floats(args, level["cast"])), torch.float32)
            optimizer.load_state_dict(optimizer.state_dict())
            for module in model.modules():
                module._register_state_dict_hook(lambda *_: pytest.fail("apex's hook was left in the model"))
        optimizer._amp_stash = SimpleNamespace(lazy_init_called=False, scaled=False)
        optimizer._amp_lazy_init = types.MethodType(self._lazy_init, optimizer)
        if self.keeps_masters:
            self._patch_step(optimizer)
        self._patch_add_param_group(optimizer)
        if opt_level == "O1" and keys["patch_torch_functions"] is not False:
            self._amp_state.handle = Handle()
        return model, optimizer

    def _patch_step(self, optimizer):
        step, stash = optimizer.step, optimizer._amp_stash

        def new_step(_):
            step()
            for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
                param.data.copy_(master.data)
                master.grad = None

        optimizer.step = types.MethodType(new_step, optimizer)

    def _patch_add_param_group(self, optimizer):
        add, stash = optimizer.add_param_group, optimizer._amp_stash

        def new_add(_, group):
            optimizer._amp_lazy_init()
            add(group | {"params": self._take(stash, list(group["params"]))})

        optimizer.add_param_group = types.MethodType(new_add, optimizer)

    def _lazy_init(self, optimizer):
        stash = optimizer._amp_stash
        if stash.lazy_init_called:
            return
        stash.lazy_init_called, stash.all_fp16_params = True, []
        if self.keeps_masters:
            stash.all_fp32_from_fp16_params, stash.all_fp32_from_fp32_params = [], []
        else:
            stash.all_fp32_params = []
        for group in optimizer.param_groups:
            old, group["params"] = group["params"], self._take(stash, list(group["params"]))
            for param, new in zip(old, group["params"], strict=True):
                new.grad = None  # of the first backward, if that came before: apex loses it
                if new is not param and param in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(param)
        optimizer.load_state_dict(optimizer.state_dict())

    def _take(self, stash, params):
        for i, param in enumerate(params):
            if not self.keeps_masters:
                (stash.all_fp32_params if param.dtype == torch.float32 else stash.all_fp16_params).append(param)
            elif param.requires_grad and param.dtype == torch.float16:
                params[i] = param.detach().clone().float().requires_grad_()
                stash.all_fp16_params.append(param)
                stash.all_fp32_from_fp16_params.append(params[i])
            elif param.requires_grad:
                stash.all_fp32_from_fp32_params.append(param)
        return params

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer, delay_unscale=False):
        stash, scaler = optimizer._amp_stash, self.scaler
        if not (self.keeps_masters or scaler.dynamic or scaler.scale != 1):
            yield loss.float()
            return
        assert delay_unscale or stash.scaled, "gradients that are there already would count as unscaled"
        yield loss.float() * scaler.scale
        stash.scaled = delay_unscale
        if not delay_unscale and self._unscale(stash):
            step = optimizer.step

            def skip_step():
                for master in stash.all_fp32_from_fp16_params if self.keeps_masters else ():
                    master.grad = None
                optimizer.step = step

            optimizer.step = skip_step

    def _unscale(self, stash):
        if self.keeps_masters:
            pairs = [*zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True)]
            pairs += [(param, param) for param in stash.all_fp32_from_fp32_params]
        else:
            pairs = [(param, param) for param in stash.all_fp16_params + stash.all_fp32_params]
        overflow = False
        for param, target in pairs:
            if param.grad is not None:
                overflow = overflow or not bool(param.grad.isfinite().all())
                unscaled = param.grad.to(target.dtype) * (1 / self.scaler.scale)
                target.grad = unscaled if target is param or target.grad is None else target.grad + unscaled
        return self.scaler.judge(overflow)

    def master_params(self, optimizer):
        return (param for group in optimizer.param_groups for param in group["params"])

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": self.scaler.scale, "unskipped": self.scaler.unskipped}}

    def load_state_dict(self, state):
        self.scaler.scale = state["loss_scaler0"]["loss_scale"]
        self.scaler.unskipped = state["loss_scaler0"]["unskipped"]


def install(monkeypatch):
    """The stand-in as apex.amp, allowed on the CPU."""
    apex, amp = ModuleType("apex"), StandIn()
    apex.amp = amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr(apex_backend, "DEVICES", frozenset({"cpu", "cuda"}))
    return amp


def close_live():
    """Close the engine that apex has, if there is one: O1 would cast for others, too."""
    live = apex_backend._live and apex_backend._live()
    if live:
        live.close()


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


def test_without_apex(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    assert apex_backend.find_problem(CUDA) == (
        "backend='apex': NVIDIA's apex is not installed; build it from https://github.com/NVIDIA/apex at tag 25.05 or "
        "earlier (the package named apex on PyPI is another project); or use backend='native', which needs no apex"
    )


def test_an_apex_without_amp(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.delitem(sys.modules, "apex.amp", raising=False)
    assert apex_backend.find_problem(CUDA) == (
        "backend='apex': the installed apex (a folder of that name) has no amp, which NVIDIA removed in May 2025; "
        "build it from https://github.com/NVIDIA/apex at tag 25.05 or earlier (the package named apex on PyPI is "
        "another project); or use backend='native', which needs no apex"
    )


def test_an_apex_that_does_not_import(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("import module_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    problem = apex_backend.find_problem(CUDA)
    assert "the installed apex cannot be imported (ModuleNotFoundError: No module named 'module_that" in problem


def test_the_cpu_is_refused_before_anything_is_changed(amp, monkeypatch):
    monkeypatch.setattr(apex_backend, "DEVICES", frozenset({"cuda"}))
    model = BatchNormMLP()
    with pytest.raises(IncompatibleConfigError) as error:
        make_engine("O2", model=model)
    assert str(error.value) == (
        "1 problem(s) in the config:\n  - backend='apex': apex.amp takes CUDA tensors only, and the device is cpu; "
        "train on a GPU; or use backend='native', which needs no apex"
    )
    assert all(param.dtype == torch.float32 for param in model.parameters())
    assert not amp.calls


def test_without_cudnn(amp, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert "cudnn.enabled=False; set it to True" in apex_backend.find_problem(CUDA)


def test_several_losses(amp):
    with pytest.raises(ConfigError, match=r"num_losses=2 with backend='apex'.*remove it, or use backend='native'"):
        make_engine("O2", num_losses=2)


def test_a_second_engine(amp):
    first = make_engine("O2")
    model = BatchNormMLP()
    with pytest.raises(IncompatibleConfigError, match="another engine uses; close that one first"):
        make_engine("O2", model=model)
    assert all(param.dtype == torch.float32 for param in model.parameters())
    make_engine("O2", backend="native").close()
    first.close()
    make_engine("O2", model=model).close()


def test_an_engine_that_was_dropped_is_in_nobodys_way(amp):
    linear = F.linear
    gc.disable()
    try:
        engine = make_engine("O1")
        assert F.linear is not linear
        del engine
        make_engine("O1").close()
    finally:
        gc.enable()
    assert F.linear is linear


def test_a_model_that_is_not_fp32(amp):
    model = BatchNormMLP().double()
    with pytest.raises(InputError, match=r"float32 only, but first.weight, .* are not; call model.float\(\)"):
        make_engine("O1", model=model)
    make_engine("O1", model=model.float()).close()


def test_an_error_within_apex_leaves_no_patches(amp, monkeypatch):
    monkeypatch.setattr(StandIn, "_lazy_init", lambda *_: 1 / 0)
    linear, model = F.linear, BatchNormMLP()
    with pytest.raises(ZeroDivisionError):
        make_engine("O1", model=model)
    assert F.linear is linear
    with pytest.raises(ZeroDivisionError):
        make_engine("O2", model=model)
    assert "forward" not in vars(model)


def test_not_enabled_it_needs_no_apex(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    engine = make_engine("O2", enabled=False)
    train(engine, BATCHES[:1])
    assert engine.loss_scale == 1


def test_a_parameter_that_is_unfrozen_later(amp):
    """apex makes no master of it, and would step it with a gradient that is still scaled."""
    model = BatchNormMLP()
    model.last.weight.requires_grad_(False)
    engine = make_engine("O2", model=model)
    train(engine, BATCHES[:1])
    model.last.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"last.weight were frozen at initialize"):
        train(engine, BATCHES[:1])
    model.last.weight.requires_grad_(False)
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


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [None, "dynamic", 128.0])
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_with_a_short_last_cycle(amp, level, reduction):
    def run(backend):
        config = {"gradient_accumulation": 4, "loss_reduction": reduction, "clip_grad_norm": 0.5}
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
    assert_close([mine[0], mine[2]], [theirs[0], theirs[2]], *((1e-4, 1e-4) if level == "O2" else (1e-6, 1e-7)))


def test_sums_of_several_backwards_are_not_rounded(amp):
    """apex reads gradients in fp16 only; what that loses reaches the masters' gradients all the same."""

    def run(backend):
        engine = make_engine("O2", backend, config={"gradient_accumulation": 7})
        train(engine, BATCHES)
        return state_of(engine)

    assert_close(*on_both(run))


@pytest.mark.parametrize("level", LEVELS)
def test_clip_grad_norm(amp, level):
    def run(backend):
        engine = make_engine(level, backend)
        norms = []
        for x, y in BATCHES[:5]:
            engine.backward(engine.criterion(engine(x), y))
            norms.append(engine.clip_grad_norm_(0.1).item())
            norms.append(engine.step().grad_norm)
        loss = engine.criterion(engine(x), y)
        engine.backward(loss, retain_graph=True)
        engine.clip_grad_norm_(0.1)
        engine.backward(loss)  # what was measured is no longer all
        norms.append(engine.step().grad_norm)
        return norms, state_of(engine)

    assert_close(*on_both(run))


@pytest.mark.parametrize("rule", ["raise", "skip"])
@pytest.mark.parametrize(("level", "scale"), [("O1", None), ("O2", None), ("O2", 128.0), ("O0", None), ("O3", None)])
def test_on_nonfinite(amp, level, scale, rule):
    def run(backend):
        engine = make_engine(level, backend, config={"on_nonfinite": rule}, loss_scale=scale)
        seen = []
        for i, (x, y) in enumerate(BATCHES[:6]):
            engine.backward(engine.criterion(engine(x), y) * OVERFLOWS.get(i, 1.0))
            try:
                seen.append(engine.step().skipped)
            except NonFiniteError:
                seen.append("raised")
        return seen, engine.skipped_steps, engine.loss_scale, state_of(engine)

    (*mine, my_weights), (*theirs, their_weights) = on_both(run)
    assert mine == theirs
    assert True in mine[0] or "raised" in mine[0]
    assert_close(my_weights, their_weights)


def test_too_many_skips(amp):
    engine = make_engine("O2", config={"max_consecutive_skips": 3})
    with pytest.raises(NonFiniteError, match=r"3 updates in a row.*the loss scale has fallen to 16384"):
        train(engine, BATCHES, dict.fromkeys(range(14), math.inf))
    assert engine.loss_scale == amp.scaler.scale == 2.0**13


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_verdict_is_that_of_apex(amp, level, monkeypatch):
    """Without its kernels apex adds gradients up to find inf, and the sum may be inf where no gradient is."""
    engine = make_engine(level)
    before = state_of(engine)
    monkeypatch.setattr(amp.scaler, "judge", lambda overflow: Scaler.judge(amp.scaler, True))
    curve = train(engine, BATCHES[:2])
    assert curve.skipped == [True, True]
    assert (engine.skipped_steps, engine.loss_scale) == (2, 2.0**14)
    weights = {name: value for name, value in state_of(engine).items() if name.endswith(("weight", "bias"))}
    assert_close(weights, {name: before[name] for name in weights}, 0, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_only_edits_of_others_are_warned_of(amp, level, caplog):
    engine = make_engine(level, loss_scale="dynamic")
    train(engine, BATCHES[:3])
    assert "gradients were changed" not in caplog.text
    engine.backward(engine.criterion(engine(BATCHES[3][0]), BATCHES[3][1]))
    for param in engine.model.parameters():
        param.grad.mul_(0.5)
    engine.step()
    assert "gradients were changed between engine.backward and engine.step" in caplog.text


def test_a_loss_in_fp16(amp):
    """Its gradient is the scale, in fp16: 2**16 overflows there, and apex lowers it."""
    engine = make_engine("O2")
    x, y = BATCHES[0]
    for scale in (2.0**16, 2.0**15):
        engine.backward(engine.criterion(engine(x), y).half())
        result = engine.step()
        assert (result.loss_scale, result.skipped) == (scale, scale == 2.0**16)
    assert engine.loss_scale == amp.scaler.scale == 2.0**15
    engine.close()
    engine = make_engine("O2", loss_scale=2.0**16)
    with pytest.raises(InputError, match="the static loss_scale 65536 cannot be used"):
        engine.backward(engine.criterion(engine(x), y).half())


def test_changes_of_the_scale_are_logged_once(amp, caplog, capsys):
    with caplog.at_level(logging.INFO, "halfmesh"):
        train(make_engine("O2"), BATCHES[:5], {2: math.inf})
    assert [r.message for r in caplog.records if r.message.startswith("loss scale")] == [
        "loss scale 65536 -> 32768; gradients with inf or nan"
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_added_later(amp, level):
    def run(backend):
        model = rounded(BatchNormMLP())
        extra = model.last.bias
        optimizer = optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.05, momentum=0.9)
        engine = make_engine(level, backend, model, optimizer, {"track_grad_norm": True})
        train(engine, BATCHES[:3])
        engine.optimizer.add_param_group({"params": [model.again.weight, model.last.weight], "lr": 0.01})
        train(engine, BATCHES[3:8])
        engine.optimizer.add_param_group({"params": [extra], "lr": 0.01})
        engine.backward(engine.criterion(engine(BATCHES[8][0]), BATCHES[8][1]))
        norm = engine.step().grad_norm
        masters = sorted(engine.state_dict()["update"]["masters"])
        return masters, [p.dtype for p in engine.master_params()], norm, state_of(engine)

    mine, theirs = on_both(run)
    assert mine[:2] == theirs[:2]
    assert_close(mine[2:], theirs[2:])


@pytest.mark.parametrize("level", LEVELS)
def test_weights_written_by_others_stay(amp, level):
    def run(backend):
        engine = make_engine(level, backend)
        with torch.no_grad():
            engine.model.again.weight.clamp_(-0.1, 0.1)
        train(engine, BATCHES[:3])
        with torch.no_grad():
            engine.model.first.weight.clamp_(-0.1, 0.1)
        engine.model.load_state_dict(engine.model.state_dict() | {"last.bias": torch.full((4,), 0.5)})
        train(engine, BATCHES[3:5])
        return state_of(engine)

    assert_close(*on_both(run))


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_has_stepped_keeps_its_state(amp, level):
    def run(backend):
        model = BatchNormMLP()
        optimizer = make_optimizer("adam")(model)
        for x, y in BATCHES[:3]:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        engine = make_engine(level, backend, rounded(model), optimizer)
        train(engine, BATCHES[3:8])
        return state_of(engine)

    assert_close(*on_both(run))


def test_a_scheduler_hears_nothing_of_the_patches(amp):
    model = BatchNormMLP()
    optimizer = make_optimizer("sgd")(model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine("O2", model=model, optimizer=optimizer, scheduler=scheduler)
        train(engine, BATCHES[:4], {1: math.inf})
        assert engine.lr_scheduler.get_last_lr() == [0.05 / 8]


def test_steps_outside_the_engine_are_refused(amp):
    engine = make_engine("O2")
    with pytest.raises(InputError, match=r"call engine\.step"):
        engine.optimizer.step()


def test_convert_to_amp(amp):
    def run(backend):
        model = rounded(BatchNormMLP())
        keys = {"opt_level": "O2", "backend": backend}
        model, optimizer, criterion = halfmesh.convert_to_amp(
            model, make_optimizer("sgd")(model), nn.CrossEntropyLoss(), "apex", keys
        )
        for x, y in BATCHES[:4]:
            optimizer.backward(criterion(model(x), y))
            optimizer.step()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.close()
        return weights

    assert_close(*on_both(run))


# -- O1's functions --------------------------------------------------------------------------------------------


def test_o1_reaches_a_criterion_that_was_looked_up_before(amp):
    cross_entropy = F.cross_entropy
    engine = make_engine("O1")
    x, y = BATCHES[0]
    output = engine(x)
    assert cross_entropy(output, y).dtype == torch.float16
    assert engine.criterion(output, y).dtype == torch.float32


def test_o1_is_off_within_autocast_false_and_after_an_error(amp):
    engine = make_engine("O1", config={"on_nonfinite": "raise"})
    x, y = BATCHES[0]
    with engine.autocast(enabled=False):
        assert engine(x).dtype == torch.float32
    engine.backward(engine.criterion(engine(x), y) * math.nan)
    with pytest.raises(NonFiniteError):
        engine.step()
    assert engine(x).dtype == torch.float16


# -- state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("first", "second"), [("apex", "native"), ("native", "apex"), ("apex", "apex")])
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


def test_a_capped_scale_of_the_native_backend(amp):
    """It lowers max_scale to 2**15 for a loss in fp16, which apex does not know."""
    engine = make_engine("O2", "native")
    engine.backward(engine.criterion(engine(BATCHES[0][0]), BATCHES[0][1]).half())
    engine.step()
    state = copy.deepcopy(engine.state_dict())
    assert state["update"]["scalers"][0]["max_scale"] == 2.0**15
    state["update"]["scalers"][0]["growth_tracker"] = 1999
    engine = make_engine("O2")
    engine.load_state_dict(state)
    train(engine, BATCHES[:1])
    assert engine.loss_scale == amp.scaler.scale == 2.0**16


@pytest.mark.parametrize("level", LEVELS)
def test_close_gives_everything_back(amp, level):
    model = BatchNormMLP()
    optimizer = make_optimizer("adam")(model)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 100)
    before = dict(vars(optimizer)), F.linear, F.cross_entropy
    engine = make_engine(level, model=model, optimizer=optimizer, scheduler=scheduler)
    train(engine, BATCHES[:4], {1: math.inf} if engine.loss_scale > 1 else {})
    weights = state_of(engine)
    engine.close()
    assert "forward" not in vars(model)
    assert vars(optimizer).keys() - {"_opt_called"} == before[0].keys()  # that one is the scheduler's
    assert optimizer.step is before[0]["step"]
    assert (F.linear, F.cross_entropy, vars(nn.modules.rnn)["_VF"]) == (*before[1:], RNN_FUNCTIONS)
    assert not any(module._state_dict_hooks for module in model.modules())
    assert all(param.dtype == torch.float32 for param in model.parameters())
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
@pytest.mark.parametrize("level", LEVELS)
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
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_the_real_apex(level, accumulation, optimizer):
    batches = [(x.cuda(), y.cuda()) for x, y in BATCHES[:12]]

    def run(backend):
        model = rounded(BatchNormMLP())
        config = {"gradient_accumulation": accumulation, "clip_grad_norm": 1.0}
        engine = make_engine(level, backend, model, make_optimizer(optimizer)(model), config, device=CUDA)
        factors = OVERFLOWS if level in ("O1", "O2") else {}
        curve = train(engine, batches, factors)
        state = copy.deepcopy(engine.state_dict())
        engine.close()
        return curve.scales, curve.skipped, state

    mine, theirs = on_both(run)
    assert mine[:2] == theirs[:2]
    assert mine[2]["update"]["scalers"] == theirs[2]["update"]["scalers"]
    half = level in ("O2", "O3")
    assert_close(mine[2]["model"], theirs[2]["model"], *((2e-3, 2e-3) if half else (1e-4, 1e-5)))


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs NVIDIA apex with apex.amp (tag 25.05 or earlier) and a CUDA device")
@pytest.mark.parametrize("level", LEVELS)
def test_the_real_apex_is_gone_after_close(level):
    before = {(place, name): getattr(place, name) for place in (torch, torch.Tensor, F) for name in dir(place)}
    model = BatchNormMLP()
    optimizer = make_optimizer("adam")(model)
    names = set(vars(optimizer))
    engine = make_engine(level, model=model, optimizer=optimizer, device=CUDA)
    train(engine, [(x.cuda(), y.cuda()) for x, y in BATCHES[:3]])
    weights = state_of(engine)
    engine.close()
    after = {key: getattr(*key) for key in before}
    assert [key for key, value in before.items() if not (after[key] is value or after[key] == value)] == []
    assert vars(nn.modules.rnn)["_VF"] is RNN_FUNCTIONS
    assert set(vars(optimizer)) == names
    assert_close(model.state_dict(), weights, 0, 0)
