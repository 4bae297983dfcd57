"""Modules whose activations are not kept for backward, but computed again in it, from what the module was called with.

`torch.utils.checkpoint` does the work, without reentrant autograd. It goes back to the random numbers and the autocast
scope of the forward. What else a forward depends on or changes is looked after here: which modules train, and buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .. import torch_private
from ..errors import InputError

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""By these names Hugging Face's blocks are given keys and values to add to."""

Place = tuple[str, str]
"""The path of a module, and a name of its."""


class Checkpointed:
    """Stands in for the `forward` of one module: while it trains with gradients, its activations are computed again.

    The module stays what it is. Hooks on it run once, and copies of it and its pickles have their own `forward`.

    Args:
        keep_products: what matrix products and attention return is kept.
        saving: around each call, for what is kept of it.

    Attributes:
        compiled: the forward as compiled code, if it is.
    """

    def __init__(
        self, module: nn.Module, keep_products: bool, saving: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        functools.update_wrapper(self, module.forward)
        self.compiled: Callable[..., Any] | None = None
        self._module = module
        self._before = vars(module).get("forward")  # the user's own, for this very module
        self._options: dict[str, Any] = {"use_reentrant": False}
        if keep_products:
            self._options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        self._saving = saving
        self._changing: set[Place] | None = None
        module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back."""
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
        self._refuse_caches(kwargs)
        # Without names: torch would neither save tensors among them, nor look there for the device of random numbers.
        run = _Run(self, forward, tuple(kwargs))
        with self._saving():
            return checkpoint(run, *args, *kwargs.values(), **self._options)

    def __reduce__(self) -> Any:
        if self._before is not None:
            return _same, (self._before,)
        return getattr, (self._module, "forward")

    def _refuse_caches(self, kwargs: dict[str, Any]) -> None:
        for name in _CACHES:
            if kwargs.get(name) is not None:
                raise InputError(
                    f"activation_checkpoint: {type(self._module).__name__} was called with {name}, to which it would "
                    "add its keys and values twice; training needs none: call the model with use_cache=False, or set "
                    "model.config.use_cache = False"
                )

    # -- buffers -----------------------------------------------------------------------------------------------

    def first(self, forward: Callable[[], Any]) -> tuple[Any, dict[Place, torch.Tensor]]:
        """What `forward` returns, and buffers that it has changed as they were before.

        Which these are is found out in the first call. Statistics of norms are left out: while a norm trains, what it
        returns does not depend on them.
        """
        watched = {place: buffer for place, buffer in self._buffers() if not self._is_statistic(*place)}
        chosen = watched if self._changing is None else self._changing & watched.keys()
        before = {place: watched[place].detach().clone() for place in chosen}
        stamps = {place: torch_private.edit_stamp(watched[place]) for place in watched.keys() - chosen}
        output = forward()
        after = dict(self._buffers())
        if self._changing is None:
            self._changing = {p for p in before if p not in after or not torch.equal(before[p], after[p])}
            before = {place: before[place] for place in self._changing}
        for place, stamp in stamps.items():
            if place not in after or torch_private.edit_stamp(after[place]) != stamp:
                name = ".".join(filter(None, place))
                raise InputError(
                    f"activation_checkpoint: {type(self._module).__name__} changes its buffer {name} "
                    "in some calls and not in others, and computing it again would start from another value; leave "
                    "this module out, with activation_checkpoint = dict(patterns=[...])"
                )
        return output, before

    @contextmanager
    def again(self, training: Sequence[bool], before: dict[Place, torch.Tensor]) -> Iterator[None]:
        """The modules train as they did, and buffers are copies, from which nothing comes back."""
        modules = list(self._module.modules())
        now = [module.training for module in modules]
        buffers = dict(self._buffers())
        owners = dict(self._module.named_modules())
        _set_training(modules, training)
        for place, buffer in buffers.items():
            path, name = place
            if place in before or (self._is_statistic(path, name) and owners[path].training):
                owners[path]._buffers[name] = before.get(place, buffer).detach().clone()
        try:
            yield
        finally:
            for (path, name), buffer in buffers.items():
                owners[path]._buffers[name] = buffer
            _set_training(modules, now)

    def _buffers(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for path, module in self._module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                yield (path, name), buffer

    def _is_statistic(self, path: str, name: str) -> bool:
        return torch_private.keeps_statistics(self._module.get_submodule(path))

    @property
    def training(self) -> list[bool]:
        """Which modules train now."""
        return [module.training for module in self._module.modules()]


class _Run:
    """One call: computed once, and as often again as backward asks for it."""

    def __init__(self, owner: Checkpointed, forward: Callable[..., Any], names: tuple[str, ...]) -> None:
        self._owner = owner
        self._forward = forward
        self._names = names
        self._training: list[bool] | None = None
        self._before: dict[Place, torch.Tensor] = {}

    def __call__(self, *values: Any) -> Any:
        count = len(values) - len(self._names)
        kwargs = dict(zip(self._names, values[count:], strict=True))
        call = functools.partial(self._forward, *values[:count], **kwargs)
        if self._training is None:
            self._training = self._owner.training
            output, self._before = self._owner.first(call)
            return output
        with self._owner.again(self._training, self._before):
            return call()


def _same(value: Any) -> Any:
    return value


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training != flag:
            module.training = flag


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _products() or (op in _attentions() and not _drops(op, args, kwargs))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _products() -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in _PRODUCTS)


@functools.cache
def _attentions() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in _ATTENTION)
    return frozenset(op.default for op in found if op is not None)


def _drops(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether attention draws random numbers. What is kept draws none when all else is computed again, and those after
    it would be others."""
    names = [argument.name for argument in torch_private.arguments_of(op)]
    index = names.index("dropout_p")
    value = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(value)
