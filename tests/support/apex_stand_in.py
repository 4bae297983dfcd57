"""A stand-in for what halfmesh calls of NVIDIA's apex.amp, written from its rules, for any device."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfmesh.amp import apex_backend
from tests.support.apex_reference import LEVELS, cast_floats, cast_model


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
        self.calls = []

    def initialize(self, model, opt_level, verbosity, **keys):
        self.calls.append((opt_level, verbosity, keys))
        dtype, keep = keys["cast_model_type"], keys["keep_batchnorm_fp32"]
        dtype = LEVELS[opt_level]["cast"] if dtype is None else dtype
        if dtype:
            assert all(p.dtype == torch.float32 for p in model.parameters())
            cast_model(model, dtype, LEVELS[opt_level]["keep_batchnorm_fp32"] if keep is None else keep)
            model.forward = lambda *args: pytest.fail("apex's forward was called")
            for module in model.modules():
                module._register_state_dict_hook(lambda *_: pytest.fail("apex's hook was left in the model"))
        if opt_level == "O1" and keys["patch_torch_functions"] is not False:
            self._amp_state.handle = Handle()
        return model


def install(monkeypatch):
    """The stand-in as apex.amp, allowed on the CPU."""
    apex, amp = ModuleType("apex"), StandIn()
    apex.amp = amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr(apex_backend, "DEVICES", frozenset({"cpu", "cuda"}))
    return amp
