"""backend="apex": what is rejected, and that it trains as backend="native" does: against a stand-in for apex.amp that
follows apex's rules, and against the real one, where there is one."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfmesh
from halfmesh.amp import apex_backend
from halfmesh.amp.apex_amp import ApexOptions
from halfmesh.amp.apex_backend import ApexPrecision
from halfmesh.amp.recipe import FP32
from halfmesh.errors import IncompatibleConfigError
from tests.amp.apex_runs import PROPERTIES, BatchNormMLP, cast_floats, cast_model, make_batches, make_optimizer, train

CUDA = torch.device("cuda")
OVERFLOWS = {2: 1e9, 5: math.inf, 6: math.nan}


class Handle:
    """O1: two of apex's casts, in place of torch's functions for the whole process."""

    def __init__(self):
        self._enable_caching, self._all_wrappers = True, []
        for name, dtype in (("linear", torch.float16), ("linear", torch.float16), ("cross_entropy", torch.float32)):
            original = getattr(F, name)
            self._all_wrappers.append((F, name, original))
            setattr(F, name, self._cast(original, dtype))
        vars(nn.modules.rnn)["_VF"] = "replaced"

    def _cast(self, original, dtype):
        def function(*args, **kwargs):
            assert not self._enable_caching
            return original(*cast_floats(args, dtype), **kwargs)

        return function


class StandIn(ModuleType):
    """The module `apex.amp`."""

    def __init__(self):
        super().__init__("apex.amp")
        self._amp_state = SimpleNamespace()

    def initialize(self, model, opt_level, verbosity, **keys):
        dtype, keep = keys["cast_model_type"], keys["keep_batchnorm_fp32"]
        dtype = PROPERTIES[opt_level]["cast"] if dtype is None else dtype
        if dtype:
            assert all(p.dtype == torch.float32 for p in model.parameters())
            cast_model(model, dtype, PROPERTIES[opt_level]["keep_batchnorm_fp32"] if keep is None else keep)
            model.forward = lambda *args: pytest.fail("apex's forward was called")
            for module in model.modules():
                module._register_state_dict_hook(lambda *_: pytest.fail("apex's hook was left in the model"))
        if opt_level == "O1" and keys["patch_torch_functions"] is not False:
            self._amp_state.handle = Handle()
        return model


@pytest.fixture
def amp(monkeypatch):
    """The stand-in as apex.amp, allowed on the CPU."""
    apex, amp = ModuleType("apex"), StandIn()
    apex.amp = amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr(apex_backend, "DEVICES", frozenset({"cpu", "cuda"}))
    return amp


def make_engine(level, backend, model, optimizer, device="cpu", **keys):
    fp16 = {"mode": "apex", "opt_level": level, "backend": backend, **keys}
    config = {"fp16": fp16, "gradient_accumulation": 2, "clip_grad_norm": 100.0}
    return halfmesh.initialize(model, optimizer, F.cross_entropy, None, config, device=device)


def problem_on(device):
    return ApexPrecision(FP32, device, ApexOptions(backend="apex").model_dump()).find_problem()


def test_an_apex_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    problem = problem_on(CUDA)
    assert "apex.amp cannot be imported (ModuleNotFoundError: " in problem
    assert "build it from https://github.com/NVIDIA/apex at tag 25.05 or earlier" in problem
    assert problem.endswith("or use backend='native', which needs no apex")


def test_a_cpu_is_rejected_before_anything_is_changed(amp, monkeypatch):
    monkeypatch.setattr(apex_backend, "DEVICES", frozenset({"cuda"}))
    model = BatchNormMLP()
    with pytest.raises(IncompatibleConfigError, match="takes CUDA tensors only, and the device is cpu; train on a GPU"):
        make_engine("O2", "apex", model, make_optimizer("sgd")(model))
    assert all(param.dtype == torch.float32 for param in model.parameters())


def train_both(level, device="cpu", optimizer="sgd", scale=None):
    """Curves with overflows, accumulation, clipping and a parameter that the optimizer gets later; and all weights."""
    found, overflows = [], OVERFLOWS if level in ("O1", "O2") else {}
    batches = [(x.to(device), y.to(device)) for x, y in make_batches(12)]
    for backend in ("apex", "native"):
        model = BatchNormMLP()
        held = make_optimizer(optimizer)(model)
        late = held.param_groups[0]["params"].pop()
        engine = make_engine(level, backend, model, held, device, loss_scale=scale)
        first = train(engine, batches[:8], overflows)
        held.add_param_group({"params": [late]})
        curves = first, train(engine, batches[8:])
        weights = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
        engine.close()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert not any(module._state_dict_hooks for module in model.modules())
        found.append((curves, [weights, model.state_dict()]))
    (mine, my_weights), (theirs, their_weights) = found
    for curve, other in zip(mine, theirs, strict=True):
        assert (curve.scales, curve.skipped) == (other.scales, other.skipped)
    assert any(mine[0].skipped) == bool(overflows)
    return [curve.losses for curve in mine], my_weights, [curve.losses for curve in theirs], their_weights


@pytest.mark.parametrize(
    ("level", "optimizer", "scale"),
    [("O0", "sgd", 128.0), ("O1", "adam", None), ("O2", "sgd", None), ("O3", "sgd", None)],
)
def test_training(amp, level, optimizer, scale):
    """Bit for bit."""
    *mine, losses, weights = train_both(level, "cpu", optimizer, scale)
    torch.testing.assert_close(mine, [losses, weights], rtol=0, atol=0, equal_nan=True)


REAL = torch.cuda.is_available() and problem_on(CUDA) is None


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs NVIDIA apex with apex.amp (tag 25.05 or earlier) and a CUDA device")
@pytest.mark.parametrize("level", PROPERTIES)
def test_the_real_apex(level):
    _, my_weights, _, their_weights = train_both(level, CUDA)
    torch.testing.assert_close(my_weights, their_weights, rtol=1e-4, atol=1e-5)
