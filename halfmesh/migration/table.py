"""The elements of a table of another engine's keys: a row for each key.

Keys that share a row are in one string; `*` matches anything, and an exact key takes precedence. A row is

- a halfmesh key, for the same value (a `*` in it is the last part of the other key); or (halfmesh key, what to check);
- an `Outcome`: to, done, no, lost;
- a dict from values (texts in lower case) to rows, "*" for all others;
- a function of the value, and of all values by key, that returns a row; a ValueError gives the reason why it is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a key: values by dotted halfmesh key, if there is anything to write; and why, or what to check.

    Kinds: "converted", "without" an equivalent, "lost" (a precision or sharding without one), "not understood".
    """

    kind: str
    settings: Values
    note: str = ""


to = partial(Outcome, "converted")
done = partial(Outcome, "converted", {})  # nothing has to be written
no = partial(Outcome, "without", {})
lost = partial(Outcome, "lost", {})
AS_HERE = done("as here")


def on(row: Any) -> dict[Any, Any]:
    """The rows of a switch: `row` if it is on."""
    return {True: row, False: AS_HERE}


def matches(name: str, patterns: str) -> bool:
    """Return True if one of the patterns matches that key; `section.*` also matches the section."""
    return any(fnmatchcase(name, one) or f"{name}.*" == one for one in patterns.split())


@dataclass(frozen=True)
class Origin:
    """An engine whose configs can be converted.

    `needs`: keys that count only if another key has a value: (keys, the other, that value, its default). `prefix`: an
    optional prefix of its keys. `always`: settings that follow from missing keys. `look`: what to check.
    """

    title: str
    rows: Mapping[str, Any]
    needs: tuple[tuple[str, str, Any, Any], ...] = ()
    prefix: str = ""
    always: Callable[[Values], Values] = lambda values: {}
    look: str = ""


STAGES, MICROBATCHES, TENSOR = "parallel.pipeline.size", "parallel.pipeline.microbatches", "parallel.tensor.size"
CONTEXT = "parallel.context.size", "give engine(...) whole sequences, see docs/context-parallel.md"
CLIPPED = {"clip_grad_norm": 1.0}  # DeepSpeed's default of gradient_clipping since 0.19
ZERO1, FSDP = {"parallel.data.strategy": "zero1"}, {"parallel.data.strategy": "fsdp"}
ZERO = {0: AS_HERE, 1: to(ZERO1), 2: to(ZERO1, "zero1 does not shard gradients: the same numbers"), 3: to(FSDP)}
_OFFLOADED = to({"parallel.data.cpu_offload": True}, "parameters, gradients and optimizer state wait in host memory")
OFFLOAD = {False: AS_HERE, "none": AS_HERE, True: _OFFLOADED, "cpu": _OFFLOADED, "nvme": no("nothing is put on disks")}
