"""Which torch this is: what some tests expect differs."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
