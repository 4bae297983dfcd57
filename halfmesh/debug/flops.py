"""`engine.count_flops()`: floating point operations of a training step, by torch's formulas while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .._torch import has_no_memory, is_in_backward
from ..errors import InputError
from ..loop.parts import EngineHook, EngineParts
from ..parallel.tensor.apply import TensorParallel
from .probes import eager

_aten = torch.ops.aten
_KNOWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler", "inductor")
"""Namespaces whose operators multiply no matrices if they have no formula, but for these:"""
_UNCOUNTED = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: torch.Tensor, *args: Any, **_: Any) -> int:
    """Two products for each of the two in forward. torch's formula adds the scores, which are computed again."""
    return 2 * _attention(*args)


def _formulas() -> dict[Any, Callable[..., int]]:
    """By packet of operators (`torch.ops.aten.mm`): called with the operator's arguments and `out_val`."""
    name = "_scaled_dot_product_{}_attention{}"
    kinds = [("efficient", ""), ("flash", ""), ("cudnn", ""), ("flash", "_for_cpu")]
    backward = {getattr(_aten, name.format(*kind) + "_backward"): _attention_backward for kind in kinds}
    # On the CPU attention has no formula before torch 2.13.
    return {_aten._scaled_dot_product_flash_attention_for_cpu: _attention, **flop_registry, **backward}


class FlopCounter(TorchDispatchMode, EngineHook):
    """Counts products of matrices, convolutions and attention, by the dtype of what is multiplied; not those of an
    optimizer (`before_step` ends the count), nor what backward computes again for activation checkpointing.

    Attributes:
        flops: by name of the dtype.
        unknown: operators that may multiply matrices, without a formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = Counter[str]()
        self.unknown: set[str] = set()
        self._formulas = _formulas()
        self._undivided = 0  # depth of nested modules that another rank counts
        self._is_paused = False

    def before_step(self) -> None:
        self._is_paused = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        formula = self._formulas.get(packet)
        in_backward = is_in_backward()
        if self._is_paused or (in_backward and torch.is_grad_enabled()):  # with gradients on, backward computes again
            return result
        if formula is None:
            if func.namespace not in _KNOWN or packet.__name__ in _UNCOUNTED:
                self.unknown.add(f"{func.namespace}::{packet.__name__}")
            return result
        factors = [value for value in args if isinstance(value, torch.Tensor)]
        if has_no_memory(factors[0]):  # stages of a pipeline look for the shapes of what they send
            return result
        flops = int(formula(*args, **kwargs, out_val=result))
        if self._undivided and not in_backward:  # takes back what its products in backward will add
            flops *= -_products_of_backward(packet, factors)
        self.flops[str(factors[1].dtype)] += flops  # a factor in every one of them, and not a bias
        return result

    def enter(self, depth: int) -> None:
        """Begin (1) or end (-1) a module that all ranks of the tensor group compute alike: another rank counts it."""
        self._undivided += depth

    def uncounted(self, run: Callable[[], None]) -> None:
        """Call `run`, and count nothing in it."""
        self._is_paused = True
        run()
        self._is_paused = False


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
    context, tensor = parts.context, _tensor(parts)
    with ExitStack() as scope:
        scope.enter_context(eager(parts))
        if tensor is not None and tensor.check is not None:  # it computes blocks once more, in the first backward
            check, run = tensor.check, tensor.check.run
            scope.callback(setattr, check, "run", run)
            check.run = lambda: counter.uncounted(run)  # type: ignore[method-assign]
        for module in _computed_alike(parts) if context.tp_rank > 0 else ():
            scope.callback(module.register_forward_pre_hook(lambda *_: counter.enter(1)).remove)
            scope.callback(module.register_forward_hook(lambda *_: counter.enter(-1), always_call=True).remove)
        scope.enter_context(counter)
        yield flops
    everyone = context.everyone((context.dp_rank, counter.flops, counter.unknown))
    if unknown := sorted({name for *_, theirs in everyone for name in theirs}):
        raise InputError(
            f"FLOPs cannot be counted: no formula is known for {', '.join(unknown)}; register one with "
            "torch.utils.flop_counter.register_flop_formula"
        )
    for dp_rank, theirs, _ in everyone:
        for name, count in theirs.items() if dp_rank == context.dp_rank else ():
            flops[name] = flops.get(name, 0) + count


def _tensor(parts: EngineParts) -> TensorParallel | None:
    found = parts.division.axes.get("tensor")
    return found if isinstance(found, TensorParallel) else None


def _computed_alike(parts: EngineParts) -> Iterator[nn.Module]:
    """The outermost modules that every rank of a tensor group computes as a whole, of the same inputs."""
    tensor = _tensor(parts)
    if tensor is None:
        return
    divided = tensor.splits.keys() | tensor.partial
    own = {shard.name for shard in parts.update.master_weights.shards if shard.model_param in divided}
    named = parts.model.named_parameters(remove_duplicate=False)
    params = {id(param) for name, param in named if name in own}  # under fsdp others than were divided

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if any(id(param) in params for param in child.parameters()):
                yield from walk(child)
            elif any(True for _ in child.parameters()):
                yield child

    yield from walk(parts.model)
