"""Pipeline parallelism over 2 ranks, mode NAIVE in fp16.

All ranks share one loss scale and skip the same updates. What the keys mean: pipeline_fp32.py and naive_fp16.py.
"""

from naive_fp16 import *
from pipeline_fp32 import *
