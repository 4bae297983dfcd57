"""Floating point operations of a training step, counted at torch's operators while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import has_no_memory, is_in_backward
from ..errors import InputError
from ..loop.parts import EngineHook, EngineParts
from .probes import eager

DTYPES = tuple(map(str, (torch.float16, torch.bfloat16, torch.float32, torch.float64)))
OTHER = "other"
_BINS = (*DTYPES, OTHER)

_aten = torch.ops.aten
_ATTENTION_BACKWARD = frozenset(
    getattr(_aten, f"_scaled_dot_product_{kind}_attention{device}_backward")
    for kind, device in (("efficient", ""), ("flash", ""), ("cudnn", ""), ("flash", "_for_cpu"))
)
_UNCOUNTED = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
"""Operators of torch that multiply matrices within, and have no formula."""
_NO_PRODUCTS = ("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler", "inductor")
"""Namespaces of operators that are known: those of them that have no formula multiply no matrices."""


def _formulas() -> dict[Any, Callable[..., int]]:
    """By packet of operators (`torch.ops.aten.mm`): called with the operator's arguments and `out_val`. Among them what
    was registered with `torch.utils.flop_counter.register_flop_formula`."""
    # Attention on the CPU has none before torch 2.13.
    known, name = dict(flop_counter.flop_registry), "_scaled_dot_product_flash_attention"
    for kind in ("", "_backward"):
        known.setdefault(getattr(_aten, f"{name}_for_cpu{kind}"), known[getattr(_aten, name + kind)])
    return known


class FlopCounter(TorchDispatchMode, EngineHook):
    """Counts products of matrices, convolutions and attention, by the dtype of what is multiplied; not those of an
    optimizer (`before_step` ends the count).

    What backward computes with gradients on is computed again (activation checkpointing), and does not count; nor do
    the scores that attention's backward computes again.

    Attributes:
        flops: by name of the dtype.
        alike: of these, what every rank of the tensor group has computed, by the same names.
        unknown: operators that may multiply matrices, without a formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = dict.fromkeys(_BINS, 0)
        self.alike = dict.fromkeys(_BINS, 0)
        self.unknown: set[str] = set()
        self._formulas = _formulas()
        self._depth = 0
        self._is_over = False

    def before_step(self) -> None:
        self._is_over = True

    @contextmanager
    def without_plan_check(self, parts: EngineParts) -> Iterator[None]:
        """A scope in which the model that a tensor plan is compared with, in the first backward, does not count."""
        check = None if parts.division.tensor is None else parts.division.tensor.check
        if check is None:
            yield
            return
        run = check.run

        def uncounted() -> None:
            flops, alike = dict(self.flops), dict(self.alike)
            run()
            self.flops, self.alike = flops, alike

        check.run = uncounted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del check.run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_over:
            return result
        packet = func.overloadpacket
        formula = self._formulas.get(packet)
        if formula is None:
            if func.namespace not in _NO_PRODUCTS or packet.__name__ in _UNCOUNTED:
                self.unknown.add(f"{func.namespace}::{packet.__name__}")
            return result
        in_backward = is_in_backward()
        if in_backward and torch.is_grad_enabled():
            return result
        factors = [value for value in args if isinstance(value, torch.Tensor)]
        if has_no_memory(factors[0]):  # stages of a pipeline look for the shapes of what they send
            return result
        flops = int(formula(*args, **kwargs, out_val=result))
        if packet in _ATTENTION_BACKWARD:
            flops -= 2 * math.prod(args[1].shape) * args[2].shape[-2]
        name = str(factors[1].dtype)  # a factor in every one of them, and not a bias
        name = name if name in DTYPES else OTHER
        self.flops[name] += flops
        if self._depth and not in_backward:
            self.alike[name] += flops * (1 + _products_of_backward(packet, factors))
        return result

    @contextmanager
    def within(self, modules: list[nn.Module]) -> Iterator[None]:
        """A scope in which what `modules` compute, forward and backward, is what each rank of a tensor group does."""

        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        handles = [module.register_forward_pre_hook(enter) for module in modules]
        handles += [module.register_forward_hook(leave, always_call=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _products_of_backward(packet: Any, factors: list[torch.Tensor]) -> int:
    """How many products of the same size follow in backward: one for each gradient."""
    if "attention" in packet.__name__:  # two for each of its two products
        return 2 if any(factor.requires_grad for factor in factors) else 0
    two = factors[:2] if "conv" in packet.__name__ else factors[-2:]
    return sum(factor.requires_grad for factor in two)


@contextmanager
def counted(parts: EngineParts, counter: FlopCounter) -> Iterator[dict[str, int]]:
    """A scope whose operations are counted. All ranks together.

    Yields:
        A dict that is filled at the end, by name of the dtype: {"torch.bfloat16": ...}, over the ranks that compute
        this data rank's batch.

    Raises:
        InputError: an operator has no formula.
    """
    flops: dict[str, int] = {}
    with eager(parts), counter.within(list(_computed_alike(parts))), counter.without_plan_check(parts), counter:
        yield flops
    unknown = sorted({name for theirs in parts.context.everyone(counter.unknown) for name in theirs})
    if unknown:
        raise InputError(
            f"FLOPs cannot be counted: no formula is known for {', '.join(unknown)}; register one with "
            "torch.utils.flop_counter.register_flop_formula"
        )
    flops.update(_summed(parts, counter))


def _summed(parts: EngineParts, counter: FlopCounter) -> dict[str, int]:
    context = parts.context
    size = context.tp_size
    mine = [counter.flops[name] * size - counter.alike[name] * (size - 1) for name in _BINS]
    sums = torch.tensor(mine, dtype=torch.int64, device=context.device)
    context.all_reduce(sums, "tp")
    context.all_reduce(sums, "pp")
    return {name: flops // size for name, flops in zip(_BINS, sums.tolist(), strict=True) if flops}


def _computed_alike(parts: EngineParts) -> Iterator[nn.Module]:
    """The outermost modules that every rank of a tensor group computes as a whole, of the same inputs."""
    tensor = parts.division.tensor
    if tensor is None:
        return

    shards = parts.update.master_weights.shards
    own = {shard.name for shard in shards if shard.model_param in tensor.splits or shard.model_param in tensor.partial}
    named = list(parts.model.named_parameters(remove_duplicate=False))
    params = {id(param) for name, param in named if name in own}  # under fsdp others than were divided

    def divided(module: nn.Module) -> bool:
        return any(id(param) in params for param in module.parameters())

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if divided(child):
                yield from walk(child)
            elif any(True for _ in child.parameters()):
                yield child

    yield from walk(parts.model)
