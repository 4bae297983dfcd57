"""From what all ranks measured to the first difference in time, and its place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..distributed.env import list_ranks
from .compare import FLOOR, Limits, Measure, Measures, ratio
from .record import Key, Store
from .report import Finding, Phase, explain

FLIPS = 16
"""Elements of a gradient that rounding may switch on or off, where ReLU, max or top-k decide: more than a single
perturbed run shows, and few of a large tensor."""
ROUNDINGS = 4
"""So many roundings of the weights themselves are allowed, however little an update moves them."""
ORTHOGONALISED = 2.0**-7
"""The way of a matrix may differ by so much that Muon steps: it rounds to bf16, and makes more of a last bit."""
STAGES = {"begin": 0, "input": 1, "output": 1, "grad_output": 1, "gradient": 2, "norm": 3, "overflow": 4}
STAGES |= {"update": 5, "buffer": 6, "loss": 7}
"""The order of comparison within an update; what modules compute is compared in time order."""
INFINITE = ("input", "output", "grad_output", "gradient", "loss")
"""Not compared in an update that overflows: inf and nan have many forms."""


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
    distances, order = differences(store, measures, limits.updates), {key: n for n, key in enumerate(store.tensors)}
    if is_complete:
        norms = {key: float(grad.double().norm()) for key, grad in store.tensors.items() if key.what == "gradient"}
        for key, norm in norms.items():
            if key not in distances and norm > FLOOR * max(norms.values()):
                distances[key] = {rank.rank: 1.0 for rank in measures}  # a gradient that no rank has
    largest: dict[str, float] = {}
    found = [*_copies(measures, order), *_figures(store, measures, limits, reduction, overflows)]
    for key, by_rank in distances.items():
        if key.update == overflows and key.what in INFINITE:
            continue
        allowed, worst = limits.allowed(key), max(by_rank.values())
        if key.what in ("update", "begin") and limits.estimates and not worst <= allowed:
            allowed = max(allowed, _turned(store, limits, key))
        largest[key.what] = max(largest.get(key.what, 0.0), worst / allowed)
        if ranks := tuple(rank for rank, value in by_rank.items() if not value <= allowed):
            found.append(Finding(order[key], key, worst, allowed, ranks))
    found = [one for one in found if one.key.update != overflows or one.key.what not in INFINITE]
    found.sort(key=lambda one: (*_when(one), one.order))
    same = [one.key for one in found if _when(one) == _when(found[0]) and not one.text]
    first = explain(store, measures, found[0], same) if found else None
    skipped = {
        f"{key.what} of {key.name or 'the model'}": why for rank in measures for key, why in rank.skipped.items()
    }
    return Phase("", "", first is None, first, len(distances), skipped, largest)


def _when(finding: Finding) -> tuple[int, int]:
    return finding.key.update, STAGES[finding.key.what]


def differences(store: Store, measures: Sequence[Measures], updates: float) -> dict[Key, dict[int, float]]:
    """By key and rank, how far a tensor is from the reference's, relative. Of several ways to cut that, the one which
    fits all ranks best. `updates`: what is allowed of them."""
    found: dict[Key, dict[int, Measure]] = {}
    largest: dict[tuple[int, str], float] = defaultdict(float)
    for key in dict.fromkeys(key for rank in measures for key in rank.tensors):
        ranks = {rank.rank: rank.tensors[key] for rank in measures if key in rank.tensors}
        if common := set.intersection(*map(set, ranks.values())):
            way = min(common, key=lambda way: max(ratio(ways[way]) for ways in ranks.values()))
            found[key] = {rank: ways[way] for rank, ways in ranks.items()}
            norms = [m.norm for m in found[key].values() if math.isfinite(m.norm)]
            largest[key.update, key.what] = max([largest[key.update, key.what], *norms])
    distances: dict[Key, dict[int, float]] = {}
    for key, by_rank in found.items():
        if key.what in ("update", "begin"):
            way_length = max(_way(store, key, updates), 1e-300)
            distances[key] = {rank: math.sqrt(m.error) / way_length for rank, m in by_rank.items()}
        else:  # of a gradient the whole: a part may be small beside what the rounding of the others' sums was
            whole = float(store.tensors[key].double().norm()) ** 2 if key.what == "gradient" else 0.0
            floor = max(FLOOR**2 * largest[key.update, key.what], whole)
            distances[key] = {rank: ratio(m, floor) for rank, m in by_rank.items()}
    return distances


def _figures(
    store: Store, measures: Sequence[Measures], limits: Limits, reduction: str, overflows: int | None
) -> Iterator[Finding]:
    """Norms, overflow decisions and losses. Where the update `overflows`, norms are compared between ranks only."""
    ranks = tuple(rank.rank for rank in measures)
    for update in sorted({update for rank in measures for update, _, what in rank.figures if what == "lr"}):
        for name in ("grad_norm", "skipped", "loss_scale", "lr"):
            key = Key(update, 0, "norm" if name == "grad_norm" else "overflow", name)
            values = [rank.figures.get((update, 0, name)) for rank in measures]
            mine, theirs = values[0], store.figures.get((update, 0, name))
            unlike = tuple(rank for rank, value in zip(ranks, values, strict=True) if repr(value) != repr(mine))
            if unlike:
                text = f"{name} is {mine} on rank {ranks[0]}, but {values[ranks.index(unlike[0])]}"
                yield Finding(0, key, math.inf, 0.0, unlike, text)
            elif theirs is not None and (update, key.what) != (overflows, "norm"):
                allowed = limits.allowed(key._replace(name="")) if key.what == "norm" else 0.0
                if not (distance := _distance(float(mine or 0), float(theirs))) <= allowed:
                    text = f"{name} is {mine}, and in the reference {theirs}"
                    yield Finding(0, key, distance, allowed, ranks, text)
        mine, theirs = (loss_of(runs, update, reduction) for runs in (measures, [store]))
        key = Key(update, 0, "loss", "")
        if not (distance := _distance(mine, theirs)) <= (allowed := limits.allowed(key)):
            text = f"the loss is {mine:.8g}, and in the reference {theirs:.8g}"
            yield Finding(0, key, distance, allowed, ranks, text)


def _distance(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / (abs(theirs) or 1.0)


def loss_of(runs: Iterable[Any], update: int, reduction: str) -> float:
    """Of an update, over all its chunks."""
    chunks = {at[1]: value for run in runs for at, value in run.figures.items() if at[::2] == (update, "loss")}
    total, weight = (sum(column) for column in zip(*chunks.values(), strict=True)) if chunks else (0.0, 0.0)
    return total if reduction == "sum" or not weight else total / weight


def _copies(measures: Sequence[Measures], order: Mapping[Key, int]) -> Iterator[Finding]:
    """Parts of parameters that several ranks hold, and that are not the same."""
    held: dict[tuple[Key, Any], dict[int, bytes]] = defaultdict(dict)
    for rank in measures:
        for key, boxes in rank.digests.items():
            for box, digest in boxes:
                held[key, box][rank.rank] = digest
    for (key, _), digests in held.items():
        mine = next(iter(digests.values()))
        if unlike := tuple(rank for rank, digest in digests.items() if digest != mine):
            kind = "gradient" if key.what == "gradient" else "values"
            text = f"{list_ranks(digests)} hold the same part of {key.name}, but its {kind} differ"
            yield Finding(order.get(key, 0), key, math.inf, 0.0, unlike, text)


def _turned(store: Store, limits: Limits, key: Key) -> float:
    """How far elements whose gradients are within their noise may go the other way, relative: Adam steps by the sign of
    a gradient, and a single one of a small layer is far above what a perturbed reference shows of the others."""
    way, turned = _way(store, key, limits.updates), 0.0
    for update in range(key.update + (key.what == "update")):
        at = Key(update, 0, "gradient", key.name)
        grad, now, last = (store.tensors.get(k) for k in (at, _after(key, update), _after(key, update - 1)))
        if grad is not None and now is not None and last is not None:
            grad, noise = grad.double().abs(), limits.allowed(at) * grad.double().square().mean().sqrt()
            turned += 2 * float((now.double() - last.double())[(grad > 0) & (grad <= noise)].norm())
    return turned / way if way else 0.0


def _after(key: Key, update: int) -> Key:
    return Key(update, 0, "update", key.name)


def _way(store: Store, key: Key, updates: float) -> float:
    """How far an update, and all until then, moved a parameter."""
    update = key.update - (key.what == "begin")
    now, last, start = (store.tensors.get(_after(key, at)) for at in (update, update - 1, -1))
    if now is None or start is None:
        return 0.0
    eps = torch.finfo(store.tensors[key].dtype).eps / 2  # masters that differ a little may round to other weights
    now, start = now.double(), start.double()
    ways = [float((now - start).norm()), ROUNDINGS * eps / updates * float(now.norm())]
    return max([*ways, float((now - last.double()).norm())] if last is not None else ways)


def estimates(store: Store, moved: Measures, updates: float, reduction: str) -> Mapping[Key, float]:
    """How far the perturbed reference is from the reference, by key."""
    found = {key: max(by_rank.values()) for key, by_rank in differences(store, [moved], updates).items()}
    for key in [key for key in found if key.what == "gradient"]:  # one update may hit it by chance: of all the largest
        found[key] = max(found.get(key._replace(update=update), 0.0) for update, *_ in moved.figures)
    for update in {update for update, *_ in moved.figures}:
        norms = [run.figures.get((update, 0, "grad_norm")) or 0.0 for run in (moved, store)]
        losses = [loss_of([run], update, reduction) for run in (moved, store)]
        found[Key(update, 0, "norm", "")], found[Key(update, 0, "loss", "")] = _distance(*norms), _distance(*losses)
    for key, tensor in store.tensors.items():
        if key in found and moved.figures.get((0, 0, "bends")) and key.what not in ("input", "output"):
            found[key] = max(found[key], math.sqrt(FLIPS / max(1, tensor.numel())) / 10)
        if (
            key in found
            and moved.figures.get((0, 0, "rounds"))
            and key.what in ("update", "begin")
            and tensor.dim() == 2
        ):
            found[key] = max(found[key], ORTHOGONALISED / 10)
    return found
