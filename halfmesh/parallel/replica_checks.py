"""Checks that ranks have equal batches, trained parameters and, after a step, equal state, where they should."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InputError, show
from ..utils.tensors import tensors_of
from ..utils.torch_private import foreach_norms
from .objects import broadcast_object, gather_objects, is_simulated

ADVICE = (
    "freeze and unfreeze the same parameters on every rank; draw what to freeze with the same seed on all of them, as "
    "in random.Random(0)"
)


def add_tensor(found: Any, tensor: torch.Tensor) -> None:
    """Add `tensor` to a digest of hashlib; of a sparse or nested one only dtype and shape."""
    found.update(_form(tensor).encode())
    if tensor.layout == torch.strided and not tensor.is_nested and tensor.numel():
        found.update(_bytes(tensor).numpy())


def digest(tree: Any) -> bytes:
    """The digest of dtypes, shapes and bits of the tensors in `tree`; without tensors, of its repr (nan equals nan)."""
    found, tensors = hashlib.sha256(), tensors_of(tree)
    for tensor in tensors:
        add_tensor(found, tensor)
    if not tensors:
        found.update(repr(tree).encode())
    return found.digest()[:16]


# -- batches of ranks that compute together ------------------------------------------------------------------------


def is_checked(number: int) -> bool:
    """Return True if call `number` is checked: the first, the tenth, the hundredth and so on."""
    return str(number).rstrip("0") == "1"


class SameCalls:
    """Compares the model's inputs and outputs over the ranks of a group: in the first call, inputs also in the tenth,
    the hundredth and so on; training and evaluation count separately. Ranks with different inputs would silently mix
    them, and an output that is sharded is not the model's.

    Args:
        group: the ranks.
        what: their name in messages ("tensor group").
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._alone = is_simulated(group)
        self._inputs_seen: Counter[tuple[bool, str]] = Counter()
        self._outputs_seen: set[bool] = set()

    @torch.compiler.disable
    @torch.no_grad()
    def are_same(self, tree: Any, of: str, training: bool = True) -> bool:
        """Return True if all ranks have the same tensors in `tree`, or if this call, of its kind, is not checked."""
        if self._alone:
            return True
        self._inputs_seen[training, of] += 1
        looks = is_checked(self._inputs_seen[training, of])
        return not looks or len(set(gather_objects(digest(tensors_of(tree)), self._group))) == 1

    def compare_inputs(self, training: bool, args: Any, kwargs: Any, of: str = "inputs") -> None:
        """Raise InputError on all ranks if the inputs differ; `of`: their name in messages."""
        if not self.are_same((args, kwargs), of, training):
            raise InputError(
                f"the {self._group.size()} ranks of a {self._what} were given different {of}, but they compute one "
                "batch together; iterate engine.dataloader, or shard a loader of your own by engine.context.dp_rank of "
                "engine.context.dp_size, and seed alike what the loop itself draws (mixup)"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError on all ranks if outputs differ by more than rounding."""
        if self._alone or training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        mine = [(tuple(tensor.shape), _norms(tensor)) for tensor in tensors_of(output)]
        if not all(_is_near(mine, theirs) for theirs in gather_objects(mine, self._group)):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is sharded. Give the last "
                "layer the style 'colwise_gather' if it has 'colwise'; do not return what is between sharded layers "
                "(hidden states under sequence_parallel, attention weights)"
            )


def are_same(tree: Any, group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of `group` have the same tensors; False if there are none."""
    if is_simulated(group):
        return False
    tensors = tensors_of(tree)
    return len(set(gather_objects(digest(tensors), group))) == 1 and bool(tensors)


def _norms(tensor: torch.Tensor) -> tuple[float, ...]:
    """Norms of a tensor and of seven chunks of it, to distinguish two tensors."""
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        return ()
    flat = tensor.detach().reshape(-1).float()
    return tuple(float(torch.linalg.vector_norm(part)) for part in (flat, *flat.chunk(7)))


def _is_near(mine: list[Any], theirs: list[Any]) -> bool:
    """Return True if shapes are equal, and finite norms are equal up to rounding in bf16."""
    if [shape for shape, _ in mine] != [shape for shape, _ in theirs]:
        return False
    pairs = [pair for (_, a), (_, b) in zip(mine, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return all(math.isclose(a, b, rel_tol=2e-2, abs_tol=1e-6) for a, b in pairs if math.isfinite(a + b))


# -- trained parameters --------------------------------------------------------------------------------------------


def refuse_unlike(names: Sequence[str], everyone: Sequence[bytes], ranks: Sequence[str]) -> None:
    """Raise InputError on all ranks if they do not train the same parameters: gradients of different layers would be
    summed.

    Args:
        names: of the parameters.
        everyone: for each rank one byte per parameter: 1 if it is trained there, else 0.
        ranks: the names of the ranks in messages.
    """
    unlike = [index for index, said in enumerate(zip(*everyone, strict=True)) if len(set(said)) > 1]
    if not unlike:
        return
    trains = [rank for rank, flags in zip(ranks, everyone, strict=True) if flags[unlike[0]]]
    freezes = [rank for rank in ranks if rank not in trains]
    more = f" (the first of {len(unlike)} parameters that differ)" if len(unlike) > 1 else ""
    raise InputError(
        f"requires_grad is not the same on all ranks: {names[unlike[0]]!r} is trained on {', '.join(trains)} and "
        f"frozen on {', '.join(freezes)}{more}; {ADVICE}"
    )


# -- weights before an update --------------------------------------------------------------------------------------


@torch.no_grad()
def norms(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of each tensor, in float64 [n] on `device`; -1 for nan, and 0 for all but plain tensors of floats."""
    held = list(tensors)
    plain = [type(t.detach()) is torch.Tensor and t.is_floating_point() for t in held]
    found = iter(foreach_norms([t.detach() for t, is_plain in zip(held, plain, strict=True) if is_plain]))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero, *(next(found).to(device) if is_plain else zero for is_plain in plain)])[1:].nan_to_num(-1)


def differ(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """For each of `values` [n], True if it differs between the ranks of `group` by more than the order of a sum."""
    ends = torch.stack([values, -values])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    return ends.sum(0) > 1e-8 * ends[0].abs()


# -- all state, for debug="sync" -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicatedValue:
    """A value that should be equal on several ranks.

    Attributes:
        name: for messages; the same on all ranks that have it.
        value: a tensor, or a value that is equal if its repr is.
        among: ranks that have a `name` for the same `among` should have the same value. None: all ranks that have it.
    """

    name: str
    value: Any
    among: Hashable = None


def find_difference(
    mine: Iterable[Iterable[ReplicatedValue]], ranks: Sequence[str], device: torch.device
) -> tuple[str, str] | None:
    """The first value that differs but should not: its name, and lines with the value of each rank. None: all are
    equal. All ranks call this together, and get the same result.

    It sends some bytes for each value; if one differs, also one copy of it.

    Args:
        mine: this rank's values, causes before consequences.
        ranks: the names of the ranks in messages.
    """
    held = {(value.name, value.among): (order, value.value) for order, values in enumerate(mine) for value in values}
    everyone = gather_objects({key: (order, digest(value)) for key, (order, value) in held.items()})
    found: dict[Any, set[tuple[int, bytes]]] = {}
    for theirs in everyone:
        for key, its in theirs.items():
            found.setdefault(key, set()).add(its)
    unlike = [key for key, digests in found.items() if len(digests) > 1]
    if not unlike:
        return None
    first = min(unlike, key=lambda key: min(found[key])[0])
    groups = _group_by_digest([theirs.get(first) for theirs in everyone])
    _, value = held.get(first, (0, None))
    # A copy: pickle would include all of the memory that a view refers to.
    sent = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    reference = broadcast_object(sent, groups[0][0], device)
    differences = gather_objects(_describe(reference, value) if first in held else None)
    equal = "equal, " if len(groups[0]) > 1 else ""
    said = [f"{equal}taken as the reference", *(differences[group[0]] for group in groups[1:])]
    lines = (f"{', '.join(ranks[rank] for rank in group)}: {how}" for group, how in zip(groups, said, strict=True))
    return first[0], "\n".join(f"  - {line}" for line in lines)


def _group_by_digest(digests: Sequence[Any]) -> list[list[int]]:
    """The ranks with each digest, most ranks first, then the lowest; ranks without one are left out."""
    ranks: dict[Any, list[int]] = {}
    for rank, found in enumerate(digests):
        if found is not None:
            ranks.setdefault(found, []).append(rank)
    return sorted(ranks.values(), key=lambda some: (-len(some), some[0]))


def _describe(reference: Any, value: Any) -> str:
    """The difference in words: "differs by 1e-06 at most, in 1 of 64 elements, first at [0, 3]: 1.0 instead of 2.0"."""
    if not isinstance(reference, torch.Tensor) or not isinstance(value, torch.Tensor):
        return f"{_shown(value)} instead of {_shown(reference)}"
    if _form(value) != _form(reference):
        return f"is {_form(value)}, not {_form(reference)}"
    a, b = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (reference, value))
    apart = (_bytes(a) != _bytes(b)).view(len(a), -1).any(1).nonzero().reshape(-1)
    if not len(apart):
        return "is the same"
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = (b[apart].to(wide) - a[apart].to(wide)).abs().max().item()
    first = int(apart[0])
    place = [int(index) for index in torch.unravel_index(apart[0], value.shape)]
    return (
        f"differs by {largest:.6g} at most, in {len(apart)} of {len(a)} elements, first at {place}: "
        f"{b[first].item()!r} instead of {a[first].item()!r}"
    )


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else show(value, 120)


def _form(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} of shape {shape}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
