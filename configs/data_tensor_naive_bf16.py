"""Data, tensor and sequence parallelism over 2 x 2 ranks, mode NAIVE in bf16.

What the keys mean: data_tensor_fp32.py and naive_bf16.py.
"""

from data_tensor_fp32 import *
from naive_bf16 import *
