"""convert_to_amp(): mixed precision without an engine, for your own training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from .. import compat
from ..amp.convert import convert
from ..amp.o1 import CastTable
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.plugin import AMP_PLUGINS, AMP_TYPE, PRECISIONS
from ..amp.precision import Precision
from ..amp.recipe import FP32
from ..amp.step_result import StepResult
from ..checkpoint import validate
from ..config.composition import Setup
from ..config.load import load_config
from ..errors import IncompatibleConfigError, InputError, problem_list, reject_closure
from ..utils.optimizer_state import join_optimizers
from ..utils.param_shard import ParamShard
from . import inputs
from .accumulation import Accumulation, MixedPrecisionState
from .executor import UncopiedHook
from .guards import GradientGuard
from .recording import recording_of


def convert_to_amp(
    model: nn.Module,
    optimizer: optim.Optimizer | Sequence[optim.Optimizer],
    criterion: Callable[..., Any] | None = None,
    mode: AMP_TYPE | str = AMP_TYPE.TORCH,
    amp_config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float16",
) -> tuple[AMPModel, AMPOptimizer, Callable[..., Any] | None]:
    """Convert a model, its optimizer and a criterion to mixed precision, without engine, config file or process group.

        model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, mode="naive")
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            optimizer.backward(loss)  # in place of loss.backward()
            optimizer.step()

    The model stays on its device and is cast in place. Where fp32 masters are kept, the optimizer's groups are
    re-pointed to them, so schedulers may be built on either optimizer. For data parallelism make the process group
    first, and wrap the returned model in DistributedDataParallel: all ranks then see the same averaged gradients.

    Args:
        model: in fp32 (mode NAIVE also takes its own half precision), on the device where it trains.
        optimizer: a torch optimizer over `model.parameters()`, or a list of several, each over other parameters.
        criterion: called as before; it runs under the same autocast as the forward.
        mode: "torch", "naive", "apex" or another registered mode.
        amp_config: the mode's own keys, as in `fp16 = dict(...)`.
        dtype: "float16", "bfloat16" or "float8_e4m3fn".

    Raises:
        ConfigError: a wrong mode, or mistakes in `amp_config`.
        IncompatibleConfigError: a mode that cannot run in this dtype, on this device or on several ranks.
        InputError: arguments of the wrong kind.
    """
    keys = {name: key for key, name in PRECISIONS.items()}
    if dtype not in keys:
        raise InputError(f"dtype={dtype!r} is not the dtype of a precision; allowed: {', '.join(map(repr, keys))}")
    config = load_config({keys[dtype]: dict(mode=mode, **(amp_config or {}))})
    assert config.precision is not None
    setup, joined = Setup.of(config, 1), join_optimizers(optimizer)
    recipe, on_ranks = setup.recipe, dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if on_ranks:  # DistributedDataParallel takes gradients in the parameter's dtype only
        recipe = dataclasses.replace(recipe, wide_gradients=False)
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    if any(map(recording_of, params)):
        raise InputError("model: it was built under halfmesh.deferred_init(), and only initialize gives it values")
    device = params[0].device if params else torch.device("cpu")
    if problems := list(inputs.find_problems(model, joined, criterion, recipe, device)):
        raise InputError(problem_list(problems, "what was passed to convert_to_amp"))
    compat.raise_for(compat.check_setup(setup, device.type))
    precision = AMP_PLUGINS.get(config.precision.mode).precision(config.precision.options, recipe, device)
    unfit = [inputs.find_device_problem(device, recipe), precision.find_problem()]
    if on_ranks and recipe.loss_scale is not None and not recipe.keeps_scale:  # DDP averages one backward per forward
        unfit.append("DistributedDataParallel cannot average num_losses > 1 with a dynamic scale; use initialize")
    if any(unfit):
        raise IncompatibleConfigError(list(filter(None, unfit)))
    shards = [ParamShard(name, param) for name, param in model.named_parameters()]
    update = convert(model, joined, shards, precision)
    wrapped = None if criterion is None else AMPCriterion(criterion, precision)
    return AMPModel(model, precision, update), AMPOptimizer(model, update, precision), wrapped


class AMPCriterion(nn.Module):
    """A criterion that computes in a precision."""

    def __init__(self, criterion: Callable[..., Any], precision: Precision) -> None:
        super().__init__()
        self.criterion = criterion
        self._precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._precision.criterion(self.criterion, *args, **kwargs)


class AMPModel(nn.Module):
    """A model that computes in a precision. Its state dict is that of the model itself, in full precision.

    Attributes:
        module: the model that was given.
    """

    def __init__(self, module: nn.Module, precision: Precision, update: MixedPrecisionOptimizer) -> None:
        super().__init__()
        self.module = module
        self._precision = precision
        self._sync_writes = UncopiedHook(update.sync_writes)  # a copy of the model has no masters
        self.register_load_state_dict_pre_hook(_add_module_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._sync_writes()
        return self._precision.forward(self.module, *args, **kwargs)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in, for computations of your own; `enabled=False` leaves it."""
        return self._precision.autocast(enabled)

    @property
    def casts(self) -> CastTable | None:
        """O1's lists of functions, to which your own can be added; None for other modes."""
        return self._precision.casts

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the model itself, also where the wrapper is a submodule."""
        state, prefix = self.module.state_dict(*args, **kwargs), kwargs.get("prefix", "")
        versions = state._metadata  # of modules; under both names, to load into either
        for key in [key for key in versions if f"{key}.".startswith(prefix)]:
            versions[f"{prefix}module.{key[len(prefix) :]}".rstrip(".")] = versions[key]
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as the model does, and update masters too. Messages use the model's names."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _add_module_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


class AMPOptimizer(MixedPrecisionState, optim.Optimizer):
    """The optimizer of a converted model: the user's optimizer, with scaled losses and checked gradients.

    All else is the user's optimizer's: `param_groups`, `state`, `defaults`, hooks.

    Attributes:
        optimizer: the user's. A direct step of it is rejected.
    """

    def __init__(self, model: nn.Module, update: MixedPrecisionOptimizer, precision: Precision) -> None:
        # Without Optimizer.__init__, which would make a second set of groups and state.
        self.optimizer = update.optimizer
        self._update = update
        self._precision = precision
        self._closed = False
        self._accumulation = Accumulation(update, precision, GradientGuard(update, model))

    def backward(self, loss: torch.Tensor, loss_id: int = 0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, a scalar; in place of `loss.backward()`.

        Args:
            loss_id: the number of the loss, of `num_losses` (mode APEX).

        Raises:
            InputError: not a scalar with a graph, an unknown `loss_id`, or after `close`.
        """
        if self._closed:
            raise InputError("this optimizer is closed; step your original optimizer, or call convert_to_amp again")
        self._accumulation.backward(loss, is_last_batch=True, retain_graph=retain_graph, loss_id=loss_id)

    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Unscale, check, step or skip, and move the loss scale. Frees the gradients that it uses.

        Raises:
            InputError: no `backward` since the last step, or a closure.
            NonFiniteError: inf or nan in too many updates in a row.
        """
        reject_closure("optimizer.step", closure)
        if not self._accumulation.has_backward:
            raise InputError(
                "step() was called before backward(loss): call optimizer.backward(loss), not loss.backward()"
            )
        return self._accumulation.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; they are always set to None."""
        self._accumulation.clear()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the next step to `max_norm`. Returns the norm of the unscaled gradients before clipping (0-dim).

        Raises:
            InputError: before `backward`, or a `max_norm` that is not positive.
        """
        if not self._accumulation.has_backward:
            raise InputError("clip_grad_norm was called before backward(loss); call it after")
        return self._update.clip_grad_norm_(max_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that the optimizer did not hold so far, as in torch."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state, masters by parameter name, loss scales and counters."""
        return self._update.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`; masters are copied into the model.

        Raises:
            InputError: the state of something else, or of another number of loss scales.
        """
        validate.reject_unfit(state_dict, len(self._update.loss_scales.scalers), "optimizer")
        self._accumulation.clear()
        self._update.load_state_dict(state_dict)

    def close(self) -> None:
        """Restore model and optimizer, with the trained weights. The wrappers then compute in fp32."""
        if self._closed:
            return
        self._closed = True
        self._accumulation.clear()
        self._precision.recipe, self._precision.casts = FP32, None
        self._update.close()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet, while an object is made
            raise AttributeError(name)
        return getattr(self.optimizer, name)
