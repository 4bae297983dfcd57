"""The full model of an engine that is sharded."""

from __future__ import annotations

from typing import Any

import halfmesh


def close_whole(engine: halfmesh.Engine) -> dict[str, Any]:
    """The full model's weights, on the CPU of every rank. The engine is closed."""
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    return weights
