"""Tensor parallelism over 2 ranks, mode NAIVE in fp16: each rank has fp32 masters of its own part only.

All ranks share one loss scale and skip the same updates. What the keys mean: tensor_fp32.py and naive_fp16.py.
"""

from naive_fp16 import *
from tensor_fp32 import *
