"""Axes of a chart: from values to places, ticks, and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CHARACTER = 6.7
"""The width of a character of an 11 px label, in px, at most."""
_LARGEST = 1e300
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass
class Axis:
    """From `low` to `high`, with ticks.

    Attributes:
        base: of a logarithmic axis; None: linear.
    """

    low: float
    high: float
    base: int | None = None
    ticks: list[tuple[float, str]] = field(default_factory=list)

    def place(self, value: float) -> float:
        """Where `value` is, from 0 (low) to 1 (high)."""
        low, high, at = self.low, self.high, value
        if self.base is not None:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return (at - low) / (high - low)

    @property
    def label_width(self) -> float:
        """Of the widest label, px."""
        return max((len(label) for _, label in self.ticks), default=1) * CHARACTER


def make_axis(values: Iterable[float], count: int, base: int | None = None, whole: bool = False) -> Axis:
    """An axis that holds `values`, with at most about `count` ticks; linear if a logarithm cannot hold them.

    Args:
        whole: numbers of updates: ticks are whole numbers, and the axis ends where the values do.
    """
    found = list(values) or [0.0, 1.0]
    low, high = max(min(found), -_LARGEST), min(max(found), _LARGEST)
    if base is not None and low > 0:
        axis = _logarithmic(low, high, count, base)
        if axis is not None:
            return axis
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        room = abs(low) * 0.1 or 1.0
        low, high = (low, low + 1) if whole else (low - room, high + room)
    step = _nice((high - low) / max(1, count))
    if whole:
        step = max(1.0, step)
    else:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, None, list(zip(ticks, labels(ticks, step), strict=True)))


def _logarithmic(low: float, high: float, count: int, base: int) -> Axis | None:
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if first == last:
        first, last = first - 1, last + 1
    step = max(1, math.ceil((last - first) / max(1, count)))
    try:
        ticks = [(float(base) ** power, _power(base, power)) for power in range(first, last + 1, step)]
        lowest, highest = float(base) ** first, float(base) ** last
    except OverflowError:
        return None
    return Axis(lowest, highest, base, ticks) if lowest > 0 else None


def _power(base: int, power: int) -> str:
    return f"{base}{str(power).translate(_SUPERSCRIPTS)}"


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10 ... that is not smaller."""
    if not step > 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def labels(ticks: Sequence[float], step: float) -> list[str]:
    """Of ticks that are `step` apart, with as many digits as that needs."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 1e15 or 0 < largest < 2e-3:
        return [_scientific(tick, step) for tick in ticks]
    size, suffix = next(((s, x) for s, x in _SUFFIXES if largest >= max(s, 1e4)), (1.0, ""))
    digits = min(12, max(0, -math.floor(math.log10(step / size) + 1e-9)))
    return [f"{tick / size:.{digits}f}{suffix}" if abs(tick) > step / 2 else "0" for tick in ticks]


def _scientific(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
    mantissa, power = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(power)}"


def readable(value: float | None) -> str:
    """A value for a table: at most 5 digits."""
    if value is None:
        return "-"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.5g}"


def in_bytes(count: float) -> str:
    """1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
