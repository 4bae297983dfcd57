"""Tensor parallelism over 2 ranks, mode TORCH in bf16.

What the keys mean: tensor_fp32.py and torch_bf16.py.
"""

from tensor_fp32 import *
from torch_bf16 import *
