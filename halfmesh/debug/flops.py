"""`engine.count_flops()`: floating point operations of a training step, by torch's formulas while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..errors import InputError
from ..utils.engine_hook import EngineHook
from ..utils.torch_private import has_no_memory, is_in_backward, is_on_trial
from .probes import eager

if TYPE_CHECKING:
    from ..engine.parts import EngineParts

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
    name = "_scaled_dot_product_{}_attention{}_backward"
    kinds = [("efficient", ""), ("flash", ""), ("cudnn", ""), ("flash", "_for_cpu")]
    backward = {getattr(_aten, name.format(*kind)): _attention_backward for kind in kinds}
    # On the CPU attention has no formula before torch 2.13.
    return {_aten._scaled_dot_product_flash_attention_for_cpu: _attention, **flop_registry, **backward}


class FlopCounter(TorchDispatchMode, EngineHook):
    """Counts matrix products, convolutions and attention by the dtype of their inputs; not those of an
    optimizer (`before_step` ends the count), nor what backward computes again for activation checkpointing. (torch's
    FlopCounterMode counts both, and knows no dtypes.)

    Attributes:
        flops: by name of the dtype.
        unknown: operators that may multiply matrices, without a formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = Counter[str]()
        self.unknown: set[str] = set()
        self._formulas = _formulas()
        self._is_over = False

    def before_step(self) -> None:
        self._is_over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        again = is_in_backward() and torch.is_grad_enabled()  # with gradients, backward computes again
        if self._is_over or again or is_on_trial():
            return result
        packet = func.overloadpacket
        formula = self._formulas.get(packet)
        if formula is None:
            if func.namespace not in _KNOWN or packet.__name__ in _UNCOUNTED:
                self.unknown.add(f"{func.namespace}::{packet.__name__}")
            return result
        factors = [value for value in args if isinstance(value, torch.Tensor)]
        if not has_no_memory(factors[0]):  # else a pipeline's stage looks for the shapes of what it sends
            # The second is a factor in every one of them, and not a bias.
            self.flops[str(factors[1].dtype)] += int(formula(*args, **kwargs, out_val=result))
        return result


@contextmanager
def counted(parts: EngineParts, counter: FlopCounter) -> Iterator[dict[str, int]]:
    """A scope whose operations are counted. All ranks together.

    Yields:
        A dict that is filled at the end, by name of the dtype: {"torch.bfloat16": ...}, over the ranks that compute
        this data rank's batch.

    Raises:
        InputError: with an axis that shards parameters, where several ranks may compute the same; an operator has no
            formula.
    """
    flops: dict[str, int] = {}
    context = parts.context
    with eager(parts), counter:
        yield flops
    for name, axis in parts.division.axes.items():
        if axis.splits:
            raise InputError(f"FLOPs are not counted under {name} parallelism; count them with {name}=1")
    everyone = context.everyone((context.dp_rank, counter.flops, counter.unknown))
    if unknown := sorted({name for *_, theirs in everyone for name in theirs}):
        raise InputError(
            f"FLOPs cannot be counted: no formula is known for {', '.join(unknown)}; register one with "
            "torch.utils.flop_counter.register_flop_formula"
        )
    for dp_rank, theirs, _ in everyone:
        for name, count in theirs.items() if dp_rank == context.dp_rank else ():
            flops[name] = flops.get(name, 0) + count
