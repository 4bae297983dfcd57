"""Fewer points that look the same, and numbers in ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .run import Series


def thin(series: Series, buckets: int) -> Series:
    """At most three points for each of `buckets` equal parts of the x axis: its smallest and largest value, and a gap
    if there is one; and the first and last point of all."""
    steps, values = series.steps, series.values
    if len(steps) <= 2 * buckets:
        return series
    first, width = steps[0], max(1, steps[-1] - steps[0]) / buckets
    kept: set[int] = {0, len(steps) - 1}
    begin = 0
    while begin < len(steps):
        number, end = int((steps[begin] - first) / width), begin
        while end < len(steps) and int((steps[end] - first) / width) == number:
            end += 1
        kept |= _of_bucket(values, begin, end)
        begin = end
    places = sorted(kept)
    return Series([steps[place] for place in places], [values[place] for place in places])


def _of_bucket(values: Sequence[float | None], begin: int, end: int) -> set[int]:
    numbers = [place for place in range(begin, end) if values[place] is not None]
    gap = next((place for place in range(begin, end) if values[place] is None), None)
    kept = set() if gap is None else {gap}
    if numbers:
        kept |= {min(numbers, key=lambda place: values[place]), max(numbers, key=lambda place: values[place])}  # type: ignore[arg-type, return-value]
    return kept


def find_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges, both ends included: 1, 2, 3, 7 as (1, 3), (7, 7)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def in_words(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in find_ranges(numbers))
