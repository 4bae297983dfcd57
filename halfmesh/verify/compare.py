"""How far what one rank computes is from the part of the reference that it should have."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

import torch

from ..engine.engine import Engine
from ..parallel.shard_spec import Placement, Split
from ..utils.tensors import digest
from .record import Key, Store

FLOOR = 1e-6
"""A tensor below this share of the largest of its kind is compared with that share: it may be all rounding."""
MOST_BLOCKS = 4
"""The most blocks of a fused layer: query, key, value and a gate."""


class Measure(NamedTuple):
    """Squared norms of the difference and of the reference's part; factor: of gradients, which were divided by it."""

    error: float
    norm: float
    factor: float = 1.0


@dataclass
class Measures:
    """The measurements of a rank; small enough to be sent.

    Attributes:
        shares: what ranks share: axes, and the "rows" of a batch.
        tensors: by key in the reference, then by the way in which the reference was cut, the worst of each; of
            parameters there is one way, "".
        firsts: the same of this rank's first part of the batch.
        digests: of each box of a parameter, for the comparison of copies.
        skipped: tensors that no part of the reference fits, and why.
    """

    rank: int
    shares: tuple[str, ...] = ()
    tensors: dict[Key, dict[str, Measure]] = field(default_factory=dict)
    firsts: dict[Key, dict[str, Measure]] = field(default_factory=dict)
    digests: dict[Key, list[tuple[Any, bytes]]] = field(default_factory=dict)
    figures: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Allowed differences: `least`, and 10 times what the perturbed reference shows.

    Attributes:
        least: relative, of tensors, gradients, norms and losses; updates: of weights, relative to the way they went.
        estimates: by key.
    """

    least: float
    updates: float
    estimates: Mapping[Key, float]

    def allowed(self, key: Key) -> float:
        """The largest difference."""
        least = self.updates if key.what in ("update", "begin") else self.least
        return max(least, 10 * self.estimates.get(key, 0.0))


class Comparison:
    """The sink of one rank: compares with a reference as tensors come.

    Args:
        parts: in which an update's batch comes, on all ranks; the reference has it in `calls` calls.
        microbatches: in which a pipeline splits what comes.
    """

    def __init__(self, reference: Store, parts: int, calls: int, microbatches: int = 1) -> None:
        self.names, self._reference = reference.names, reference
        self._per_call, self._microbatches = parts // calls, microbatches
        self._axes: dict[str, tuple[int, int]] = {}  # place and size on those that share a chunk
        self._own = {""}  # modules with parameters, which one stage calls
        self._has_stages = False
        self._partial: set[str] = set()  # modules of whose output each rank has a part of the gradient
        self._foreign: tuple[str, ...] = ()  # prefixes of modules that compute with rows of other ranks, as experts do
        self._factors: dict[tuple[int, int, int], float] = {}  # of a call's gradients of outputs: ranks divide them
        self.measures = Measures(0, shares=("rows",) if parts > 1 else ())
        self.figures = self.measures.figures

    def begin(self, engine: Engine) -> None:
        """See `Sink`."""
        context, modules = engine.context, dict(engine.model.named_modules())
        for axis, size in context.sizes.items():
            if axis not in ("pp", "dp") and size > 1:
                self._axes[axis] = context.coordinate(axis), size
        self._own |= {name for name, one in modules.items() if next(one.parameters(), None) is not None}
        self._has_stages = context.sizes.get("pp", 1) > 1
        self._partial = {name for name, one in modules.items() if vars(one).get("has_partial_gradients")}
        self._foreign = tuple(f"{name}." for name, one in modules.items() if vars(one).get("is_divided_by_engine"))
        self.measures.rank, self.measures.shares = context.rank, (*self._axes, *self.measures.shares)

    def tensor(self, key: Key, tensor: torch.Tensor, microbatch: int) -> None:
        """See `Sink`."""
        call, part = divmod(key.call * self._microbatches + microbatch, self._per_call)
        at, is_grad = key._replace(call=call), key.what == "grad_output"
        expected = self._reference.tensors.get(at)
        self._rows = int(self._reference.figures.get((key.update, call, "rows"), 0))  # of the call's batch
        if expected is None or key.name.startswith(self._foreign):
            return
        cuts, why = list(self._cuts(expected, tensor, part)), "no part of the reference has the shape"
        if is_grad and key.name in self._partial:
            cuts, why = [], "each rank has a part of the sum"
        elif self._has_stages and key.name not in self._own:
            cuts, why = [], "several stages may call it"
        elif cuts and (self._per_call > 1 or self._axes.keys() - {"tp"}) and (is_grad or not tensor.dim()):
            cuts, why = [cut for cut in cuts if cut[2]], "without rows it may be a part of a sum"
        if not cuts:
            self.measures.skipped[at] = why
            return
        own, backward = tensor.cpu(), (key.update, key.call, microbatch)
        factor = self._factors.get(backward) if is_grad else 1.0
        new = {way: _measure(own, part, factor) for way, part, _ in cuts}
        if factor is None and key.name in self._own and (best := min(new.values(), key=ratio)).norm:
            self._factors[backward] = best.factor
        self.measures.firsts.setdefault(at, new)
        known = self.measures.tensors.get(at, new)
        self.measures.tensors[at] = {way: max(known[way], new[way], key=ratio) for way in new if way in known}

    def _cuts(self, expected: torch.Tensor, tensor: torch.Tensor, row: int) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Ways to cut the reference's tensor to the shape of this rank's, the parts, and whether a part is known to
        have this rank's rows."""
        rows, own, shapes = self._rows, self._rows // self._per_call, [("", expected, tensor.shape)]
        if expected.dim() != tensor.dim():
            return
        folds = tensor.dim() and own and own * self._per_call == rows < expected.shape[0]
        if folds and not expected.shape[0] % rows and not tensor.shape[0] % own:  # [rows * length] as [rows, length]
            shape = torch.Size([own, tensor.shape[0] // own, *tensor.shape[1:]])
            shapes.append(("unfolded ", expected.unflatten(0, (rows, -1)), shape))
        for how, whole, shape in shapes:
            ways = [list(self._ways(int(n), int(m), row)) for n, m in zip(whole.shape, shape, strict=True)]
            for choice in itertools.product(*ways):
                part, names = whole, [name for name, *_ in choice if name]
                shared = [axis for name in names for axis in re.findall(r"[a-z]\w*", name) if axis != "expanded"]
                if len({*shared}) < len(shared):  # a tensor is divided over an axis once
                    continue
                for dim, (_, index, count, blocks) in enumerate(choice):
                    part = Split(dim, blocks).cut(part, index, count) if count > 1 else part
                uncut = [size for (_, _, count, _), size in zip(choice, shape, strict=True) if count == 1]
                has_rows = (self._per_call == 1 and rows in uncut) or any(name.startswith("rows") for name in names)
                way = how + " ".join(names)
                yield way, part.expand(shape).reshape(tensor.shape), has_rows and "expanded" not in names

    def _ways(self, whole: int, own: int, row: int) -> Iterator[tuple[str, int, int, int]]:
        """For a dim: name, which part, of how many, in how many blocks."""
        if whole == own:
            yield "", 0, 1, 1
        elif whole == 1:
            yield "expanded", 0, 1, 1
        elif own and whole % own == 0:
            count, rows, batch = whole // own, self._per_call, self._rows
            has_rows = not batch or whole % batch == 0
            if count == rows and has_rows:
                yield "rows", row, rows, 1
                if batch and whole > batch:  # several batches in one, such as crops of the same images
                    yield f"rows/{whole // batch}", row, rows, whole // batch
            for axis, (index, size) in self._axes.items():
                if count == rows * size and axis != "tp" and has_rows:
                    yield f"rows/{axis}", row * size + index, count, 1
                for blocks in range(1, MOST_BLOCKS + 1) if count == size else ():
                    if whole % (blocks * size) == 0:
                        yield f"{axis}/{blocks}", index, size, blocks
            for (first, (i, n)), (second, (j, m)) in itertools.permutations(self._axes.items(), 2):
                if count == n * m:
                    yield f"{first}.{second}", i * m + j, count, 1

    def parameter(self, key: Key, tensor: torch.Tensor, placement: Placement) -> None:
        """See `Sink`."""
        expected = self._reference.tensors.get(key)
        if expected is None:
            if key.what == "gradient":
                self.measures.skipped[key] = "the reference has none"
            return
        boxes = [(box.at, box.sizes, box.view(tensor).double().cpu()) for box in placement.regions]
        parts = [expected[tuple(map(slice, at, map(add, at, sizes)))].double().flatten() for at, sizes, _ in boxes]
        own = torch.cat([torch.empty(0), *(box.flatten() for *_, box in boxes)])
        self.measures.tensors[key] = {"": _measure(own, torch.cat([torch.empty(0), *parts]))}
        self.measures.digests[key] = [((at, sizes), digest(box + 0.0)) for at, sizes, box in boxes]  # -0.0 is 0.0


def ratio(measure: Measure, floor: float = 0.0) -> float:
    """How large the difference is beside the reference's part, whose squared norm counts as `floor` at least."""
    norm = max(measure.norm, floor)
    return math.sqrt(measure.error / norm) if norm else (math.inf if measure.error else 0.0)


def _measure(own: torch.Tensor, part: torch.Tensor, factor: float | None = 1.0) -> Measure:
    """`factor`: by which `own` is divided; None: the one that brings it nearest, which the result has."""
    own, part = own.double(), part.double()
    hidden = part.isinf() & (own == part)  # by an additive mask
    own, part = own.masked_fill(hidden, 0.0), part.masked_fill(hidden, 0.0)
    norm = _square(part)
    nearest = float((own * part).sum()) / norm if norm else 1.0
    divisor = nearest if factor is None else factor
    return Measure(_square(own / (divisor or 1.0) - part), norm, nearest)


def _square(tensor: torch.Tensor) -> float:
    value = float((tensor * tensor).sum())
    return value if math.isfinite(value) else math.inf
