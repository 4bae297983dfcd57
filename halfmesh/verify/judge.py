"""From what all ranks measured to the first difference in time, and its place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .causes import Place, explain
from .compare import Measure, Measures
from .record import Key, Store
from .report import Difference

FLOOR = 1e-6
"""A tensor below this share of the largest of its kind is compared with that share: it may be all rounding."""
STILL = 1e-8
"""An update moves weights by this share of them at least: less is their rounding."""
MODULES = ("input", "output", "grad_output")


@dataclass(frozen=True)
class Limits:
    """What is allowed: `least`, and 10 times what the perturbed reference shows.

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


@dataclass
class Verdict:
    """What `judge` found: the first difference, how many tensors, and the largest difference / allowed by kind."""

    first: Difference | None
    compared: int
    skipped: int
    largest: dict[str, float]


def differences(store: Store, measures: Sequence[Measures]) -> dict[Key, dict[int, float]]:
    """By key and rank, how far a tensor is from the reference's, relative. Of several ways to cut that, the one which
    fits all ranks best."""
    found: dict[Key, dict[int, Measure]] = {}
    for key in dict.fromkeys(key for rank in measures for key in rank.tensors):
        ranks = {rank.rank: ways for rank in measures if (ways := rank.tensors.get(key)) is not None}
        common = set.intersection(*map(set, ranks.values()))
        if common:
            way = min(common, key=lambda way: max(_ratio(ways[way], 0.0) for ways in ranks.values()))
            found[key] = {rank: ways[way] for rank, ways in ranks.items()}
    for rank in measures:
        for key, measure in rank.parameters.items():
            found.setdefault(key, {})[rank.rank] = measure
    largest: dict[tuple[int, str], float] = defaultdict(float)
    for key, by_rank in found.items():
        at = key.update, key.what
        largest[at] = max([largest[at], *(m.norm for m in by_rank.values() if math.isfinite(m.norm))])
    return {
        key: {rank: _relative(store, key, m, largest) for rank, m in by_rank.items()} for key, by_rank in found.items()
    }


def judge(
    store: Store, measures: Sequence[Measures], limits: Limits, reduction: str, overflows: int | None = None
) -> Verdict:
    """Compare in time order: modules, gradients, copies, norm, weights, buffers, loss, verdict."""
    apart = differences(store, measures)
    order = {key: number for number, key in enumerate(store.index)}
    stages = {
        what: number
        for number, what in enumerate(("begin", "module", "gradient", "norm", "verdict", "update", "buffer", "loss"))
    }
    largest: dict[str, float] = {}
    wrong: list[tuple[tuple[int, ...], Difference]] = []
    for key, by_rank in apart.items():
        if key.update == overflows and key.what in (*MODULES, "gradient"):
            continue
        allowed = limits.allowed(key)
        worst = max(by_rank.values())
        largest[key.what] = max(largest.get(key.what, 0.0), worst / allowed)
        if not worst <= allowed:
            stage = stages["module" if key.what in MODULES else key.what]
            ranks = tuple(rank for rank, value in by_rank.items() if not value <= allowed)
            wrong.append(((key.update, stage, order[key]), (key, worst, allowed, ranks)))  # type: ignore[arg-type]
    first: Difference | None = None
    found: list[tuple[int, int, Difference]] = []
    if wrong:
        wrong.sort(key=lambda item: item[0])
        (update, stage, _), (key, worst, allowed, ranks) = wrong[0]  # type: ignore[misc]
        same = [item[1][0] for item in wrong if item[0][:2] == (update, stage)]  # type: ignore[index]
        place = _place(store, measures, key, same, limits)
        found.append((update, stage, explain(place, worst, allowed, ranks)))
    for update, stage, difference in _figures(store, measures, limits, reduction, stages, overflows):
        found.append((update, stage, difference))
    for update, stage, difference in _copies(measures, stages):
        found.append((update, stage, difference))
    if found:
        first = min(found, key=lambda item: item[:2])[2]
    skipped = len({key for rank in measures for key in rank.skipped})
    return Verdict(first, len(apart), skipped, largest)


def _place(store: Store, measures: Sequence[Measures], key: Key, same: Sequence[Key], limits: Limits) -> Place:
    """Where `key` is, and what is known about it."""
    accumulated = {k: m for rank in measures for k, m in rank.accumulated.items() if k.update == 0}
    scale = max((m.norm for m in accumulated.values()), default=0.0)
    sums = bool(accumulated) and all(
        math.sqrt(m.error / max(m.norm, FLOOR**2 * scale)) <= limits.allowed(k) if m.norm or scale else not m.error
        for k, m in accumulated.items()
    )
    factors = {
        m.factor
        for rank in measures
        for k, m in rank.parameters.items()
        if k.what == "gradient" and k.update == key.update and m.norm
    }
    factor = next(iter(factors)) if factors and max(factors) - min(factors) <= 1e-6 * max(map(abs, factors)) else None
    events = list(store.index)
    at = events.index(key)
    before = next((k.name for k in reversed(events[:at]) if k.what == "output" and k.update == key.update), None)
    after = _next_module(store, key, events)
    total = sum(k.what == key.what and k.update == key.update for k in events)
    return Place(
        key=key,
        caller=store.callers.get((key.name, key.nth)),
        before=before,
        consumers=tuple(dict.fromkeys(store.consumers.get((key.name, key.nth, key.slot), ()))),
        after=after,
        names=tuple(dict.fromkeys(k.name for k in same)),
        total=total,
        equals_accumulated=sums,
        factor=factor,
        drawn=tuple(
            dict.fromkeys(name for (_, _, what), names in store.figures.items() if what == "drawn" for name in names)
        ),
    )


def _next_module(store: Store, key: Key, events: Sequence[Key]) -> str | None:
    """The module that is called next after the one of `key` has returned, by the same caller."""
    returned = key._replace(what="output", slot=key.slot)
    if returned not in store.index:
        return None
    caller = store.callers.get((key.name, key.nth))
    later = events[events.index(returned) + 1 :]
    return next((k.name for k in later if k.what == "input" and store.callers.get((k.name, k.nth)) == caller), None)


def _figures(
    store: Store,
    measures: Sequence[Measures],
    limits: Limits,
    reduction: str,
    stages: Mapping[str, int],
    overflows: int | None,
) -> Iterator[tuple[int, int, Difference]]:
    """Norm, loss and verdict of each update."""
    updates = sorted({update for rank in measures for update, *_ in rank.figures})
    for update in updates:
        for what in ("skipped", "loss_scale", "lr", "grad_norm"):
            values = {rank.rank: rank.figures.get((update, 0, what)) for rank in measures}
            expected = store.figures.get((update, 0, what))
            mine = next(iter(values.values()))
            is_norm = what == "grad_norm"
            kind, stage = ("norm", stages["norm"]) if is_norm else ("verdict", stages["verdict"])
            unlike = tuple(rank for rank, value in values.items() if repr(value) != repr(mine))
            if unlike:
                yield (
                    update,
                    stage,
                    _figure(
                        update,
                        kind,
                        what,
                        unlike,
                        f"{what} is {mine} on rank {measures[0].rank} and {values[unlike[0]]} on rank {unlike[0]}",
                        math.inf,
                        0.0,
                    ),
                )
            elif is_norm and expected and update != overflows:
                key = Key(update, 0, "norm", "")
                apart, allowed = abs(mine - expected) / expected, limits.allowed(key)
                if not apart <= allowed:
                    yield (
                        update,
                        stage,
                        _figure(
                            update,
                            kind,
                            what,
                            tuple(values),
                            f"the gradient norm is {mine / expected:.6g} x the reference's, {expected:.6g}",
                            apart,
                            allowed,
                        ),
                    )
            elif not is_norm and expected is not None and mine != expected:
                yield (
                    update,
                    stage,
                    _figure(
                        update,
                        kind,
                        what,
                        tuple(values),
                        f"{what} is {mine}, and the reference's {expected}",
                        abs(float(mine) - float(expected)),
                        0.0,
                    ),
                )
        if update != overflows:
            mine, theirs = _loss(measures, update, reduction), _loss([store], update, reduction)
            apart = abs(mine - theirs) / max(abs(theirs), 1e-12)
            allowed = limits.allowed(Key(update, 0, "loss", ""))
            if not apart <= allowed:
                text = f"the loss is {mine:.8g}, and the reference's {theirs:.8g}"
                yield update, stages["loss"], _figure(update, "loss", "loss", (), text, apart, allowed)


def _loss(runs: Sequence[Any], update: int, reduction: str) -> float:
    """Of an update, over all its chunks."""
    chunks = {
        call: value for run in runs for (u, call, what), value in run.figures.items() if (u, what) == (update, "loss")
    }
    total, weight = sum(value for value, _ in chunks.values()), sum(weight for _, weight in chunks.values())
    return total if reduction == "sum" or not weight else total / weight


def _copies(measures: Sequence[Measures], stages: Mapping[str, int]) -> Iterator[tuple[int, int, Difference]]:
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
            text = f"ranks {_join(digests)} hold the same part of {key.name}, but its {kind} differ on {_join(unlike)}"
            place = Place(key._replace(what="copies"))
            yield key.update, stages[key.what], explain(place, math.inf, 0.0, unlike, text)


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _figure(
    update: int, what: str, name: str, ranks: tuple[int, ...], text: str, apart: float, allowed: float
) -> Difference:
    return explain(Place(Key(update, 0, what, name)), apart, allowed, ranks, text)


def _relative(store: Store, key: Key, measure: Measure, largest: Mapping[tuple[int, str], float]) -> float:
    if key.what in ("update", "begin"):
        return math.sqrt(measure.error) / max(_way(store, key), 1e-300)
    return _ratio(measure, FLOOR**2 * largest[key.update, key.what])


def _way(store: Store, key: Key) -> float:
    """How far an update, and all until then, moved a parameter."""
    update = key.update - (key.what == "begin")
    now, last, start = (store.get(Key(u, 0, "update", key.name)) for u in (update, update - 1, -1))
    if now is None or start is None:
        return 0.0
    now, start = now.double(), start.double()
    ways = [float((now - start).norm()), STILL * float(now.norm())]
    return max([*ways, float((now - last.double()).norm())] if last is not None else ways)


def _ratio(measure: Measure, floor: float) -> float:
    norm = max(measure.norm, floor)
    return math.sqrt(measure.error / norm) if norm else (math.inf if measure.error else 0.0)
