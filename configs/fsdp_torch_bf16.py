"""fsdp, mode TORCH in bf16: weights are gathered in fp32, and autocast decides for each operation.

What the keys mean: fsdp_fp32.py and torch_bf16.py.
"""

from fsdp_fp32 import *
from torch_bf16 import *
