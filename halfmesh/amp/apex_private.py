"""The only private names of apex that halfmesh uses: what `apex.amp.initialize` does, and the way back from it."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..errors import InputError, shorten
from ..shard import ParamShard

if TYPE_CHECKING:
    from .apex_options import ApexOptions

# What it replaces or adds in model and optimizer.
_PATCHED = (
    *("forward", "step", "zero_grad", "add_param_group", "_amp_stash", "_amp_lazy_init"),
    *("_lazy_init_maybe_master_weights", "_master_params_to_model_params"),
    *("_prepare_amp_backward", "_post_amp_backward"),
)


class Apex:
    """apex.amp, with `model` and `optimizer` taken over by it until `restore`.

    Attributes:
        amp: the module, for its public functions.

    Raises:
        InputError: a model or optimizer that apex.amp cannot take.
    """

    def __init__(self, options: ApexOptions, model: nn.Module, optimizer: optim.Optimizer) -> None:
        _refuse_unfit(model, optimizer)
        self.amp: Any = importlib.import_module("apex.amp")
        self._optimizer: Any = optimizer
        self._handle: Any = None
        things = [vars(model), vars(optimizer)]
        self._before = [(thing, {name: thing[name] for name in _PATCHED if name in thing}) for thing in things]
        try:
            self._take_over(options, model)
        except BaseException:
            self.restore()
            raise

    def _take_over(self, options: ApexOptions, model: nn.Module) -> None:
        optimizer = self._optimizer
        hooks = {module: list(module._state_dict_hooks) for module in model.modules()}
        step, state, rnn_functions = optimizer.step, optimizer.state_dict(), vars(nn.modules.rnn)["_VF"]
        self.amp.initialize(model, optimizer, **_keys(options))
        if options.properties.patch_torch_functions:
            self._handle = self.amp._amp_state.handle
            self._handle._enable_caching = False  # since torch 1.10 an IndexError where a weight is used twice
            self._unpatch = weakref.finalize(self, _unpatch, self._handle, rnn_functions)
        with self.casts_off():
            # Makes the masters. Left to the first backward, it would drop the gradients of fp32 parameters.
            optimizer._amp_lazy_init()
            if optimizer.state:
                optimizer.load_state_dict(state)  # apex has rounded it to half precision
        for module, keys in hooks.items():  # apex's give the rounded weights; halfmesh's will give the masters
            for key in [key for key in module._state_dict_hooks if key not in keys]:
                del module._state_dict_hooks[key]
        if hasattr(step, "_wrapped_by_lr_sched") and optimizer.step != step:
            optimizer.step.__func__._wrapped_by_lr_sched = True  # or torch warns that the scheduler's is lost

    def restore(self) -> None:
        """Put everything back in its place; dtypes and masters stay."""
        if self._handle is not None:
            self._unpatch()
        for thing, old in self._before:
            for name in _PATCHED:
                thing.pop(name, None)
            thing.update(old)

    @contextmanager
    def casts_off(self) -> Iterator[None]:
        """O1's casts would reach halfmesh's own arithmetic. (Unlike apex's `disable_casts` this survives an error.)"""
        was = self._handle is not None and self._handle._is_active
        if was:
            self._handle._is_active = False
        try:
            yield
        finally:
            if was:
                self._handle._is_active = True

    def patched(self, function: Any) -> Any:
        """What O1 has put in the place of `function`, which was looked up before; else `function` itself."""
        wrappers = () if self._handle is None else self._handle._all_wrappers
        places = (getattr(place, name) for place, name, original in wrappers if original is function)
        return next(places, function)

    def masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """The fp32 master of each of the model's parameters that has one."""
        stash = vars(self._optimizer._amp_stash)
        masters = stash.get("all_fp32_from_fp16_params")
        return {} if masters is None else dict(zip(stash["all_fp16_params"], masters, strict=True))

    def refuse_unknown(self, shards: Sequence[ParamShard]) -> None:
        """Raise InputError for parameters that apex would step with gradients that are still scaled."""
        stash = vars(self._optimizer._amp_stash)
        lists = ("all_fp16_params", "all_fp32_params", "all_fp32_from_fp32_params")
        known = {id(param) for name in lists for param in stash.get(name, ())}
        unknown = [shard.name for shard in shards if id(shard.param) not in known]
        if unknown:
            raise InputError(
                f"{shorten(unknown)} were frozen at initialize, where apex makes the masters, and train now; freeze "
                "them after initialize only, or use backend='native'"
            )


def _unpatch(handle: Any, rnn_functions: Any) -> None:
    """Give torch its functions back; also when an engine is dropped without close()."""
    handle._all_wrappers.reverse()  # last patched, first restored
    handle._deactivate()
    handle._is_active = False
    vars(nn.modules.rnn)["_VF"] = rnn_functions


def _keys(options: ApexOptions) -> dict[str, Any]:
    """The arguments of `amp.initialize`."""
    keys = options.model_dump(exclude={"backend"})
    for name in ("cast_model_type", "cast_model_outputs"):
        keys[name] = getattr(torch, keys[name]) if keys[name] else keys[name]
    return keys | {"verbosity": options.verbosity if options.verbosity > 1 else 0}  # halfmesh logs the scale itself


def _refuse_unfit(model: nn.Module, optimizer: optim.Optimizer) -> None:
    odd = [name for name, param in model.named_parameters() if param.dtype != torch.float32]
    odd += [name for name, buffer in model.named_buffers() if buffer.dtype == torch.float16]
    if odd:
        raise InputError(
            f"apex.amp takes models in float32 only, but {shorten(odd)} are not; call model.float() before "
            "initialize, or use backend='native'"
        )
    if getattr(optimizer, "materialize_master_grads", True) is False:
        raise InputError(
            "apex's FusedSGD(materialize_master_grads=False) has no gradients that could be clipped or divided; "
            "leave it at True"
        )
