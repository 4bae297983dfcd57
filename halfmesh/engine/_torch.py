"""Private names of torch that several files of engine need."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Whether a backward runs and calls this: from a hook, or where activations are computed again."""
    return bool(torch._C._current_graph_task_id() != -1)
