"""Steps of torch's fused optimizers through their functional forms, which saves what `Optimizer.step` does around them.

On a small model that is half of an update: hooks, profiler marks, a search for the parameters with gradients and for
their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .. import torch_private
from ..own_steps import step_of
from .fused import seed_momentum

if TYPE_CHECKING:
    from .holdings import Holdings

_Group = Mapping[str, Any]
_Tensors = list[torch.Tensor]
_State = dict[str, Any]
_States = dict[str, list[Any]]
"""Of several parameters, by name."""


def _step_adam(group: _Group, params: _Tensors, grads: _Tensors, states: _States, **folded: Any) -> None:
    beta1, beta2 = group["betas"]
    adam(
        params,
        grads,
        states["exp_avg"],
        states["exp_avg_sq"],
        states["max_exp_avg_sq"] if group["amsgrad"] else [],
        states["step"],
        fused=True,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
        **folded,
    )


def _step_sgd(group: _Group, params: _Tensors, grads: _Tensors, states: _States, **folded: Any) -> None:
    sgd(
        params,
        grads,
        states["momentum_buffer"] if group["momentum"] != 0 else [],
        fused=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        **folded,
    )


def _step_adagrad(group: _Group, params: _Tensors, grads: _Tensors, states: _States, **folded: Any) -> None:
    adagrad(
        params,
        grads,
        states["sum"],
        states["step"],
        fused=True,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        **folded,
    )


_FORMS: dict[type[optim.Optimizer], Callable[..., None]] = {
    optim.Adam: _step_adam,
    optim.AdamW: _step_adam,
    optim.SGD: _step_sgd,
    optim.Adagrad: _step_adagrad,
}


def _by_name(states: list[_State]) -> _States:
    return {name: [state[name] for state in states] for name in set(states[0]).intersection(*states)}


def _has_state(group: _Group, states: list[_State]) -> bool:
    if "momentum" in group:  # SGD, whose state may also be there and be None
        return group["momentum"] == 0 or all(state.get("momentum_buffer") is not None for state in states)
    return all(states)


class _Held:
    """A group, and what the optimizer has for its parameters.

    Attributes:
        params: all of them.
        all_states: theirs; None: some have none yet.
        places: which ones of all that is stepped they are; None: all, in that order.
    """

    def __init__(self, group: _Group, state: Mapping[torch.Tensor, _State], places: Mapping[int, int]) -> None:
        self.group = group
        self.params: _Tensors = list(group["params"])
        self._states = [state.get(param, {}) for param in self.params]
        self.all_states: _States | None = {}
        if self.params:
            self.all_states = _by_name(self._states) if _has_state(group, self._states) else None
        own = [places[id(param)] for param in self.params]
        self.places = None if own == list(range(len(places))) else own

    def chosen(self) -> tuple[_Tensors, _Tensors, _States] | None:
        """The parameters that have a gradient, with that and with their state; None if some have no state yet."""
        grads: list[Any] = [param.grad for param in self.params]
        if self.all_states is not None and not any(map(is_, grads, repeat(None))):
            return self.params, grads, self.all_states
        found = [each for each in zip(self.params, grads, self._states, strict=True) if each[1] is not None]
        if not found:
            return [], [], {}
        params, present, states = map(list, zip(*found, strict=True))
        return (params, present, _by_name(states)) if _has_state(self.group, states) else None


class DirectStep:
    """Does what `optimizer.step()` would, where only a profiler could tell the difference, or who patches torch itself.

    That is: the optimizer is one of `_FORMS`, fused in every group, with torch's `step`; no hook is registered; and the
    state of each parameter is there, which the first `step` makes.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._optimizer = holdings.optimizer
        self._form = _FORMS.get(type(self._optimizer))
        self._held: list[_Held] = []
        self._is_seeded = False  # all parameters have a state
        self._version = -1
        self._step: Any = None

    def take(
        self,
        folds: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        all_grads: _Tensors | None = None,
    ) -> bool:
        """Step the parameters that have a gradient; returns False, and does nothing, where only `step` can do it.

        Args:
            folds: whether the optimizer takes the next two along: it is torch's, fused in every group, and without
                hooks before its step.
            grad_scale: gradients are divided by it (0-dim fp32).
            found_inf: 1.0 skips the step (0-dim fp32).
            all_grads: the gradients of all that is stepped, where all of it has some; None: look.
        """
        form = self._form
        if not folds or form is None or torch_private.has_step_post_hooks(self._optimizer):
            return False
        if self._holdings.refreshed != self._version and not self._look():
            return False
        if all_grads is not None and self._is_seeded:
            for held in self._held:
                grads = all_grads if held.places is None else [all_grads[place] for place in held.places]
                if grads:
                    form(held.group, held.params, grads, held.all_states, grad_scale=grad_scale, found_inf=found_inf)
            return True
        chosen = []
        for held in self._held:
            each = held.chosen()
            if each is None:
                seed_momentum(self._optimizer)
                return False  # the first step of some parameter
            chosen.append(each)
        for held, each in zip(self._held, chosen, strict=True):
            if each[0]:
                form(held.group, *each, grad_scale=grad_scale, found_inf=found_inf)
        return True

    def _look(self) -> bool:
        """The optimizer holds other groups, parameters or state, or has another `step`: then False, for once."""
        holdings = self._holdings
        self._version = holdings.refreshed
        places = {id(holdings.target(shard)): place for place, shard in enumerate(holdings.stepped)}
        self._held = [_Held(group, self._optimizer.state, places) for group in self._optimizer.param_groups]
        self._is_seeded = all(held.all_states is not None for held in self._held)
        before, self._step = self._step, step_of(self._optimizer)
        return before is self._step  # a scheduler's wrapper notes that it was called: once is enough
