"""fsdp, mode TORCH in fp16: weights are gathered in fp32, and autocast decides for each operation.

What the keys mean: fsdp_fp32.py and torch_fp16.py.
"""

from fsdp_fp32 import *
from torch_fp16 import *
