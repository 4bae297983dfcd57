"""The axis `context`: each rank computes its tokens of every sequence, with attention to all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import InputError
from ...options import Names, Options, PositiveInt
from ...utils.tensors import map_tensors, parameter_names, position_names, tensors_of
from .. import collectives
from ..axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from ..comm import SameCalls
from ..models.peft import base_model
from ..models.transformers import find_context_problem, whole_sequence_arguments, without_cache
from .attention import Sequences, attend
from .loss import LOSS, TokensMode, is_made_otherwise, mark, mark_of, operations, trace, trace_losses
from .trial import ModelTrial, Run, try_criterion

_SHIFT = (
    "engine.criterion takes what engine(...) returned, unchanged, and targets [batch, sequence, ...]; compute inside "
    "it. Shift targets of whole sequences before the call: F.pad(ids, (0, 1), value=-100)[:, 1:]"
)
_IN_ORDER = {f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "ToCopy", "Clone", "Mul", "Div")}
_VIEWS = _IN_ORDER | {f"{name}Backward0" for name in ("Transpose", "Permute", "T", "Slice", "Select", "Squeeze")}
"""The operations on outputs that are allowed before the criterion. Those that keep the order: also for flat targets."""


class ContextParallel(AppliedAxis):
    """A model that each rank calls with its tokens of every sequence. It holds all parameters.

    Each loss of this rank's tokens is made one of whole sequences, the same on all ranks, whose gradients are averaged
    over the context ranks afterwards.

    Attributes:
        attend: attention of this rank's tokens.
        mode: the scope of backward, which may compute activations again.
        batch_group: the ranks that compute this batch together; others may be at another call.
        non_split: the arguments that every rank gets whole.
        is_weighted: the criterion returns (sum, weight).
        trial_scope: the scope of a trial: nothing draws from the engine's random numbers, and products are not in
            float8. It gives a function that returns True if something did draw.
    """

    is_weighted = False

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs.context, ContextParallelism.dim)
        context = inputs.context
        self.device, self._group = context.device, context.group(self.dim)
        self.batch_group = context.group(*(axis for axis in context.sizes if axis != "dp"))
        self._positions, self.non_split = inputs.plan
        self._names = parameter_names(inputs.model)
        self._calls = SameCalls(self._group, "context group")
        self.attend = partial(attend, self._group)
        self.mode = TokensMode(self.attend, self.average)
        self.trial_scope: Callable[[], AbstractContextManager[Callable[[], bool]]]
        self._adds: dict[Any, list[bool]] = {}  # of each kind of call, for the losses in the outputs
        self._criteria: dict[tuple[str, ...], list[bool | None]] = {}  # by what it computes
        self._made: dict[Any, set[tuple[str, ...]]] = {}  # by which operations
        self._losses: set[tuple[str, ...]] = set()  # given to backward
        self._is_tried = True

    def skip_trial(self) -> None:
        self._is_tried = False

    def average(self, part: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks. The gradient is that of `part`, for a mean over the ranks afterwards."""
        return collectives.average(part, self._group)

    # -- the model -------------------------------------------------------------------------------------------------

    def call(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Sequences | None]:
        """`forward` with this rank's tokens of the arguments, which are the same on all ranks of the group.

        In training it returns this rank's outputs, for the criterion, and whose they are; else all of them. Losses in
        the outputs are those of whole sequences.
        """
        self._calls.compare_inputs(model.training, args, kwargs)
        given = dict(zip(position_names(self._names, len(args)), args, strict=True)) | dict(kwargs)

        def run(given: Mapping[str, Any]) -> Any:
            values = list(given.values())
            return forward(*values[: len(args)], **dict(list(given.items())[len(args) :]))

        trains = model.training and torch.is_grad_enabled()
        given = without_cache(model, given)
        sequences = self._sequences_of(given, must_be_even=trains)
        if sequences is None:
            return run(given), None
        own = self.own_part(model, given, sequences)
        kind: Any = (model.training, *sorted(name for name, value in given.items() if value is not None))
        if kind not in self._adds:
            self._adds[kind] = self._try_out(model, run, given, sequences)
        with self.mode:
            output = run(own)
        tokens = [tensor for tensor in tensors_of(output) if tensor.dim()]
        if (losses := _numbers_in(output)) and trains and self._is_tried:
            made = operations(trace_losses(losses, tokens)[0])
            known = self._made.setdefault(kind, {made})
            is_new = losses[0].new_tensor(float(made not in known))
            dist.all_reduce(is_new, dist.ReduceOp.MAX, self.batch_group)  # ranks may have met other experts
            if is_new.item():  # a term has set in
                self._adds[kind] = self._try_out(model, run, given, sequences)
                known.add(made)
        output = self._complete(output, self._adds[kind])
        if not trains:
            return map_tensors(sequences.join_if_own, output), None
        for tensor in tokens:
            mark(tensor, sequences)
        return output, sequences

    def _sequences_of(self, given: Mapping[str, Any], must_be_even: bool) -> Sequences | None:
        """The sequences of a call, by the first argument that is sharded; None without one, or if the ranks do not
        divide it: each rank computes all then.

        Raises:
            InputError: they must be sharded, and cannot be.
        """
        split = {name: value for name, value in given.items() if name not in self.non_split}
        shape = next((tensor.shape for tensor in tensors_of(split) if tensor.dim() > 1), None)
        if shape is None:
            return None
        rows, length = shape[:2]
        if length % self.size == 0:
            return Sequences(self._group, rows, length)
        if not must_be_even:
            return None
        fix = "pad it, with targets that the loss ignores"
        raise InputError(f"context={self.size} does not divide a sequence of {length} tokens; {fix}")

    def prepare(self, model: nn.Module, given: Mapping[str, Any], sequences: Sequences) -> dict[str, Any]:
        """The arguments by name, with further ones that the model needs for a part of its tokens."""
        new = whole_sequence_arguments(model, dict(given))
        if self._positions is not None and new.get(self._positions) is None:
            new[self._positions] = torch.arange(sequences.length, device=self.device).expand(sequences.rows, -1)
        return new

    def own_part(self, model: nn.Module, given: Mapping[str, Any], sequences: Sequences) -> dict[str, Any]:
        """The arguments by name, for this rank's tokens."""
        new = self.prepare(model, given, sequences)
        return {n: v if n in self.non_split else map_tensors(sequences.cut_if_whole, v) for n, v in new.items()}

    def _try_out(self, model: nn.Module, run: Run, given: Mapping[str, Any], sequences: Sequences) -> list[bool]:
        return ModelTrial(self, model, run).compare(given, sequences) if self._is_tried else []

    def _complete(self, tree: Any, adds: Iterable[bool | None], is_deferred: bool = False) -> Any:
        """`tree` with numbers of whole sequences, of those of this rank's tokens.

        Args:
            adds: for each of them, True if the ranks' numbers add up; None: it stays this rank's.
            is_deferred: a pipeline takes their mean over the ranks afterwards.
        """
        rest = chain(adds, repeat(False))

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            if not _is_number(tensor) or (adds := next(rest)) is None:
                return tensor
            tensor = tensor * self.size if adds else tensor
            if is_deferred:
                return tensor
            tensor = self.average(tensor)
            mark(tensor, LOSS)
            return tensor

        return map_tensors(whole, tree)

    # -- the criterion ---------------------------------------------------------------------------------------------

    def criterion_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], deferred: Sequences | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The criterion and its arguments, for this rank's tokens, if among them are outputs of these.

        Args:
            deferred: whose outputs they will be, if a pipeline has not computed them yet.

        Raises:
            InputError: outputs or targets are not in the order of the tokens, or outputs are of different lengths.
        """
        sequences, in_order = deferred, False
        for tensor in tensors_of((args, kwargs)):
            nodes, ends = trace([tensor.grad_fn], mark_of)
            marks = [made for made in map(mark_of, ends) if made is not LOSS]
            if not marks:
                continue
            if any(made != (sequences or marks[0]) for made in marks):
                raise InputError("parallel.context: the criterion got outputs of different lengths; pad them to one")
            sequences, names = marks[0], {node.name() for node in nodes}
            is_flat = tensor.shape[:1] == (sequences.rows * sequences.own,)
            if not names <= _VIEWS or not (is_flat or sequences.own in tensor.shape[1:]):
                raise InputError(f"parallel.context: an output of shape {list(tensor.shape)} was changed. {_SHIFT}")
            in_order |= is_flat and sequences.own not in tensor.shape[1:] and names <= _IN_ORDER
        if sequences is None:
            return function, args, kwargs  # in evaluation: all tokens

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.grad_fn is not None:
                return tensor
            targets.append(tensor)
            if tensor.dim() != 1 or len(tensor) != sequences.rows * sequences.length:
                return sequences.cut_if_whole(tensor)
            if not in_order:
                raise InputError(f"parallel.context: {len(tensor)} targets without a sequence dim. {_SHIFT}")
            return sequences.cut(tensor.view(sequences.rows, -1)).flatten()

        targets: list[torch.Tensor] = []
        args, kwargs = map_tensors(cut, args), map_tensors(cut, kwargs)
        self._calls.compare_inputs(True, targets, {}, of="targets")
        return partial(self._whole_loss, function, sequences.own, deferred is not None), args, kwargs

    def _whole_loss(self, function: Callable[..., Any], own: int, is_deferred: bool, /, *args: Any, **kw: Any) -> Any:
        """The criterion's value for whole sequences, from this rank's tokens. See `_complete`."""

        def compute(*args: Any, **kw: Any) -> Any:
            value = function(*args, **kw)
            if not self.is_weighted or not isinstance(value, (tuple, list)):
                return value
            total, weight = value
            return total, torch.as_tensor(weight, dtype=torch.float64, device=total.device).detach()

        with self.mode:
            value = compute(*args, **kw)
        numbers = _numbers_in(value)
        nodes, ends = trace_losses(numbers, tensors_of((args, kw)))
        made = operations(nodes)
        if made not in self._criteria and self._is_tried:
            found = try_criterion(function, lambda *args, **kw: _numbers_in(compute(*args, **kw)), (args, kw), own)
            pairs = zip(numbers, found, strict=True)
            is_neither = any(adds is None and (number.requires_grad or self.is_weighted) for number, adds in pairs)
            if is_neither or is_made_otherwise(nodes, ends):
                raise InputError(
                    "with parallel.context the criterion must be a mean or a sum over tokens, but in a trial it was "
                    "neither; for a mean over some tokens, return (sum, weight), with loss_reduction='weighted'"
                )
            self._criteria[made] = found
        return self._complete(value, self._criteria.get(made, ()), is_deferred)

    def check_loss(self, loss: Any) -> None:
        """Before its backward.

        Raises:
            InputError: `loss` was not made of those that the criterion or the model returned.
        """
        total = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
        if not isinstance(total, torch.Tensor):
            return
        nodes, ends = trace([total.grad_fn], mark_of)
        made = operations(nodes)
        is_right = all(mark_of(end) is LOSS for end in ends)
        if is_right and made not in self._losses:
            self._losses.add(made)
            is_right = not is_made_otherwise(nodes, ends) if ends else self._calls.are_same(total, "losses")
        if not is_right:
            raise InputError(
                "with parallel.context the outputs of engine(...) are only this rank's tokens: compute the loss in the "
                "model or in engine.criterion, and add only terms that are the same on all ranks (a weight penalty)"
            )

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        return {"layout": f"1/{self.size} of the tokens of each sequence"}


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_floating_point()


def _numbers_in(tree: Any) -> list[torch.Tensor]:
    """The losses in `tree`."""
    return [tensor for tensor in tensors_of(tree) if _is_number(tensor)]


_POSITIONS = ("position_ids", "positions")


class ContextOptions(Options):
    """The keys of `parallel.context`: `dict(context=2)`, or `dict(context=dict(size=2, non_split=("bias",)))`."""

    size: PositiveInt = 1
    """The number of ranks over which each sequence is sharded."""
    positions: str | None = None
    """The model's argument for the position of each token. Default: position_ids or positions, if it has one."""
    non_split: Names = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "attn_mask", "mask")
    """The arguments of the model that are not sharded, such as masks, which attention needs for all tokens."""


class ContextParallelism(Axis):
    """`parallel.context`."""

    dim = "cp"
    options = ContextOptions
    splits_params = False
    same_rng = False
    splits_loss = True
    cost = "attention exchanges heads for tokens, four times a layer"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled:
            yield "compile", "attention waits for other ranks, and compiled code would not; remove compile, or context"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Any, list[str]]:
        """The name of the argument that takes positions, or None, and those that every rank gets unsharded."""
        problem, positions = find_context_problem(inputs.model), inputs.options.positions
        if positions is None:
            names = parameter_names(base_model(inputs.model))
            positions = next((name for name in _POSITIONS if name in names), None)
        return (positions, inputs.options.non_split), [f"parallel.context: {problem}"] if problem else []

    apply = ContextParallel
