"""From what all ranks measured to the first difference in time, and its place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..distributed.env import list_ranks
from .compare import Measure, Measures, ratio
from .record import Key, Store
from .report import Phase, Place, explain

FLOOR = 1e-6
"""A tensor below this share of the largest of its kind is compared with that share: it may be all rounding."""
ROUNDINGS = 4
"""So many roundings of the weights themselves are allowed, however little an update moves them."""
MODULES = ("input", "output", "grad_output")
STAGES = ("begin", "module", "gradient", "norm", "verdict", "update", "buffer", "loss")
"""The order of comparison within an update."""


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


class Finding(NamedTuple):
    """A difference, in the order in which they are looked at: by update, stage, and within a module in time."""

    update: int
    stage: int
    order: int
    key: Key
    apart: float
    allowed: float
    ranks: tuple[int, ...]
    text: str = ""


def differences(store: Store, measures: Sequence[Measures], updates: float) -> dict[Key, dict[int, float]]:
    """By key and rank, how far a tensor is from the reference's, relative. Of several ways to cut that, the one which
    fits all ranks best. `updates`: what is allowed of them."""
    found: dict[Key, dict[int, Measure]] = {}
    for key in dict.fromkeys(key for rank in measures for key in rank.tensors):
        ranks = {rank.rank: ways for rank in measures if (ways := rank.tensors.get(key)) is not None}
        common = set.intersection(*map(set, ranks.values()))
        if common:
            way = min(common, key=lambda way: max(ratio(ways[way]) for ways in ranks.values()))
            found[key] = {rank: ways[way] for rank, ways in ranks.items()}
    for rank in measures:
        for key, measure in rank.parameters.items():
            found.setdefault(key, {})[rank.rank] = measure
    largest: dict[tuple[int, str], float] = defaultdict(float)
    for key, by_rank in found.items():
        at = key.update, key.what
        largest[at] = max([largest[at], *(m.norm for m in by_rank.values() if math.isfinite(m.norm))])
    wholes = _wholes(measures)
    return {
        key: {rank: _relative(store, key, m, largest, updates, wholes.get(key, 0.0)) for rank, m in by_rank.items()}
        for key, by_rank in found.items()
    }


def _wholes(measures: Sequence[Measures]) -> dict[Key, float]:
    """Squared norms of whole gradients: a part may be small beside what the rounding of the others' sums was."""
    parts: dict[Key, dict[Any, float]] = defaultdict(dict)
    for rank in measures:
        for key, boxes in rank.digests.items():
            if key.what == "gradient":
                parts[key][tuple(box for box, _ in boxes)] = rank.parameters[key].norm
    return {key: sum(norms.values()) for key, norms in parts.items()}


def judge(
    store: Store,
    measures: Sequence[Measures],
    limits: Limits,
    reduction: str,
    overflows: int | None = None,
    is_complete: bool = True,
) -> Phase:
    """Compare in time order: the result, as yet without a name.

    Args:
        reduction: how the losses of ranks are joined.
        overflows: the update whose gradients are inf.
        is_complete: these are all ranks, and their runs have ended.
    """
    apart = differences(store, measures, limits.updates)
    apart |= _factors(store, measures, apart)
    if is_complete:
        apart |= {key: {rank.rank: 1.0 for rank in measures} for key in _missing(store, apart)}
    order = {key: number for number, key in enumerate(store.index)}
    largest: dict[str, float] = {}
    copies = _copies(measures, order)
    found = [one for one in copies if (one.update, one.key.what) != (overflows, "gradient")]  # nan has many forms
    for update in sorted({update for rank in measures for update, _, what in rank.figures if what == "lr"}):
        found += _figures(store, measures, limits, reduction, update, update == overflows)
    for key, by_rank in apart.items():
        if key.update == overflows and key.what in (*MODULES, "gradient"):
            continue
        allowed, worst = limits.allowed(key), max(by_rank.values())
        if key.what in ("update", "begin") and limits.estimates and not worst <= allowed:
            allowed = max(allowed, _turned(store, limits, key))
        largest[key.what] = max(largest.get(key.what, 0.0), worst / allowed)
        if ranks := tuple(rank for rank, value in by_rank.items() if not value <= allowed):
            found.append(Finding(key.update, _stage(key.what), order[key], key, worst, allowed, ranks))
    first = None
    if found:
        found.sort(key=lambda one: one[:3])
        at = found[0]
        same = [one.key for one in found if one[:2] == at[:2] and not one.text]
        place = Place(at.key) if at.text else _place(store, measures, at.key, same, limits)
        first = explain(place, at.apart, at.allowed, at.ranks, at.text)
    skipped = {
        f"{key.what} of {key.name or 'the model'}": why for rank in measures for key, why in rank.skipped.items()
    }
    return Phase("", "", first is None, first, len(apart), skipped, largest)


def _factors(store: Store, measures: Sequence[Measures], apart: Mapping[Key, Any]) -> dict[Key, dict[int, float]]:
    """Gradients of outputs which are another multiple of the reference's on this rank than on the rank that comes first
    in the backward of their call, as where a gradient is scaled on its way from stage to stage."""
    order, found = {key: number for number, key in enumerate(store.index)}, dict[Key, dict[int, float]]()
    for call in dict.fromkeys(call for rank in measures for call in rank.factors):
        ranks = {rank.rank: rank.factors[call] for rank in measures if call in rank.factors}
        _, first = min(ranks.values(), key=lambda item: order[item[0]])
        for rank, (key, factor) in ranks.items():
            by_rank = found.setdefault(key, dict(apart.get(key, {})))
            by_rank[rank] = max(by_rank.get(rank, 0.0), abs(factor / first - 1) if first else 0.0)
    return found


def _missing(store: Store, apart: Mapping[Key, Any]) -> Iterator[Key]:
    """Gradients that the reference has, and no rank."""
    tensors = {key: store.get(key) for key in store.index if key.what == "gradient"}
    norms = {key: float(tensor.double().norm()) for key, tensor in tensors.items() if tensor is not None}
    most = max(norms.values(), default=0.0)
    return (key for key, norm in norms.items() if key not in apart and norm > FLOOR * most)


def _stage(what: str) -> int:
    return STAGES.index("module" if what in MODULES else what)


def _place(store: Store, measures: Sequence[Measures], key: Key, same: Sequence[Key], limits: Limits) -> Place:
    """Where `key` is, and what is known about it."""
    gradients = [
        m for rank in measures for k, m in rank.parameters.items() if (k.update, k.what) == (key.update, "gradient")
    ]
    factors = [m.factor for m in gradients if m.norm]
    is_common = factors and max(factors) - min(factors) <= 1e-6 * max(map(abs, factors))
    events = list(store.index)
    before = (k.name for k in reversed(events[: events.index(key)]) if (k.update, k.what) == (key.update, "output"))
    return Place(
        key=key,
        caller=store.callers.get((key.name, key.nth)),
        before=next(before, None),
        consumers=tuple(dict.fromkeys(store.consumers.get((key.name, key.nth, key.slot), ()))),
        after=_next_module(key, events),
        names=tuple(dict.fromkeys(k.name for k in same)),
        shares=measures[0].shares,
        total=sum((k.update, k.what) == (key.update, key.what) for k in events),
        equals_accumulated=_equals_accumulated(measures, limits),
        factor=factors[0] if is_common else None,
        drawn=drawn_in(store),
        is_later=all(
            min(map(ratio, rank.firsts[key].values())) <= limits.allowed(key) for rank in measures if key in rank.firsts
        ),
        direct=direct_in(store, measures),
    )


def direct_in(store: Store, measures: Sequence[Measures]) -> dict[str, str]:
    """See `Place.direct`."""
    return {name: user for name, user in store.direct.items() if any(name in rank.cut for rank in measures)}


def drawn_in(store: Store) -> tuple[str, ...]:
    """The functions that drew random numbers."""
    names = (name for (_, _, what), drawn in store.figures.items() if what == "drawn" for name in drawn)
    return tuple(dict.fromkeys(names))


def _equals_accumulated(measures: Sequence[Measures], limits: Limits) -> bool:
    """Return True if the gradients of the first update are those of a process that accumulates."""
    found = [(key, m) for rank in measures for key, m in rank.accumulated.items() if key.update == 0]
    floor = FLOOR**2 * max((m.norm for _, m in found), default=0.0)
    return bool(found) and all(ratio(m, floor) <= limits.allowed(key) for key, m in found)


def _next_module(key: Key, events: Sequence[Key]) -> str | None:
    """The module that is called next after the one of `key` has returned; None: none in this call of the model."""
    returned = key._replace(what="output")
    later = events[events.index(returned) + 1 :] if returned in events else []
    following = (k for k in later if (k.update, k.call, k.what) == (key.update, key.call, "input"))
    return next((k.name for k in following), None)


def _figures(
    store: Store, measures: Sequence[Measures], limits: Limits, reduction: str, update: int, overflows: bool
) -> Iterator[Finding]:
    """Norm, verdict and loss of an update."""
    ranks = tuple(rank.rank for rank in measures)
    for name in ("grad_norm", "skipped", "loss_scale", "lr"):
        what = "norm" if name == "grad_norm" else "verdict"
        key = Key(update, 0, what, name)
        values = [rank.figures.get((update, 0, name)) for rank in measures]
        mine, theirs = values[0], store.figures.get((update, 0, name))
        unlike = tuple(rank for rank, value in zip(ranks, values, strict=True) if repr(value) != repr(mine))
        if unlike:
            text = f"{name} is {mine} on rank {ranks[0]}, but {values[ranks.index(unlike[0])]}"
            yield Finding(update, _stage(what), 0, key, math.inf, 0.0, unlike, text)
        elif theirs is not None and not (overflows and what == "norm"):
            apart = abs(float(mine or 0) - float(theirs)) / (abs(float(theirs)) or 1.0)
            allowed = limits.allowed(Key(update, 0, "norm", "")) if what == "norm" else 0.0
            if not apart <= allowed:
                text = f"{name} is {mine}, and in the reference {theirs}"
                yield Finding(update, _stage(what), 0, key, apart, allowed, ranks, text)
    mine, theirs = (loss_of(runs, update, reduction) for runs in (measures, [store]))
    apart, allowed = abs(mine - theirs) / max(abs(theirs), 1e-12), limits.allowed(Key(update, 0, "loss", ""))
    if not overflows and not apart <= allowed:
        text = f"the loss is {mine:.8g}, and in the reference {theirs:.8g}"
        yield Finding(update, _stage("loss"), 0, Key(update, 0, "loss", ""), apart, allowed, ranks, text)


def loss_of(runs: Iterable[Any], update: int, reduction: str) -> float:
    """Of an update, over all its chunks."""
    chunks = {at[1]: value for run in runs for at, value in run.figures.items() if at[::2] == (update, "loss")}
    total, weight = (sum(column) for column in zip(*chunks.values(), strict=True)) if chunks else (0.0, 0.0)
    return total if reduction == "sum" or not weight else total / weight


def _copies(measures: Sequence[Measures], order: Mapping[Key, int]) -> Iterator[Finding]:
    """Parts of parameters that several ranks hold, and that are not the same."""
    held: dict[tuple[Key, Any], dict[int, str]] = defaultdict(dict)
    for rank in measures:
        for key, boxes in rank.digests.items():
            for box, digest in boxes:
                held[key, box][rank.rank] = digest
    for (key, _), digests in held.items():
        mine = next(iter(digests.values()))
        if unlike := tuple(rank for rank, digest in digests.items() if digest != mine):
            kind = "gradient" if key.what == "gradient" else "values"
            text = f"{list_ranks(digests)} hold the same part of {key.name}, but its {kind} differ"
            yield Finding(key.update, _stage(key.what), order.get(key, 0), key, math.inf, 0.0, unlike, text)


def _relative(
    store: Store,
    key: Key,
    measure: Measure,
    largest: Mapping[tuple[int, str], float],
    updates: float,
    whole: float,
) -> float:
    if key.what in ("update", "begin"):
        return math.sqrt(measure.error) / max(_way(store, key, updates), 1e-300)
    return ratio(measure, max(FLOOR**2 * largest[key.update, key.what], whole))


def _turned(store: Store, limits: Limits, key: Key) -> float:
    """How far elements whose gradients are within their noise may go the other way, relative: Adam steps by the sign of
    a gradient, and a single one of a small layer is far above what a perturbed reference shows of the others."""
    way, turned, updates = _way(store, key, limits.updates), 0.0, key.update + (key.what == "update")
    for update in range(updates):
        at = Key(update, 0, "gradient", key.name)
        grad, now, last = store.get(at), *(store.get(Key(u, 0, "update", key.name)) for u in (update, update - 1))
        if grad is not None and now is not None and last is not None:
            grad, noise = grad.double().abs(), limits.allowed(at) * grad.double().square().mean().sqrt()
            turned += 2 * float((now.double() - last.double())[(grad > 0) & (grad <= noise)].norm())
    return turned / way if way else 0.0


def _way(store: Store, key: Key, updates: float) -> float:
    """How far an update, and all until then, moved a parameter."""
    update = key.update - (key.what == "begin")
    now, last, start = (store.get(Key(u, 0, "update", key.name)) for u in (update, update - 1, -1))
    if now is None or start is None:
        return 0.0
    eps = torch.finfo(store.index[key][0]).eps / 2  # masters that differ a little may be rounded to other weights
    now, start = now.double(), start.double()
    ways = [float((now - start).norm()), ROUNDINGS * eps / updates * float(now.norm())]
    return max([*ways, float((now - last.double()).norm())] if last is not None else ways)
