"""Tests how the model and the criterion combine tokens, before their results are used: the model on a few tokens of the
first call of each kind, the criterion on a few of this rank's outputs. The tests leave no trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import call
from types import CellType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError, shorten
from ...utils.tensors import full_tensor, is_compound, map_tensors, tensors_of
from ..comm import gather_objects
from ..trial import HALF_TOLERANCE, TOLERANCE, find_gap, no_side_effects, rounds_products
from .attention import Sequences
from .loss import COUNTING, TokensMode

if TYPE_CHECKING:
    from .axis import ContextParallel

TOKENS = 8
"""The number of tokens of each rank in a trial."""
_HALF = (torch.float16, torch.bfloat16)
_DROPOUT = F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout
_MIXING = "tokens are combined, or positions counted"
_LIMITS = (TOLERANCE, HALF_TOLERANCE), (1e-5, 1e-3)
"""Of differences, and of those by mixing, each in fp32 and in half precision: where kernels get the same shapes, a
token's result is the same to the bit, except in layers of experts."""

_ADVICE = (
    "Only torch's scaled_dot_product_attention may combine tokens (no convolution, mean or shift), and positions must "
    "come from the argument that parallel.context.positions names. Outputs are [batch, sequence, ...], or a mean or "
    "sum over tokens (output_router_logits=False). Shift targets before the call: F.pad(ids, (0, 1), value=-100)[:, 1:]"
)

Run = Callable[[Mapping[str, Any]], Any]


class _TrialMode(TokensMode):
    """Without dropout. It notes the counts of targets and the `ignore_index` in use, and if something was computed in
    half precision."""

    def __init__(self, attend: Callable[..., torch.Tensor], average: Callable[[Any], Any]) -> None:
        def attend_all(
            fn: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0, *args: Any, **kw: Any
        ) -> torch.Tensor:
            return attend(fn, query, key, value, attn_mask, 0.0, *args, **kw)

        def noted(count: torch.Tensor) -> float:
            self.counts.append(float(average(count)))
            return self.counts[-1]

        super().__init__(attend_all, noted)
        self.counts: list[float] = []
        self.ignored: int | None = None
        self.is_half = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
        self.is_half |= any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors)
        if func in COUNTING:
            self.ignored = kwargs["ignore_index"]
        return args[0] if func in _DROPOUT else super().__torch_function__(func, types, args, kwargs)


def _alone(func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of attention: a function of each token by itself, which changes with all that it is given."""
    if key.shape[-2] != query.shape[-2]:
        return func(query, key, value)  # of another sequence, which the comparison rejects
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    own = (query * key.flip(-1)).sum(-1, keepdim=True, dtype=torch.float32).sin()
    return (value * (own + 1.5).to(value.dtype)).to(query.dtype)


@contextmanager
def _uneven_weights(model: nn.Module) -> Iterator[None]:
    """A scope in which parameters whose elements are all equal have uneven ones: a head, gate or projection that begins
    at zero would hide what is behind it."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        _forget_copies(model)
        for param in model.parameters():
            local: Any = param.data.to_local() if hasattr(param.data, "to_local") else param.data
            if is_compound(local) or not local.is_floating_point() or not local.numel() or local.dtype.itemsize < 2:
                continue
            least, most = local.aminmax()
            if bool(least == most):
                kept.append((local, least.clone()))
                uneven = _uneven(local)  # of `data`: it does not count as a write
                local.copy_(uneven / local.shape[-1] ** 0.5 if local.dim() > 1 else 1 + uneven / 2)
        yield
    finally:
        for local, value in kept:
            local.fill_(value)
        _forget_copies(model)


def _uneven(like: torch.Tensor) -> torch.Tensor:
    """Numbers from -1 to 1 without an order, equal on all ranks."""
    return torch.arange(like.numel(), dtype=torch.float32, device=like.device).square_().sin_().view(like.shape)


def _forget_copies(model: nn.Module) -> None:
    """Free copies of weights: gathered by fsdp, or cast by autocast."""
    torch.clear_autocast_cache()
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


@dataclass
class ModelTrial:
    """Compares the model's outputs for a few tokens of whole sequences on one rank with those on the ranks of a group.

    Attributes:
        run: calls the model with arguments by name.
        drew: it has drawn random numbers.
        evaluates: it runs in evaluation mode.
        is_half: it has computed something in half precision.
    """

    axis: ContextParallel
    model: nn.Module
    run: Run
    drew: bool = False
    evaluates: bool = False
    is_half: bool = False

    def compare(self, given: Mapping[str, Any], sequences: Sequences) -> list[bool]:
        """For each loss in the outputs, True if the losses of the ranks' tokens add up to that of all.

        Raises:
            InputError: on all of these ranks: the model computes something else on the ranks than on one.
        """
        masks, gather = self.axis.non_split, partial(gather_objects, group=self.axis.batch_group)
        few = Sequences(sequences.group, sequences.rows, min(sequences.length, TOKENS * self.axis.size))
        short = {name: _shorten(value, sequences, few, name in masks) for name, value in given.items()}
        odd = {name: _less_counted(value, given[name], few) for name, value in short.items()}
        with torch.no_grad(), _uneven_weights(self.model):
            whole, _ = self._run(short, _alone)
            draws = any(gather(self.drew))
            gaps = {_MIXING: self._find_mixing(whole, short, few, moves=not draws)}
            self.evaluates = draws
            gaps["outputs, with padding or targets that do not count"], adds = self._find_other_outputs(odd, few)
        everyone, rounds = zip(*gather((gaps, self.is_half or rounds_products())), strict=True)
        for what in gaps:
            worst = max(theirs.get(what, 0.0) for theirs in everyone)
            if not worst <= _LIMITS[what == _MIXING][any(rounds)]:
                taken = [name for name, value in given.items() if any(map(sequences.is_whole, tensors_of(value)))]
                raise InputError(
                    f"with parallel.context the model's output for {few.length} tokens differs by "
                    f"{min(worst, 9.99):.2%} ({what}). {_ADVICE}. Split were (else see non_split): {shorten(taken)}"
                )
        return adds

    def _run(self, arguments: Mapping[str, Any], attend: Any, average: Any = float) -> tuple[Any, list[float]]:
        """The outputs, and the mean counts of targets."""
        mode = _TrialMode(attend, average)
        modules, scope = self.model.modules(), self.axis.trial_scope()
        with no_side_effects(modules, self.axis.device) as effects, scope as drew, mode:
            if self.evaluates:
                self.model.eval()
            output = self.run(arguments)
            self.drew |= effects.drew() or drew()
        self.is_half |= mode.is_half
        return output, mode.counts

    def _find_mixing(self, whole: Any, short: Mapping[str, Any], few: Sequences, moves: bool) -> float:
        """The change of the outputs of half the tokens with the other half and, if a token's place may change, with
        their place: other than by attention, and by positions that are arguments.

        Args:
            whole: the outputs.
        """
        given, half = self.axis.prepare(self.model, short, few), few.length // 2
        first, last = slice(half), slice(half, 2 * half)

        def outputs(taken: slice, place: slice) -> list[torch.Tensor]:
            def put(tensor: torch.Tensor) -> torch.Tensor:
                if not few.is_whole(tensor):
                    return tensor
                part, other = tensor[:, taken], tensor[:, taken].flip(0, 1)
                return torch.cat([*((part, other) if place == first else (other, part)), tensor[:, 2 * half :]], 1)

            changed = {n: v if n in self.axis.non_split else map_tensors(put, v) for n, v in given.items()}
            output, _ = self._run(changed, _alone)
            return [tensor[:, place] for tensor in tensors_of(output) if few.is_whole(tensor)]

        gaps = [0.0]
        for taken, place in ((last, first), (first, last)) if moves else ((first, first), (last, last)):
            expected = [tensor[:, taken] for tensor in tensors_of(whole) if few.is_whole(tensor)]
            gaps.append(find_gap(expected, outputs(taken, place)))
        return max(gaps)

    def _find_other_outputs(self, short: Mapping[str, Any], few: Sequences) -> tuple[float, list[bool]]:
        """The difference of the outputs of all ranks' tokens from those of whole sequences; see `compare`."""
        size = self.axis.size
        whole, counted = self._run(short, call)
        sharded, averaged = self._run(self.axis.own_part(self.model, short, few), self.axis.attend, self.axis.average)
        if list(map(round, counted)) != [round(size * count) for count in averaged]:
            return 1.0, []  # targets were lost, which a loss hardly shows
        gaps, adds = [0.0], list[bool]()
        pairs = zip(tensors_of(whole), tensors_of(map_tensors(few.join_if_own, sharded)), strict=True)
        for expected, found in pairs:
            if expected.dim() or not expected.is_floating_point():
                gaps.append(find_gap(expected, found))
                continue
            mean = self.axis.average(found.double())
            by_mean, by_sum = find_gap(expected, mean), find_gap(expected, size * mean)
            adds.append(by_sum < by_mean)
            gaps.append(min(by_mean, by_sum))
        return max(gaps), adds


def _shorten(value: Any, sequences: Sequences, few: Sequences, is_mask: bool) -> Any:
    """The first tokens of tensors that have all: [batch, sequence, ...], or a mask [..., sequence]."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for dim in range(tensor.dim())[slice(-2, None) if is_mask else slice(1, 2)]:
            if tensor.shape[dim] == sequences.length:
                tensor = tensor.narrow(dim, 0, few.length)
        if not is_mask and tensor.dim() > 1 and tensor.dtype == torch.int64 and bool((tensor < 0).any()):
            tensor = tensor.clamp_min(0)  # targets that do not count
        return tensor.contiguous()

    return map_tensors(cut, value)


def _less_counted(value: Any, given: Any, few: Sequences) -> Any:
    """Targets, or a mask of 0 and 1, of which only some of the first rank's do not count: a mean of means is another
    then, and positions that depend on the mask are.

    Args:
        given: all of `value`.
    """
    if not isinstance(value, torch.Tensor) or value.shape != (few.rows, few.length):
        return value
    least, most = map(float, given.double().aminmax())
    has_ignored, is_binary = value.dtype == torch.int64 and least < 0, least in (0.0, 1.0) and most == 1.0
    if not (has_ignored or is_binary):
        return value
    new = value.clamp_min(0) if has_ignored else value.clone()
    new[:, 1 : 1 + few.own // 2] = min(least, 0.0)  # not the first: the first row of a causal mask would be empty
    return new


# -- the criterion -----------------------------------------------------------------------------------------------------

_ROUNDED, _HALF_ROUNDED = 1e-5, 2e-2
"""Of numbers of a few tokens, in fp32 and in half precision."""


def try_criterion(
    criterion: Any, numbers: Callable[..., list[torch.Tensor]], arguments: Any, own: int
) -> list[bool | None]:
    """For each of the `numbers` that the criterion returns: True if those of two halves of some tokens add up to that
    of all; False if it is their mean; None if neither.

    Args:
        criterion: the user's, which is left as it is.
        arguments: positional and by name: this rank's outputs, and the targets of its tokens.
        own: this rank's tokens of each sequence.
    """
    arguments = map_tensors(full_tensor, arguments)
    tensors = tensors_of(arguments)
    shape = next((t.shape for t in tensors if t.requires_grad and t.dim()), torch.Size([0, own]))
    rows = shape[0] if own in shape[1:] else shape[0] // own
    device = tensors[0].device
    places = torch.arange(max(2, min(own, TOKENS) // 2 * 2), device=device)
    negative = any(t.dtype == torch.int64 and bool((t < 0).any()) for t in tensors)
    holders = _holders(criterion)

    def take(tensor: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        """The tokens at these places, with the first targets ignored, where they can be."""
        dim = next((dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == own), None)
        is_flat = dim is None and tensor.dim() > 0 and tensor.shape[0] == rows * own
        new = tensor.detach()
        if is_flat:
            new, dim = new.unflatten(0, (rows, own)), 1
        if dim is None:
            return new
        new = new.index_select(dim, places % own)
        is_target = new.dtype == torch.int64
        is_mask = not tensor.requires_grad and bool(((tensor == 0) | (tensor == 1)).all())  # of all tokens, not of few
        if new.is_floating_point() and not is_own:
            new = new.to(torch.promote_types(new.dtype, torch.float32))
        if tensor.requires_grad and new.numel() > 1 and bool(new.min() == new.max()):  # hides what is made of it
            new = new + 0.1 * _uneven(new).to(new.dtype)
        new = torch.ones_like(new) if is_mask else new.clamp_min(0) if is_target else new  # so that all targets count
        if is_mask or (knows and is_target and (whole.ignored is not None or negative)):
            first = (places < len(places) // 4 + 1).view(-1, *[1] * (new.dim() - dim - 1))
            new = new.masked_fill(first, 0 if is_mask else -100 if whole.ignored is None else whole.ignored)
        new = new.index_select(dim, some)
        return new.flatten(0, 1) if is_flat else new

    def halved() -> _TrialMode:
        """A half counts half of all targets."""
        counts = iter(whole.counts)
        return _TrialMode(call, lambda _: next(counts) / 2)

    def compute(mode: _TrialMode, some: torch.Tensor) -> list[float]:
        args, kwargs = map_tensors(partial(take, some=some), arguments)
        with no_side_effects(holders, device), torch.autocast(device.type, enabled=False), mode:
            return [float(number) for number in numbers(*args, **kwargs)]

    whole, is_own, knows = _TrialMode(call, float), False, False
    try:
        compute(whole, places)  # finds out which index is ignored
    except RuntimeError:  # weights of the criterion are in half precision, and take no fp32
        is_own = True
        compute(whole, places)
    knows = True
    whole.counts.clear()
    made = [compute(whole, places), *(compute(halved(), half) for half in places.chunk(2))]
    return [_relation(_HALF_ROUNDED if is_own else _ROUNDED, *of_each) for of_each in zip(*made, strict=True)]


def _relation(limit: float, whole: float, one: float, other: float) -> bool | None:
    """True if the halves add up to the whole; False if it is their mean; None if neither."""
    scale = limit * (abs(one) + abs(other)) + 1e-12
    if not abs(one + other - 2 * whole) > scale:  # or all is nan
        return False
    return True if abs(one + other - whole) <= scale else None


def _holders(criterion: Any) -> list[Any]:
    """The objects whose attributes `criterion` may change: itself, those that it names, and their modules."""
    near = [criterion, getattr(criterion, "__self__", None)]
    if inspect.isfunction(criterion):
        near += [cell.cell_contents for cell in criterion.__closure__ or () if cell != CellType()]  # some are empty
        near += map(criterion.__globals__.get, criterion.__code__.co_names)
    near = [each for each in near if hasattr(each, "__dict__") and not isinstance(each, (type, ModuleType))]
    return [part for each in near for part in (each.modules() if isinstance(each, nn.Module) else [each])]
