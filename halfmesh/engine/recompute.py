"""Activation checkpointing: a module's activations are not kept, but recomputed in backward from the module's inputs.

`torch.utils.checkpoint` does the work (non-reentrant), and restores random numbers and autocast. This file restores
further state that a forward depends on or changes: the training mode of modules, and buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import InputError
from ..utils.torch_private import RUNNING_STATISTICS

_aten = torch.ops.aten
_PRODUCTS = {op.default for op in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution)}
# Operators, and the index of `dropout_p` among their arguments.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default: 3,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    _aten._scaled_dot_product_efficient_attention.default: 5,
    _aten._scaled_dot_product_cudnn_attention.default: 5,
    _aten._scaled_dot_product_fused_attention_overrideable.default: 4,
}


class Checkpointed:
    """Replaces the `forward` of one module: in training with gradients its activations are recomputed in backward.

    The module stays the same object. Its hooks run once per call; copies and pickles of it get a separate `forward`.

    Args:
        keep_products: keep the results of matrix products and attention.
        saving: the scope of each call, for the tensors that autograd keeps.

    Attributes:
        compiled: the compiled forward, if there is one.
    """

    def __init__(self, module: nn.Module, keep_products: bool, saving: Callable[[], Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self.compiled: Callable[..., Any] | None = None
        self._module = module
        self._before = vars(module).get("forward")  # set by the user on this module
        self._keep_products = keep_products
        self._saving = saving
        self._changing: set[str] | None = None
        module.forward = self

    def remove(self) -> None:
        """Restore the module's forward."""
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own if self.compiled is None else self.compiled
        if not (self._module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        for name, value in kwargs.items():
            if any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__):
                raise InputError(
                    f"activation_checkpoint: {type(self._module).__name__} was called with {name}, which the "
                    "recomputation would fill twice; call the model with use_cache=False"
                )
        before = self._copy_changing()
        training = [module.training for module in self._module.modules()]

        names = tuple(kwargs)  # `run` must not hold the values, which may be offloaded

        def run(*values: Any) -> Any:
            count = len(values) - len(names)
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            keeps = self._keep_products
            first, second = create_selective_checkpoint_contexts(_policy) if keeps else (nullcontext(), nullcontext())
            return first, _Again(functools.partial(self._again, training, before, second))

        with self._saving():
            # Not as keywords: torch would neither save tensors among them nor see the device of random numbers.
            output = checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)
        if self._changing is None:
            self._find_changing(before)
        return output

    def __reduce__(self) -> Any:
        if self._before is not None:
            return functools.partial, (self._before,)
        return getattr, (self._module, "forward")

    # -- buffers -----------------------------------------------------------------------------------------------

    def _copy_changing(self) -> dict[str, torch.Tensor]:
        """Before a forward: copies of the buffers that it changes, which the first call determines.

        Statistics of norms are left out: in training a norm's output does not depend on them.
        """
        return {
            name: buffer.detach().clone()
            for name, buffer in self._buffers()
            if not self._is_statistic(name) and (self._changing is None or name in self._changing)
        }

    def _find_changing(self, before: dict[str, torch.Tensor]) -> None:
        """After the first call: which buffers it has changed."""
        after = dict(self._buffers())
        self._changing = {n for n in before if n not in after or not torch.equal(before[n], after[n])}

    @contextmanager
    def _again(self, training: Sequence[bool], before: dict[str, torch.Tensor], selective: Any) -> Iterator[None]:
        """The scope of a recomputation: training modes as in the forward, and copies of buffers, which are dropped."""
        modules, originals = list(self._module.modules()), dict(self._buffers())
        now = [module.training for module in modules]
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for name, buffer in originals.items():
            if name in before or self._is_statistic(name):
                self._set_buffer(name, before.get(name, buffer).detach().clone())
        try:
            with selective:
                yield
        finally:
            for name, buffer in originals.items():
                self._set_buffer(name, buffer)
            for module, flag in zip(modules, now, strict=True):
                module.training = flag

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._module.named_buffers(remove_duplicate=False)

    def _set_buffer(self, name: str, value: torch.Tensor) -> None:
        path, _, own = name.rpartition(".")
        setattr(self._module.get_submodule(path), own, value)

    def _is_statistic(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name.rpartition(".")[0]), RUNNING_STATISTICS)


class _Again(AbstractContextManager[None]):
    """A scope that can be entered again: there may be several recomputations."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._open = self._make()
        self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _PRODUCTS
    if op in _ATTENTION:  # with dropout, a kept result would not draw its random numbers again, and later ones differ
        index = _ATTENTION[op]
        kept = not (args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
