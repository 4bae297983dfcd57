"""Calls of a model with this rank's shard of a batch that all ranks of a group were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import InputError
from ...utils.tensors import map_tensors, parameter_names, position_names, tensors_of
from ...utils.torch_private import BACKWARD, without_override
from ..axis import AppliedAxis, AxisInputs
from ..rank_checks import SameCalls
from ..trial import HALF_TOLERANCE, TOLERANCE, find_gap, no_side_effects, rounds_products
from .shard import ROWS, BatchShard, classify, compare, count_targets

_HALF = (torch.float16, torch.bfloat16)
Run = Callable[[Mapping[str, Any]], Any]
_Functions = Mapping[Any, Callable[..., torch.Tensor]]
_LOSSES: _Functions = {
    F.cross_entropy: classify,
    F.nll_loss: classify,
    F.mse_loss: compare,
    F.l1_loss: compare,
    F.smooth_l1_loss: compare,
}
_CALL_OTHERS = BACKWARD | {F.multi_head_attention_forward}
"""Functions that call some of these; backward does if it recomputes activations."""


class SplitBatch(AppliedAxis):
    """A model that each rank of a group calls with its rows of a batch, or its tokens of every sequence.

    Attributes:
        key: of the axis in the config.
        sharded_dim: ROWS or TOKENS.
        advice: the supported uses of rows, or tokens, for messages.
        functions: torch's, besides losses, with their replacements: called with the BatchShard, torch's function, and
            its arguments.
        non_split: names of arguments that every rank gets unsharded.
        has_stages: a pipeline splits batches into microbatches.
    """

    key: ClassVar[str]
    sharded_dim: ClassVar[int] = ROWS
    advice: ClassVar[str]
    functions: ClassVar[_Functions] = MappingProxyType({})
    non_split: Sequence[str] = ()

    def __init__(self, inputs: AxisInputs, dim: str) -> None:
        super().__init__(inputs.context, dim)
        self.group = inputs.context.group(dim)
        self.calls = SameCalls(self.group, f"{self.key} group")
        self.mode = _Mode({**_LOSSES, **self.functions})
        self.has_stages = inputs.is_split
        self._names, self._context = parameter_names(inputs.model), inputs.context
        self._is_tried = False

    def skip_trial(self) -> None:
        self._is_tried = True

    def call(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """`forward` with this rank's shard of the arguments, which are the same on all ranks of the group. In training
        it returns this rank's outputs, for the criterion; else all of them."""
        self.calls.compare_inputs(model.training, args, kwargs)
        given = dict(zip(position_names(self._names, len(args)), args, strict=True)) | dict(kwargs)

        def run(given: Mapping[str, Any]) -> Any:
            values = list(given.values())
            return forward(*values[: len(args)], **dict(list(given.items())[len(args) :]))

        trains = model.training and torch.is_grad_enabled()
        shard = self.shard_of(given, must_be_even=trains)
        if shard is None:
            self.mode.shard = None
            return run(given)  # each rank computes the full batch
        if not self._is_tried:
            self._try_out(model, run, given, shard)
            self._is_tried = True
        output = self._run(model, run, given, shard)
        if trains:
            return output
        self.mode.shard = None  # the criterion gets all outputs
        return map_tensors(shard.join_if_own, output)

    def _try_out(self, model: nn.Module, run: Run, given: Mapping[str, Any], shard: BatchShard) -> None:
        """Compare the model's outputs for a few rows or tokens, unsharded and sharded. All ranks together.

        Raises:
            InputError: they differ.
        """
        few = shard.for_trial()

        def shorten(name: str, value: Any) -> Any:
            return map_tensors(lambda t: shard.shorten(t, few.full_size, name in self.non_split), value)

        short = {name: shorten(name, value) for name, value in given.items()}
        whole, sharded = list[int](), list[int]()
        try:
            with no_side_effects(model.modules(), self._context.device):
                model.eval()
                self.mode.shard, self.mode.counts, self.mode.is_half = None, whole, False
                with self.mode:
                    expected = run(short)
                self.mode.counts = sharded
                gap = find_gap(expected, map_tensors(few.join_if_own, self._run(model, run, short, few)))
        finally:
            self.mode.counts = None
        if whole != sharded:
            gap = 1.0  # targets were lost, which a loss hardly shows
        everyone = self._context.everyone((gap, self.mode.is_half or rounds_products()))
        worst = max(theirs for theirs, _ in everyone)
        if worst > (HALF_TOLERANCE if any(rounds for _, rounds in everyone) else TOLERANCE):
            raise InputError(
                f"with parallel.{self.key} the model returns something else: its output for {few.full_size} "
                f"{'rows' if few.dim == ROWS else 'tokens'}, which was tried before any update, differs by "
                f"{min(worst, 9.99):.2%}. {self.advice}. Or train this model without parallel.{self.key}"
            )

    def prepare(self, model: nn.Module, given: dict[str, Any], shard: BatchShard) -> dict[str, Any]:
        """The arguments by name, with further ones that the model needs."""
        return given

    def _run(self, model: nn.Module, run: Run, given: Mapping[str, Any], shard: BatchShard) -> Any:
        """The result of `run` for this rank's shard of the arguments."""
        arguments, whole = self.prepare(model, dict(given), shard), self.non_split
        self.mode.shard = shard
        with self.mode:
            return run({n: v if n in whole else map_tensors(shard.cut_if_full, v) for n, v in arguments.items()})

    def shard_of(self, given: Mapping[str, Any], must_be_even: bool = True) -> BatchShard | None:
        """This rank's shard of a call, by the first argument that is sharded; None if the ranks do not divide it.

        Raises:
            InputError: it has to be sharded evenly, and cannot be.
        """
        dim, size = self.sharded_dim, self.size
        split = {name: value for name, value in given.items() if name not in self.non_split}
        shape = next((tensor.shape for tensor in tensors_of(split) if tensor.dim() > dim), None)
        if shape is None:
            form = "[batch, ...]" if dim == ROWS else "[batch, sequence, ...]"
            raise InputError(f"engine(...) was given no tensor {form}, which parallel.{self.key} shards")
        if shape[dim] % size == 0:
            return BatchShard(self.key, self.group, dim, shape[0], shape[dim], self.has_stages)
        if not must_be_even:
            return None
        what = f"a batch of {shape[dim]} rows" if dim == ROWS else f"a sequence of {shape[dim]} tokens"
        more = " (or use drop_last=True)" if dim == ROWS else ", with targets that the loss ignores"
        raise InputError(
            f"{what} cannot be sharded over {self.key}={size} ranks: {size} does not divide it; pad it to "
            f"{-(-shape[dim] // size) * size}{more}"
        )

    def check_loss(self, loss: Any) -> None:
        """Raise InputError if `loss`, after its backward, differs from that of other ranks."""
        if not self.calls.are_same(loss if isinstance(loss, torch.Tensor | tuple) else loss.detach(), "losses"):
            raise InputError(
                f"the {self.size} ranks of a {self.key} group have different losses: "
                "compute the loss in the model or in engine.criterion, with torch's cross_entropy, nll_loss, mse_loss, "
                "l1_loss or smooth_l1_loss; what is added to it has to be the same on all ranks"
            )


class _Mode(TorchFunctionMode):
    """A scope in which torch's losses and attention compute for the full batch, from this rank's shard of it.

    Attributes:
        shard: this rank's shard in the last call of the model; None: functions are given full batches.
        counts: in a trial, for each loss the number of targets that count on all ranks.
        is_half: in a trial, something was computed in half precision.
    """

    def __init__(self, functions: _Functions) -> None:
        super().__init__()
        self._functions = functions
        self.shard: BatchShard | None = None
        self.counts: list[int] | None = None
        self.is_half = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CALL_OTHERS:
            inner = self._functions.get(func)
            with self:
                return inner(func, *args, **kwargs) if inner else without_override(func)(*args, **kwargs)
        function = self._functions.get(func)
        if self.counts is not None:
            tensors = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
            self.is_half |= any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors)
            if function is classify:
                self.counts.append(count_targets(self.shard, args[1], kwargs["ignore_index"]))
        if function is None or self.shard is None:
            return func(*args, **kwargs)
        return function(self.shard, func, *args, **kwargs)
