"""What a rank holds, and values of a config, as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import show

if TYPE_CHECKING:
    from ..config import Config
    from ..engine import Engine

_MOST_NAMES = 12
_MOST_LEVELS = 20
_MOST_BITS = 10_000
"""Of an integer that is written; Python refuses longer ones."""


def describe_ranks(engine: Engine) -> dict[str, Any]:
    """This rank's place in the mesh, the blocks whose parameters it holds, which part of them, and bytes."""
    from ..plan.holdings import block_of, compress

    context, data = engine.context, engine.config.parallel.data
    names = compress(dict.fromkeys(block_of(name) for name, _ in engine.model.named_parameters()))
    parts = [f"tensor {context.tp_rank + 1}/{context.tp_size}"] if context.tp_size > 1 else []
    if context.dp_size > 1 and data.strategy != "replicate":
        over = data.hybrid or context.dp_size
        parts.append(f"{data.strategy} {context.dp_rank % over + 1}/{over}")
    more = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return {
        "place": [context.pp_rank, context.dp_rank, context.tp_rank],
        "holds": [*names[:_MOST_NAMES], *more],
        "part": ", ".join(parts),
        "bytes": sum(size or 0 for size in engine.plan.values["bytes"].values()),
    }


def describe_settings(config: Config) -> dict[str, Any]:
    """All keys with their values, defaults too; the mode's own keys beside the mode, as a user writes them."""
    settings = config.model_dump(exclude=set(config.user))
    for name in ("fp16", "bf16"):
        if settings[name] is not None:
            settings[name] = {"mode": settings[name]["mode"], **settings[name]["options"]}
    return dict(make_plain(settings))


def make_plain(value: Any, level: int = 0) -> Any:
    """`value` of what JSON has; of anything else its repr."""
    if level > _MOST_LEVELS:
        return show(value)
    if isinstance(value, Enum):
        return make_plain(value.value, level + 1)
    if isinstance(value, Mapping):
        return {str(key): make_plain(item, level + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [make_plain(item, level + 1) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 64 else (str(value) if value.bit_length() < _MOST_BITS else show(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, Path) else show(value)
