"""A stand-in for NVIDIA's apex.amp, written from its rules: one model, one optimizer, any device, no kernels."""

from __future__ import annotations

import contextlib
import sys
import types
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfmesh.amp import apex_backend
from tests.support.apex_reference import LEVELS, Scaler, cast_floats, cast_model


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
        overrides = {"cast": keys["cast_model_type"]} | {key: keys[key] for key in LEVELS["O0"] if key in keys}
        level = LEVELS[opt_level] | {key: value for key, value in overrides.items() if value is not None}
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
