"""One thread per process, whoever starts the tests: several ranks share the cores, and sums depend on the threads."""

from __future__ import annotations

import os
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell ignores it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
