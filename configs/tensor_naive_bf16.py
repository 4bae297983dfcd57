"""Tensor parallelism over 2 ranks, mode NAIVE in bf16: each rank has fp32 masters of its own part only.

What the keys mean: tensor_fp32.py and naive_bf16.py.
"""

from naive_bf16 import *
from tensor_fp32 import *
