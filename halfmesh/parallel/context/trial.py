"""Trials, before they are used, of what combines tokens: the model, on a few tokens of the first call of each kind, and
the criterion, on a few of this rank's outputs. Neither leaves a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ...errors import InputError, shorten
from ...utils.tensors import full_tensor, is_compound, map_tensors, tensors_of
from ..comm import gather_objects
from ..modules import unchanged
from ..trial import HALF_TOLERANCE, TOLERANCE, find_gap, no_side_effects, rounds_products
from .loss import COUNTING, TokensMode
from .sequences import Sequences

TOKENS = 8
"""The number of tokens of each rank in a trial."""
_HALF = (torch.float16, torch.bfloat16)
_DROPOUT = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
)
_EXACT, _EXACT_HALF = 1e-5, 1e-3
"""Where kernels get the same shapes, a token's result is the same to the bit, except in layers of experts."""
_ROUNDED_HALF = 0.01
"""Of one token, where kernels get other shapes."""

Run = Callable[[Mapping[str, Any]], Any]


class _TrialMode(TokensMode):
    """Without dropout. It notes if something was computed in half precision, and the counts of targets."""

    def __init__(self, attend: Callable[..., torch.Tensor], average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(attend, self._noted(average))
        self.counts: list[float] = []
        self.is_half = False

    def _noted(self, average: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def noted(count: torch.Tensor) -> torch.Tensor:
            count = average(count)
            self.counts.append(float(count))
            return count

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
        self.is_half |= any(t.dtype in _HALF or torch.is_autocast_enabled(t.device.type) for t in tensors)
        return args[0] if func in _DROPOUT else super().__torch_function__(func, types, args, kwargs)


def _without_dropout(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attention(
        func: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kw: Any,
    ) -> torch.Tensor:
        return attend(func, query, key, value, attn_mask, 0.0, *args, **kw)

    return attention


def _alone(func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of attention: a function of each token by itself, which changes with all that it is given."""
    if key.shape[-2] != query.shape[-2]:
        return func(query, key, value)  # of another sequence, which the comparison refuses
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    own = (query * key.flip(-1)).sum(-1, keepdim=True, dtype=torch.float32).sin()
    return (value * (own + 1.5).to(value.dtype)).to(query.dtype)


@contextmanager
def _random_weights(model: nn.Module) -> Iterator[None]:
    """A scope in which parameters whose elements are all equal have random ones: a head, gate or projection that begins
    at zero would hide what is behind it."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    try:
        _forget_copies(model)
        for param in model.parameters():
            local: Any = param.data.to_local() if hasattr(param.data, "to_local") else param.data
            if is_compound(local) or not local.is_floating_point() or not local.numel() or local.dtype.itemsize < 2:
                continue
            least, most = local.aminmax()
            if bool(least == most):
                kept.append((local, least.clone()))
                new = torch.empty(local.shape, dtype=torch.float32)
                if local.dim() > 1:
                    new.normal_(0, local.shape[-1] ** -0.5, generator=generator)
                else:
                    new.uniform_(0.5, 1.5, generator=generator)
                local.copy_(new)  # of `data`: it does not count as a write
        yield
    finally:
        for local, value in kept:
            local.fill_(value)
        _forget_copies(model)


def _forget_copies(model: nn.Module) -> None:
    """Free copies of weights: gathered by fsdp, or cast by autocast."""
    torch.clear_autocast_cache()
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


class ModelTrial:
    """Compares what the model makes of a few tokens of whole sequences, on one rank, and on the ranks of a group.

    Args:
        run: calls the model with arguments by name.
        prepare: adds the arguments that the model needs for its tokens.
        cut: this rank's tokens of prepared arguments.
        scope: within it nothing draws from the engine's random numbers; gives a function that tells if something did.
        attend, average: attention and means of targets of this rank's tokens.
        group: the ranks that compute this batch together. Others may be at another call.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        prepare: Callable[[dict[str, Any], Sequences], dict[str, Any]],
        cut: Callable[[Mapping[str, Any], Sequences], dict[str, Any]],
        scope: Callable[[], Any],
        attend: Callable[..., torch.Tensor],
        average: Callable[[torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._model, self._run_model, self._prepare, self._cut, self._scope = model, run, prepare, cut, scope
        self._attend, self._average, self._device = attend, average, device
        self._gather = partial(gather_objects, group=group)
        self._drew = self._is_half = False
        self._evaluates = False

    def compare(self, given: Mapping[str, Any], sequences: Sequences, masks: Sequence[str], advice: str) -> list[bool]:
        """For each loss in the outputs, True if the losses of the ranks' tokens add up to that of all.

        Raises:
            InputError: on all of these ranks: the model computes something else on the ranks than on one.
        """
        size = sequences.group.size()
        few = Sequences(sequences.group, sequences.rows, min(sequences.length, TOKENS * size))
        short = {name: _shorten(name, value, sequences, few.length, name in masks) for name, value in given.items()}
        with torch.no_grad(), _random_weights(self._model):
            gaps = {"tokens are combined": self._find_mixing(short, few, masks)}
            self._evaluates = any(self._gather(self._drew))
            gaps["positions"] = self._find_other_positions(short, few)
            limits = {"tokens are combined": (_EXACT, _EXACT_HALF), "positions": (TOLERANCE, _ROUNDED_HALF)}
            gap, adds = self._find_other_outputs(short, few)
            gaps["outputs"] = gap
            padded = {name: _padded(value, few) if name in masks else value for name, value in short.items()}
            if any(padded[name] is not short[name] for name in short):
                gaps["with a padded token its outputs"] = self._find_other_outputs(padded, few)[0]
            fewer = {n: v if n in masks else _less_counted(v, given[n], few) for n, v in short.items()}
            if any(fewer[name] is not short[name] for name in short):
                gaps["with targets that do not count its outputs"] = self._find_other_outputs(fewer, few)[0]
        everyone = self._gather((gaps, self._is_half or rounds_products()))
        rounds = any(theirs for _, theirs in everyone)
        for what in gaps:
            worst = max(theirs.get(what, 0.0) for theirs, _ in everyone)
            if not worst <= limits.get(what, (TOLERANCE, HALF_TOLERANCE))[rounds]:
                taken = [name for name, value in given.items() if any(map(sequences.is_whole, tensors_of(value)))]
                raise InputError(
                    f"with parallel.context the model returns something else: its output for {few.length} tokens, "
                    f"which was tried before any update, differs by {min(worst, 9.99):.2%} ({what}). {advice}. Taken "
                    f"for sequences were {shorten(taken)}: name others in parallel.context.non_split. Or train this "
                    "model without parallel.context"
                )
        return adds

    def _run(self, arguments: Mapping[str, Any], attend: Any, average: Any) -> tuple[Any, list[float]]:
        """The outputs, and the mean counts of targets."""
        mode = _TrialMode(_without_dropout(attend), average)
        with no_side_effects(self._model.modules(), self._device) as effects, self._scope() as drew, mode:
            if self._evaluates:
                self._model.eval()
            output = self._run_model(arguments)
            self._drew |= effects.drew() or drew()
        self._is_half |= mode.is_half
        return output, mode.counts

    def _find_mixing(self, short: Mapping[str, Any], few: Sequences, masks: Sequence[str]) -> float:
        """How much the outputs of half the tokens change with the tokens of the other half, other than by attention."""
        given = self._prepare(dict(short), few)
        half = few.length // 2
        halves = slice(0, half), slice(half, few.length)

        def other(name: str, value: Any, place: slice) -> Any:
            def change(tensor: torch.Tensor) -> torch.Tensor:
                if not few.is_whole(tensor) or name in masks or "position" in name:
                    return tensor
                new = tensor.clone()
                new[:, place] = tensor.flip(0, 1)[:, place]
                new[:, place.start] = tensor[:, place.start - 1]
                return new

            return map_tensors(change, value)

        outputs = [self._run(given, _alone, lambda count: count)[0]]
        for place in halves:
            changed = {name: other(name, value, place) for name, value in given.items()}
            outputs.append(self._run(changed, _alone, lambda count: count)[0])
        one, *others = ([t for t in tensors_of(output) if few.is_whole(t)] for output in outputs)
        pairs = zip(others, reversed(halves), strict=True)
        return max(find_gap([t[:, kept] for t in one], [t[:, kept] for t in changed]) for changed, kept in pairs)

    def _find_other_positions(self, short: Mapping[str, Any], few: Sequences) -> float:
        """How much most of this rank's tokens differ from the same of whole sequences, without attention: by less
        rounding than all outputs do. (Some may be sent to other experts.)"""
        whole = self._run(short, _alone, lambda count: count)[0]
        own = self._run(self._cut(self._prepare(dict(short), few), few), _alone, lambda count: count)[0]
        gaps = [0.0]
        for expected, found in zip(tensors_of(whole), tensors_of(own), strict=False):
            if few.is_whole(expected) and expected.is_floating_point() and few.cut(expected).shape == found.shape:
                one, other = (x.double().reshape(few.rows, few.own, -1) for x in (few.cut(expected), found))
                tokens = (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-30)
                gaps.append(float(tokens.nan_to_num().median()))
        return max(gaps)

    def _find_other_outputs(self, short: Mapping[str, Any], few: Sequences) -> tuple[float, list[bool]]:
        """How much the outputs of all ranks' tokens differ from those of whole sequences; see `compare`."""
        size = few.group.size()
        whole, counted = self._run(short, lambda func, *args, **kw: func(*args, **kw), lambda count: count)
        own = self._cut(self._prepare(dict(short), few), few)
        sharded, averaged = self._run(own, self._attend, self._average)
        if len(tensors_of(whole)) != len(tensors_of(sharded)):
            return float("inf"), []
        if list(map(round, counted)) != [round(size * count) for count in averaged]:
            return 1.0, []  # targets were lost, which a loss hardly shows
        gaps, adds = [0.0], list[bool]()
        pairs = zip(tensors_of(whole), tensors_of(map_tensors(few.join_if_own, sharded)), strict=True)
        for expected, found in pairs:
            if expected.dim() or not expected.is_floating_point():
                gaps.append(find_gap(expected, found))
                continue
            mean = self._average(found.double())
            by_mean, by_sum = find_gap(expected, mean), find_gap(expected, size * mean)
            adds.append(by_sum < by_mean)
            gaps.append(min(by_mean, by_sum))
        return max(gaps), adds


def _shorten(name: str, value: Any, sequences: Sequences, kept: int, is_mask: bool) -> Any:
    """The first tokens of tensors that have all: [batch, sequence, ...], or a mask [..., sequence]."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        dims = (tensor.dim() - 2, tensor.dim() - 1) if is_mask and tensor.dim() != 2 else (0, 1) if is_mask else (1,)
        for dim in dims:
            if tensor.dim() > dim >= 0 and tensor.shape[dim] == sequences.length:
                tensor = tensor.narrow(dim, 0, kept)
        if not is_mask and tensor.dim() > 1 and tensor.dtype == torch.int64 and bool((tensor < 0).any()):
            tensor = tensor.clamp_min(0)  # targets that do not count
        return tensor.contiguous()

    return map_tensors(cut, value)


def _padded(value: Any, few: Sequences) -> Any:
    """A mask of tokens [batch, sequence] with the second one of the first sequence as the others are not."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.shape != (few.rows, few.length):
        return value
    new = value.clone()
    new[0, 1] = new[0, 1] == 0  # not the first, without which the first row of a causal mask would be empty
    return new


def _less_counted(value: Any, given: Any, few: Sequences) -> Any:
    """Targets, or a mask of 0 and 1, of which some of the first rank's do not count: a mean of means is another then.

    Args:
        given: all of `value`, in which all targets count.
    """
    if not isinstance(value, torch.Tensor) or value.shape != (few.rows, few.length):
        return value
    least, most = map(float, given.double().aminmax())
    if not (value.dtype == torch.int64 and least < 0) and (least, most) not in ((0.0, 1.0), (1.0, 1.0)):
        return value
    new = value.clone()
    new[:, : few.own // 2] = min(least, 0.0)
    return new


# -- the criterion -----------------------------------------------------------------------------------------------------


class _HalvesMode(TokensMode):
    """Counts the targets of all tokens, in place of those of all ranks. It notes the `ignore_index` in use."""

    def __init__(self) -> None:
        super().__init__(lambda func, *args, **options: func(*args, **options), self._average)
        self.counts: list[torch.Tensor] = []
        self.rest: Iterator[torch.Tensor] | None = None
        self.ignored: int | None = None

    def _average(self, count: torch.Tensor) -> torch.Tensor:
        if self.rest is not None:
            return next(self.rest) / 2
        self.counts.append(count)
        return count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COUNTING:
            self.ignored = kwargs["ignore_index"]
        return super().__torch_function__(func, types, args, kwargs)


def try_criterion(
    function: Callable[..., Any], arguments: Any, own: int, numbers: Callable[[Any], list[torch.Tensor]]
) -> list[bool | None]:
    """For each of the `numbers` that the criterion returns: True if those of two halves of some tokens add up to that
    of all; False if it is their mean; None if neither.

    Args:
        arguments: positional and by name: this rank's outputs, and the targets of its tokens.
        own: this rank's tokens of each sequence.
    """
    arguments = map_tensors(full_tensor, arguments)
    tensors = tensors_of(arguments)
    shape = next((t.shape for t in tensors if t.requires_grad and t.dim()), torch.Size([0, own]))
    rows = shape[0] if own in shape[1:] else shape[0] // own
    device = tensors[0].device
    all_places = torch.arange(max(2, min(own, TOKENS) // 2 * 2), device=device) % own
    generator = torch.Generator(device)
    negative = any(t.dtype == torch.int64 and bool((t < 0).any()) for t in tensors)

    def take(tensor: torch.Tensor, places: torch.Tensor, dtype: Any, ignored: int | None) -> torch.Tensor:
        """The tokens at these places. `ignored`: in place of some targets, and of none where it is None."""
        dim = next((dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == own), None)
        is_flat = dim is None and tensor.dim() > 0 and tensor.shape[0] == rows * own
        new = tensor.detach()
        if tensor.requires_grad and tensor.numel() > 1 and bool(new.min() == new.max()):  # hides what is made of it
            new = new + 0.1 * torch.randn(new.shape, generator=generator.manual_seed(0), device=device).to(new.dtype)
        if is_flat:
            new, dim = new.unflatten(0, (rows, own)), 1
        if dim is not None:
            new = new.index_select(dim, places)
        if new.is_floating_point() and dtype is not None:
            new = new.to(dtype)
        if new.dtype == torch.int64:
            new = new.clamp_min(0)  # so that all targets count
        is_mask = not tensor.requires_grad and bool(((tensor == 0) | (tensor == 1)).all())  # of all tokens, not of few
        new = torch.ones_like(new) if is_mask and dim is not None else new
        if ignored is not None and dim is not None and (is_mask or (new.dtype == torch.int64 and (seen or negative))):
            some = (places < len(all_places) // 4 + 1).view(-1, *[1] * (new.dim() - dim - 1))
            new = new.masked_fill(some, 0 if is_mask else ignored)
        return new.flatten(0, 1) if is_flat else new

    mode, seen = _HalvesMode(), False

    def run(dtype: Any, ignored: int | None) -> list[list[torch.Tensor]]:
        made = []
        for places in (all_places, *all_places.chunk(2)):
            holders = list(_holders(function))
            modules = [each for each in holders if isinstance(each, nn.Module)]
            with no_side_effects(modules, device), unchanged(holders), torch.autocast(device.type, enabled=False), mode:
                args, kwargs = map_tensors(partial(take, places=places, dtype=dtype, ignored=ignored), arguments)
                made.append([number.double() for number in numbers(function(*args, **kwargs))])
            mode.rest = iter(mode.counts)
        return made

    def compare(ignored: int | None) -> list[bool | None]:
        nonlocal mode
        for dtype, limit in ((torch.float64, 1e-6), (torch.float32, TOLERANCE), (None, HALF_TOLERANCE)):
            mode = _HalvesMode()
            try:
                results = zip(*run(dtype, ignored), strict=True)
            except (RuntimeError, TypeError, ValueError):  # weights or targets may be of another dtype
                if dtype is None:
                    raise
                continue
            return [_relation(float(whole), float(one), float(other), limit) for whole, one, other in results]
        raise AssertionError

    found = compare(None)
    seen = mode.ignored is not None
    less = compare(-100 if mode.ignored is None else mode.ignored)
    return [one if one == other else None for one, other in zip(found, less, strict=True)]


def _relation(whole: float, one: float, other: float, limit: float) -> bool | None:
    """True if the halves add up to the whole; False if it is their mean; None if neither."""
    scale = limit * (abs(one) + abs(other)) + 1e-12
    if not abs(one + other - 2 * whole) > scale:  # or all is nan
        return False
    return True if abs(one + other - whole) <= scale else None


def _holders(function: Any) -> Iterator[Any]:
    """The objects whose attributes `function` may change: itself, those in its closure, and their modules."""
    todo, seen = [function], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType)) or not hasattr(each, "__dict__"):
            continue
        seen.add(id(each))
        yield each
        names = getattr(getattr(each, "__code__", None), "co_names", ())
        known = getattr(each, "__globals__", {})
        todo += [known[name] for name in names if name in known]
        todo += [cell.cell_contents for cell in getattr(each, "__closure__", None) or () if cell != CellType()]
        todo += [getattr(each, "__self__", None), getattr(each, "func", None)]
        todo += each.children() if isinstance(each, nn.Module) else ()
