"""Pipeline parallelism over 2 ranks, mode NAIVE in bf16.

What the keys mean: pipeline_fp32.py and naive_bf16.py.
"""

from naive_bf16 import *
from pipeline_fp32 import *
