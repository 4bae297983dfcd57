"""Writes docs/composition.md from the composition table and the cells: python -m tests.composition.page."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from halfmesh.compat import Row, check, get_columns, get_rows, render_table
from halfmesh.config.composition import Finding
from halfmesh.config.load import load_config
from tests.support.models import COMPUTE_DTYPES, TOLERANCES

from .cells import MODES, MOST_RANKS, covering, every, few, product
from .parity import MOVEMENT, NORM

PAGE = Path(__file__).resolve().parents[2] / "docs" / "composition.md"


_INTRODUCTION = """# What composes with what

<!-- Written by `python -m tests.composition.page`; a test compares the two. -->

Look up which precision modes (rows) run in which layouts (columns). *yes*: tests compare the combination with one
process, tensor by tensor. Everything else is rejected at start-up, with a message that says what to use instead. To
choose a layout, read [Which layout for my model](choosing.md); to check your config, run
[`halfmesh check`](cli.md#check)."""


def _parts() -> Iterator[str]:
    yield _INTRODUCTION
    yield render_table().strip()
    yield "## How it is proven"
    yield _fill(
        f"""Cells combine a mode, a model, up to 4 tensor, context and pipeline ranks, data ranks with a strategy,
        sequence parallelism, accumulation, clipping and `reduce_dtype`. {len(product()):,} are allowed on up to
        {MOST_RANKS} ranks."""
    )
    yield _table(
        ("command", "cells that it trains"),
        (
            ("`make test`", f"{len(few())}: every value, each mode and model in each kind of layout"),
            ("`make test-all`", f"{len({*covering()} - {*few()})} more: every pair of values that fits on 4 ranks"),
            (
                "`make test-composition`",
                "about 2,000: all without a pipeline, and every triple of values with one; 40 minutes on two cores",
            ),
        ),
    )
    yield _fill(
        """The models are an MLP, a GPT with tied embeddings, timm's VisionTransformer, and transformers' Llama and
        Mixtral. A cell trains 2 or 3 updates (6 where gradients are sent in
        half precision), and is compared with the same mode in one process, as [`halfmesh
        verify`](verify.md) does. The largest relative differences that pass:"""
    )
    modes = [mode for mode in MODES if mode in TOLERANCES]
    limits: dict[tuple[str, ...], list[str]] = {}
    for mode in modes:
        dtype = COMPUTE_DTYPES[mode]
        words = (f"{limit:.0e}".replace("e-0", "e-") for limit in (TOLERANCES[mode], MOVEMENT[dtype], NORM[dtype]))
        limits.setdefault(tuple(words), []).append(f"`{mode}`")
    rows = ((", ".join(names), *values) for values, names in limits.items())
    yield _table(("mode", "weights", "distance moved", "gradient norm"), rows)
    yield _fill(
        """*Distance moved* is relative to how far a parameter should move, which shows wrong gradients of small
        weights. The tests also prove that"""
    )
    yield """\
- layouts without a mode equal plain torch in float64 within 1e-9 (1e-7 of the distance moved);
- skips, loss scale, gradient norm, learning rate and final weights are bitwise equal on all ranks that hold them;
- in fp16, an inf in one rank's loss, or in its gradient of one parameter, makes every rank skip the update and changes
  no weight;
- they can fail: they report [faults put in on purpose](../benchmarks/results/faults.md)."""
    yield "## What is rejected"
    found = messages()
    alone = {where for places in found.values() for where in places}
    names: dict[tuple[str, str], list[str]] = {}
    for message, places in found.items():
        kept = [place for place in places if place.partition(" x ")[0] not in alone or " x " not in place]
        name = re.match(r"'\w+'", message)
        key = (_combine(kept), message[name.end() :] if name else message)
        names.setdefault(key, []).extend([name[0]] if name else [])
    said = {where: " or ".join(filter(None, [", ".join(given[:-1]), *given[-1:]])) for where, given in names.items()}
    yield _table(("combination", "message"), ((where, given + rest) for (where, rest), given in said.items()))


def render() -> str:
    return "\n\n".join(_parts()) + "\n"


def findings_of_table(row: Row, column: str) -> list[Finding]:
    """What halfmesh has against the smallest config with this row and column of the composition table."""
    axes = {name: {name: 2} for name in ("tensor", "context", "expert")}
    axes["pipeline"] = {"pipeline": {"size": 2, "microbatches": 2}}
    config = {"parallel": axes.get(column, {"data": column})} | ({row.key: {"mode": row.mode}} if row.key else {})
    return check(load_config(config), 2, "cpu")


def messages() -> dict[str, list[str]]:
    """Each message, and what it is an answer to."""
    found: dict[str, list[str]] = defaultdict(list)
    everything = [findings_of_table(row, column) for row in get_rows() for column in get_columns()]
    for finding in itertools.chain(*everything, *(cell.findings() for cell in every())):
        if finding.where not in found[finding.message]:
            found[finding.message].append(finding.where)
    return found


def _combine(places: Iterable[str]) -> str:
    """`["a x b", "a x c"]` as one text."""
    right: dict[str, list[str]] = {}
    for place in places:
        left, _, with_what = place.partition(" x ")
        right.setdefault(left, []).extend([f"`{with_what}`"] if with_what else [])
    return "; ".join(f"`{left}`" + (f" x {', '.join(found)}" if found else "") for left, found in right.items())


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    PAGE.write_text(render())
