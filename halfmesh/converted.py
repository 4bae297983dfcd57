"""What convert_to_amp returns: wrappers of a model, its optimizer and a criterion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn, optim

from .amp.cast import Precision
from .amp.o1 import CastTable
from .amp.optimizer import MixedPrecisionOptimizer
from .amp.recipe import FP32
from .amp.result import StepResult
from .engine import checkpoint
from .engine.accumulation import Accumulation
from .engine.cycle import GradientCycle
from .engine.passes import DirectBackward
from .engine.readings import UpdateReadings
from .errors import InputError
from .shard import OneRank


class AMPModel(nn.Module):
    """A model that computes in a precision. Its state dict is that of the model itself, in full precision.

    Attributes:
        module: the model that was given.
    """

    is_converted = True

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self._precision = precision
        self.register_state_dict_post_hook(_leave_out_prefix)
        self.register_load_state_dict_pre_hook(_put_prefix_back)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._precision.forward(self.module, *args, **kwargs)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in, for computations of your own; `enabled=False` leaves it."""
        return self._precision.autocast(enabled)

    @property
    def casts(self) -> CastTable | None:
        """O1's lists of functions, to which your own can be added; None for other modes."""
        return self._precision.casts

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; masters take over what is loaded. (Hooks do it where the wrapper is wrapped itself.)"""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _leave_out_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """What is saved has the names of the model itself, in whatever the wrapper is wrapped."""
    inner = f"{prefix}module."
    moved = [(key, state.pop(key)) for key in list(state) if key.startswith(inner)]
    state.update({prefix + key.removeprefix(inner): value for key, value in moved})
    metadata = getattr(state, "_metadata", {})  # the versions of modules; under both names, for a load into either
    versions = {key: value for key, value in metadata.items() if f"{key}.".startswith(inner)}
    metadata.update({(prefix + f"{key}.".removeprefix(inner)).rstrip("."): value for key, value in versions.items()})


def _put_prefix_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    moved = [(key, state.pop(key)) for key in list(state) if key.startswith(prefix)]
    state.update({f"{prefix}module.{key.removeprefix(prefix)}": value for key, value in moved})


class AMPCriterion(nn.Module):
    """A criterion that computes in a precision."""

    def __init__(self, criterion: Callable[..., Any], precision: Precision) -> None:
        super().__init__()
        self.criterion = criterion
        self._precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._precision.criterion(self.criterion, *args, **kwargs)


class AMPOptimizer(UpdateReadings, optim.Optimizer):
    """The optimizer of a converted model: the one that was given, with scaled losses and checked gradients.

    What is not defined here is the given optimizer's: `param_groups`, `state`, `defaults`, hooks.

    Attributes:
        optimizer: the one that was given. It steps through this one only.
    """

    is_converted = True

    def __init__(self, update: MixedPrecisionOptimizer, precision: Precision) -> None:
        # Without Optimizer.__init__, which would make a second set of groups and state.
        self.optimizer = update.optimizer
        self._update = update
        self._precision = precision
        self._closed = False
        accumulation = Accumulation(1, "sum", OneRank())
        backward = DirectBackward(precision, update, accumulation)
        self._cycle = GradientCycle(update, precision, backward, accumulation, None)
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own would miss the model's gradients

    def backward(self, loss: torch.Tensor, loss_id: int = 0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, a scalar; in place of `loss.backward()`.

        Args:
            loss_id: which of the `num_losses` losses this is (mode APEX).

        Raises:
            InputError: not a scalar with a graph, or an unknown `loss_id`; or a second backward in one update where
                DistributedDataParallel could not average it.
        """
        self._refuse_if_closed()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # DistributedDataParallel averages param.grad, if at all (no_sync), at the last backward of an update: all
            # of the gradients have to be there then.
            self._update.losses.wide_sums = False
            if self._update.losses.several and self._cycle.fresh:
                raise InputError(
                    "several losses with scales of their own cannot be averaged by DistributedDataParallel; use "
                    "halfmesh.initialize, which averages them, or num_losses=1"
                )
        self._cycle.add(loss, at_end=True, retain_graph=retain_graph, loss_id=loss_id)

    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Unscale, check, step or skip, and move the loss scale. Frees the gradients that it uses.

        Raises:
            InputError: no `backward` since the last step, or a closure.
            NonFiniteError: inf or nan in too many updates in a row.
        """
        if closure is not None:
            raise InputError("a closure that runs the model again cannot be joined with a loss scale; call step()")
        self._refuse_if_closed()
        if not self._cycle.fresh:
            raise InputError(
                "step() was called before backward(loss): there is nothing to step with. Call optimizer.backward(loss) "
                "in place of loss.backward(), which does not scale the loss"
            )
        try:
            return self._update.step()
        finally:
            self._cycle.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; they are always freed."""
        self._cycle.clear()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the next step to `max_norm`. Returns the norm of the unscaled gradients before clipping (0-dim).

        Raises:
            InputError: before `backward`, or a `max_norm` that is not positive.
        """
        if not self._cycle.fresh:
            raise InputError("clip_grad_norm was called before backward(loss): there are no gradients; call it after")
        return self._update.clip_grad_norm_(max_norm)

    def master_params(self) -> Iterator[nn.Parameter]:
        """What is stepped: the fp32 masters where there are any, else the model's parameters.

        Raises:
            InputError: between backward and step, where masters have no gradients yet.
        """
        if self._cycle.fresh:
            raise InputError(
                "master_params() was called between backward and step, where masters have no gradients yet; to clip "
                "call optimizer.clip_grad_norm(max_norm)"
            )
        return (param for group in self.param_groups for param in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the given optimizer's: parameters of the model that it did not hold so far."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state, masters by parameter name, loss scales and counters."""
        return self._update.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; masters are copied into the model.

        Raises:
            InputError: the state of something else, or of another number of loss scales.
        """
        checkpoint.refuse_unfit_update(state_dict, len(self._update.losses.scalers))
        self._cycle.clear()
        self._update.load_state_dict(state_dict)

    def close(self) -> None:
        """Give model and optimizer back as they came, with the trained weights. The wrappers compute in fp32 then."""
        if self._closed:
            return
        self._closed = True
        self._cycle.clear()
        self._precision.recipe, self._precision.casts = FP32, None
        self.optimizer.__dict__.pop("zero_grad", None)
        self._update.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InputError("this optimizer is closed; step the one that was given, or call convert_to_amp again")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("an AMPOptimizer cannot be copied: it steps one model; copy its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an AMPOptimizer cannot be pickled: it steps one model; save its state_dict()")

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: while it is made, copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AMPOptimizer({self.optimizer!r})"
