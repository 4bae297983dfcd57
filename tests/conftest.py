"""One thread per process, whoever starts the tests: several ranks share the cores, and sums depend on the threads."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
