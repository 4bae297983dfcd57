"""Pipeline parallelism over 2 ranks with 2 stages each, mode NAIVE in fp16.

All ranks share one loss scale and skip the same updates. What the keys mean: interleaved_fp32.py and naive_fp16.py.
"""

from interleaved_fp32 import *
from naive_fp16 import *
