"""Random numbers over the mesh: what must differ between ranks, and what must not."""

from __future__ import annotations

import torch

from .context import ParallelContext


def separate_dp_ranks(seed: int, context: ParallelContext) -> None:
    """Seed torch with `seed` + dp rank, so that dropout differs between the data ranks.

    One process keeps whatever the user seeded. Weights do not depend on it: they are made before, and broadcast.
    """
    if context.dp_size > 1:
        torch.manual_seed(seed + context.dp_rank)
