"""How far what one rank computes is from the part of the reference that it should have."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
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
        tensors: by key in the reference, then by the way in which the reference was cut, the worst of each.
        firsts: the same of this rank's first part of the batch.
        parameters, accumulated: of parts of parameters; the second against the reference that accumulates.
        digests: of each box of a parameter, for the comparison of copies.
        skipped: tensors that no part of the reference fits, and why.
        factors: by update, call and microbatch the first gradient of an output, and its ratio to the reference's.
        stage: the rank's coordinate in the pipeline.
    """

    rank: int
    shares: tuple[str, ...] = ()
    tensors: dict[Key, dict[str, Measure]] = field(default_factory=dict)
    firsts: dict[Key, dict[str, Measure]] = field(default_factory=dict)
    parameters: dict[Key, Measure] = field(default_factory=dict)
    accumulated: dict[Key, Measure] = field(default_factory=dict)
    digests: dict[Key, list[tuple[Any, bytes]]] = field(default_factory=dict)
    figures: dict[tuple[int, int, str], Any] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)
    factors: dict[tuple[int, int, int], tuple[Key, float]] = field(default_factory=dict)
    stage: int = 0


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


class _Cut(NamedTuple):
    """A part of a tensor, how it was cut, and whether it is known to have this rank's rows of it."""

    way: str
    part: torch.Tensor
    has_rows: bool


class Comparison:
    """The sink of one rank: compares with a reference as tensors come.

    Args:
        parts: in which an update's batch comes, on all ranks; the reference has it in `calls` calls.
        microbatches: in which a pipeline splits what comes.
        accumulated: a second reference, for gradients only.
    """

    def __init__(
        self, reference: Store, parts: int, calls: int, microbatches: int = 1, accumulated: Store | None = None
    ) -> None:
        self.names, self._reference, self._accumulated = reference.names, reference, accumulated
        self._per_call, self._microbatches = parts // calls, microbatches
        self._axes: dict[str, tuple[int, int]] = {}  # place and size on those that share a chunk
        self._own = {""}  # modules with parameters, which one stage calls; others several stages may call
        self._partial: set[str] = set()  # modules of whose output each rank has a part of the gradient
        self._foreign: tuple[str, ...] = ()  # prefixes of modules that compute with rows of other ranks, as experts do
        self.measures = Measures(0, shares=("rows",) if parts > 1 else ())

    def begin(self, engine: Engine) -> None:
        """See `Sink`."""
        context = engine.context
        for axis, size in context.sizes.items():
            if axis not in ("pp", "dp") and size > 1:
                self._axes[axis] = context.coordinate(axis), size
        modules = dict(engine.model.named_modules())
        self._own |= {name for name, one in modules.items() if next(one.parameters(), None) is not None}
        self._partial = {name for name, one in modules.items() if vars(one).get("has_partial_gradients")}
        self._foreign = tuple(f"{name}." for name, one in modules.items() if vars(one).get("is_divided_by_engine"))
        self.measures.rank, self.measures.stage = context.rank, context.coordinate("pp")
        self.measures.shares = (*self._axes, *self.measures.shares)

    def tensor(self, key: Key, tensor: torch.Tensor, microbatch: int) -> None:
        """See `Sink`."""
        call, part = divmod(key.call * self._microbatches + microbatch, self._per_call)
        at = key._replace(call=call)
        expected = self._reference.get(at)
        self._rows = int(self._reference.figures.get((key.update, call, "rows"), 0))  # of the call's batch
        is_grad = key.what == "grad_output"
        if expected is None or key.name.startswith(self._foreign):
            return
        if is_grad and key.name in self._partial:
            self.measures.skipped[at] = "each rank has a part of the sum"
            return
        cuts, why = list(self._cuts(expected, tensor, part)), "no part of the reference has the shape"
        if cuts and self._divides and (is_grad or not tensor.dim()):
            cuts, why = [cut for cut in cuts if cut.has_rows], "without rows it may be a part of a sum"
        if not cuts:
            self.measures.skipped[at] = why
            return
        own, backward = tensor.double().cpu(), (key.update, key.call, microbatch)
        factor = self.measures.factors.get(backward, (at, None))[1] if is_grad else 1.0
        new = {cut.way: _measure(own, cut.part.double(), factor) for cut in cuts}
        if factor is None and key.name in self._own and (best := min(new.values(), key=ratio)).norm:
            self.measures.factors[backward] = at, best.factor
        known = self.measures.tensors.get(at, new)
        self.measures.firsts.setdefault(at, new)
        self.measures.tensors[at] = {way: max(known[way], new[way], key=ratio) for way in new if way in known}

    @property
    def _divides(self) -> bool:
        """True if ranks, chunks or microbatches share the rows of a call, or the tokens in them."""
        return self._per_call > 1 or bool(self._axes.keys() - {"tp"})

    def _cuts(self, expected: torch.Tensor, tensor: torch.Tensor, row: int) -> Iterator[_Cut]:
        """Ways to cut the reference's tensor to the shape of this rank's."""
        if expected.dim() != tensor.dim():
            return
        yield from self._cut_dims(expected, tensor.shape, row)
        rows, count = self._rows, self._per_call
        if not tensor.dim() or not rows or expected.shape[0] <= rows or expected.shape[0] % rows or rows % count:
            return
        own = rows // count  # [rows * sequence, ...] is cut as [rows, sequence, ...]
        if tensor.shape[0] % own == 0:
            shape = torch.Size([own, tensor.shape[0] // own, *tensor.shape[1:]])
            for cut in self._cut_dims(expected.unflatten(0, (rows, -1)), shape, row):
                yield _Cut(f"unfolded {cut.way}", cut.part.reshape(tensor.shape), cut.has_rows)

    def _cut_dims(self, expected: torch.Tensor, shape: torch.Size, row: int) -> Iterator[_Cut]:
        ways = [list(self._ways(int(n), int(m), row)) for n, m in zip(expected.shape, shape, strict=True)]
        for choice in itertools.product(*ways):
            part, names = expected, [name for name, *_ in choice if name]
            shared = [axis for name in names for axis in re.findall(r"[a-z]\w*", name) if axis != "expanded"]
            if len({*shared}) < len(shared):  # a tensor is divided over an axis once
                continue
            for dim, (_, index, count, blocks) in enumerate(choice):
                part = Split(dim, blocks).cut(part, index, count) if count > 1 else part
            uncut = [size for (_, _, count, _), size in zip(choice, shape, strict=True) if count == 1]
            has_rows = (self._per_call == 1 and self._rows in uncut) or any(name.startswith("rows") for name in names)
            yield _Cut(" ".join(names), part.expand(shape), has_rows and "expanded" not in names)

    def _ways(self, whole: int, own: int, row: int) -> Iterator[tuple[str, int, int, int]]:
        """For a dim: name, which part, of how many, in how many blocks."""
        if whole == own:
            yield "", 0, 1, 1
        elif whole == 1:
            yield "expanded", 0, 1, 1
        if not own or whole % own or whole == own:
            return
        count, rows = whole // own, self._per_call
        has_rows = not self._rows or whole % self._rows == 0
        if count == rows and has_rows:
            yield "rows", row, rows, 1
            if self._rows and whole > self._rows:  # several batches in one, such as crops of the same images
                yield f"rows/{whole // self._rows}", row, rows, whole // self._rows
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
        expected = self._reference.get(key)
        if expected is None:
            if key.what == "gradient":
                self.measures.skipped[key] = "the reference has none"
            return
        boxes = [(box.at, box.sizes, box.view(tensor).double().cpu()) for box in placement.regions]
        self.measures.parameters[key] = _measure_boxes(boxes, expected)
        self.measures.digests[key] = [((at, sizes), digest(box + 0.0)) for at, sizes, box in boxes]  # -0.0 is 0.0
        other = None if self._accumulated is None or key.what != "gradient" else self._accumulated.get(key)
        if other is not None:
            self.measures.accumulated[key] = _measure_boxes(boxes, other)

    def figure(self, update: int, call: int, what: str, value: Any) -> None:
        """See `Sink`."""
        self.measures.figures[update, call, what] = value


def ratio(measure: Measure, floor: float = 0.0) -> float:
    """How large the difference is beside the reference's part, whose squared norm counts as `floor` at least."""
    norm = max(measure.norm, floor)
    return math.sqrt(measure.error / norm) if norm else (math.inf if measure.error else 0.0)


def _measure(own: torch.Tensor, part: torch.Tensor, factor: float | None) -> Measure:
    """`factor`: by which `own` is divided; None: the one that brings it nearest."""
    hidden = part.isinf() & (own == part)  # by an additive mask
    own, part = own.masked_fill(hidden, 0.0), part.masked_fill(hidden, 0.0)
    if factor is None:
        norm = _square(part)
        factor = float((own * part).sum()) / norm if norm else 1.0
    error = own - part if factor == 1 or not factor else own / factor - part
    return Measure(_square(error), _square(part), factor)


def _measure_boxes(boxes: Collection[tuple[Any, Any, torch.Tensor]], expected: torch.Tensor) -> Measure:
    """Of parts of a parameter; factor: by which to multiply the reference's so that it is nearest."""
    error = norm = product = 0.0
    for at, sizes, box in boxes:
        part = expected[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))].double()
        error, norm = error + _square(box - part), norm + _square(part)
        product += float((box * part).sum())
    return Measure(error, norm, product / norm if norm else 1.0)


def _square(tensor: torch.Tensor) -> float:
    value = float((tensor * tensor).sum())
    return value if math.isfinite(value) else math.inf
