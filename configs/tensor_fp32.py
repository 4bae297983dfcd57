"""Tensor parallelism, in full precision: the large layers are divided, and 2 ranks compute each of them together.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/tensor_fp32.py

For models that are too large for one device. 2 ranks hold one copy of the model, divided; 4 ranks hold two such copies,
and each copy sees its own part of the data. The tensor_ configs of other precisions differ in the precision only.
"""

from fp32 import *

# Which rank holds what. Data parallelism takes the ranks that are left: all of them / `tensor`.
parallel = dict(
    tensor=2,  # ranks that share one copy; it has to divide attention heads, features, and words of an embedding
)
