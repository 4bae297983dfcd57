"""Tensor parallelism over 2 ranks, mode TORCH in fp16.

All ranks share one loss scale and skip the same updates. What the keys mean: tensor_fp32.py and torch_fp16.py.
"""

from tensor_fp32 import *
from torch_fp16 import *
