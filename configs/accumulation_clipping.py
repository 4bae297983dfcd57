"""Gradient accumulation and clipping, on top of naive_fp16.py. The training loop stays the same.

A config may import any config beside it, take all of its names, and replace some.
"""

from naive_fp16 import *

# Four small batches make one update: a large batch in the memory of a small one. The loop still calls
# engine.step() for each of them; it returns None until the fourth. An epoch's last, shorter cycle is averaged right.
BATCH_SIZE = 8
gradient_accumulation = 4

# Gradients whose norm, over all ranks and with the loss scale taken out, is larger are shortened to it.
# 0, the default, is off; dict(max_norm=1.0, norm_type="inf") clips by the largest element instead.
clip_grad_norm = 1.0
