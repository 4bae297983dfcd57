"""fsdp, mode NAIVE in bf16: the parts are the fp32 masters, and weights travel in half precision.

What the keys mean: fsdp_fp32.py and naive_bf16.py.
"""

from fsdp_fp32 import *
from naive_bf16 import *
