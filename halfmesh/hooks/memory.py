"""How much memory is in use."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..trainer.hook import Hook

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

_MIB = 2**20


class MemoryHook(Hook):
    """Adds "memory_mib" to records: the most that a rank has had in use, of the rank that had the most.

    On a GPU what torch has allocated there since the last record; on a CPU the process's largest resident set since it
    began.
    """

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        context = trainer.engine.context
        if context.device.type == "cuda":
            mine = torch.cuda.max_memory_allocated(context.device)
            torch.cuda.reset_peak_memory_stats(context.device)
        else:
            # Linux counts KiB, macOS bytes.
            mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"memory_mib": max(context.everyone(mine)) / _MIB}
