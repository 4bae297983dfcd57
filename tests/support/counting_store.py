"""A store whose requests are counted."""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist


class CountingStore:
    """A store of one process, which threads use as ranks use that of a launch; counts their requests."""

    def __init__(self):
        self._store, self.requests = dist.HashStore(), Counter()

    def __getattr__(self, name):
        if name != "set_timeout":  # which asks the store nothing
            self.requests[name] += 1
        return getattr(self._store, name)
