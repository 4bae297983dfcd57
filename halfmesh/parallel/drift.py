"""Whether ranks have what they should have in common: the first thing that differs, and how far it is apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .digests import describe_difference, digest
from .objects import broadcast_object, gather_objects

_SHOWN = 120
"""Characters of a value that a message shows."""
_NAMED = 5
"""Of the things that differ, too, those that are named."""


@dataclass(frozen=True)
class Common:
    """Something that ranks should have in common.

    Attributes:
        name: for messages; the same on all ranks that have it.
        value: a tensor, or a value whose repr is the same where it is.
        among: ranks that have a `name` for the same `among` should have the same value. None: all ranks that have it.
        order: what differs first is what is said: of the lowest order.
    """

    name: str
    value: Any
    among: Hashable = None
    order: int = 0


@dataclass(frozen=True)
class Drift:
    """The first thing that differs.

    Attributes:
        name: what it is.
        alike: the ranks that have the same, for each value that there is; the most frequent one first.
        apart: for each of the others how it differs from the first.
        also: names of what differs besides.
    """

    name: str
    alike: Sequence[Sequence[int]]
    apart: Sequence[str]
    also: Sequence[str]


def find_drift(mine: Iterable[Common], device: torch.device) -> Drift | None:
    """The first thing that is not the same where it should be; the same answer on all ranks, which call this together.
    None if all is.

    One message of some bytes for each thing; where something differs, three more, and one copy of it.
    """
    held = {(common.name, common.among): common for common in mine}
    everyone = gather_objects({key: (common.order, digest(common.value)) for key, common in held.items()})
    found = _differing(everyone)
    if not found:
        return None
    key = found[0]
    alike = _alike([theirs.get(key) for theirs in everyone])
    value = held[key].value if key in held else None
    model = alike[0][0]  # the rank that the others are compared with
    reference = broadcast_object(_on_host(value), model, device)
    apart = gather_objects(None if key not in held else _describe(reference, value))
    also = list(dict.fromkeys(name for name, _ in found[1:]))
    return Drift(key[0], alike, [apart[ranks[0]] for ranks in alike[1:]], [name for name in also if name != key[0]])


def describe(drift: Drift, names: Sequence[str]) -> str:
    """Of which ranks have what; `names` of all ranks."""
    equal = "equal, " if len(drift.alike[0]) > 1 else ""
    lines = [f"{_ranks(drift.alike[0], names)}: {equal}taken as the reference"]
    lines += [f"{_ranks(ranks, names)}: {how}" for ranks, how in zip(drift.alike[1:], drift.apart, strict=True)]
    if drift.also:
        rest = len(drift.also) - _NAMED
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"different, too: {', '.join(drift.also[:_NAMED])}{more}")
    return "\n".join(f"  - {line}" for line in lines)


def _differing(everyone: Sequence[dict[tuple[str, Hashable], tuple[int, bytes]]]) -> list[tuple[str, Hashable]]:
    """The keys of what differs, in their order; the same list on all ranks."""
    seen: dict[tuple[str, Hashable], tuple[int, set[bytes]]] = {}
    for theirs in everyone:
        for key, (order, found) in theirs.items():
            seen.setdefault(key, (order, set()))[1].add(found)
    apart = [(order, key) for key, (order, digests) in seen.items() if len(digests) > 1]
    return [key for _, key in sorted(apart, key=lambda pair: pair[0])]


def _alike(digests: Sequence[Any]) -> list[list[int]]:
    """The ranks with each digest, most ranks first, then the lowest; ranks without one are left out."""
    ranks: dict[Any, list[int]] = {}
    for rank, found in enumerate(digests):
        if found is not None:
            ranks.setdefault(found, []).append(rank)
    return sorted(ranks.values(), key=lambda some: (-len(some), some[0]))


def _describe(reference: Any, value: Any) -> str:
    if isinstance(reference, torch.Tensor) and isinstance(value, torch.Tensor):
        return describe_difference(reference, value)
    return f"{_shown(value)} instead of {_shown(reference)}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _on_host(value: Any) -> Any:
    """`value` without what pickle would take along: the whole memory of which a tensor is a part."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _ranks(ranks: Sequence[int], names: Sequence[str]) -> str:
    return ", ".join(names[rank] for rank in ranks)
