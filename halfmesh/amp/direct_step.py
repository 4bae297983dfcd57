"""Steps of torch's fused optimizers through their functional forms, which saves what `Optimizer.step` does around them.

On a small model that is half of an update: hooks, profiler marks, a search for the parameters with gradients and for
their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .. import torch_private
from ..own_steps import step_of
from .fused import seed_momentum

_Group = Mapping[str, Any]
_Tensors = list[torch.Tensor]
_State = dict[str, Any]


def _step_adam(group: _Group, params: _Tensors, grads: _Tensors, states: list[_State], **folded: Any) -> None:
    beta1, beta2 = group["betas"]
    adam(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
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


def _step_sgd(group: _Group, params: _Tensors, grads: _Tensors, states: list[_State], **folded: Any) -> None:
    sgd(
        params,
        grads,
        [state["momentum_buffer"] for state in states] if group["momentum"] != 0 else [],
        fused=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        **folded,
    )


def _step_adagrad(group: _Group, params: _Tensors, grads: _Tensors, states: list[_State], **folded: Any) -> None:
    adagrad(
        params,
        grads,
        [state["sum"] for state in states],
        [state["step"] for state in states],
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


def _has_state(group: _Group, states: list[_State]) -> bool:
    if "momentum" in group:  # SGD, whose state may also be there and be None
        return group["momentum"] == 0 or all(state.get("momentum_buffer") is not None for state in states)
    return all(states)


class DirectStep:
    """Does what `optimizer.step()` would, where only a profiler could tell the difference, or who patches torch itself.

    That is: the optimizer is one of `_FORMS`, fused in every group, with torch's `step`; no hook is registered; and the
    state of each parameter is there, which the first `step` makes.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._form = _FORMS.get(type(optimizer))
        self._held: list[tuple[_Group, list[tuple[torch.Tensor, _State]]]] = []
        self._ids: list[list[int]] = []  # of all objects that are in `_held`
        self._alive: list[list[Any]] = []  # these objects, so that nothing else gets their ids
        self._step: Any = None

    def take(self, folds: bool, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> bool:
        """Step the parameters that have a gradient; returns False, and does nothing, where only `step` can do it.

        Args:
            folds: whether the optimizer takes the next two along: it is torch's, fused in every group, and without
                hooks before its step.
            grad_scale: gradients are divided by it (0-dim fp32).
            found_inf: 1.0 skips the step (0-dim fp32).
        """
        if not folds or self._form is None or not self._is_plain():
            return False
        if not self._knows_state():
            self._learn_state()
        chosen = []
        for group, pairs in self._held:
            held = [(param, grad, state) for param, state in pairs if (grad := param.grad) is not None]
            if held:
                params, grads, states = map(list, zip(*held, strict=True))
                if not _has_state(group, states):
                    seed_momentum(self._optimizer)
                    return False  # the first step of some parameter
                chosen.append((group, params, grads, states))
        for group, params, grads, states in chosen:
            self._form(group, params, grads, states, grad_scale=grad_scale, found_inf=found_inf)
        return True

    def _is_plain(self) -> bool:
        """Whether nothing but the step itself happens in `step`. A scheduler's wrapper notes that it was called: once
        is enough."""
        if torch_private.has_step_post_hooks(self._optimizer):
            return False
        before, self._step = self._step, step_of(self._optimizer)
        return before is self._step

    def _knows_state(self) -> bool:
        """Whether the groups' parameters and the state are the objects that were seen last."""
        groups = self._optimizer.param_groups
        state = self._optimizer.state
        held = [groups, *[group["params"] for group in groups], state, state.values()]
        return [list(map(id, objects)) for objects in held] == self._ids

    def _learn_state(self) -> None:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        self._held = [(group, [(param, state.get(param, {})) for param in group["params"]]) for group in groups]
        self._alive = [list(groups), *[list(group["params"]) for group in groups], list(state), list(state.values())]
        self._ids = [list(map(id, objects)) for objects in self._alive]
