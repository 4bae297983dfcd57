"""Pipeline parallelism over 2 ranks with 2 stages each, mode TORCH in bf16.

What the keys mean: interleaved_fp32.py and torch_bf16.py.
"""

from interleaved_fp32 import *
from torch_bf16 import *
