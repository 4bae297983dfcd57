"""zero1, mode NAIVE in bf16: fp32 masters and state in parts; new weights travel in half precision.

What the keys mean: zero1_fp32.py and naive_bf16.py.
"""

from naive_bf16 import *
from zero1_fp32 import *
