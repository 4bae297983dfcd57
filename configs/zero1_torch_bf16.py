"""zero1, mode TORCH in bf16: state in parts, autocast in the model.

What the keys mean: zero1_fp32.py and torch_bf16.py.
"""

from torch_bf16 import *
from zero1_fp32 import *
