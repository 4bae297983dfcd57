"""One thread per process, whoever starts the tests: several ranks share the cores, and sums depend on the threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell ignores it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.support.ranks import end_teams

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _end_teams() -> Iterator[None]:
    """Processes are used by one test file only."""
    yield
    end_teams()
