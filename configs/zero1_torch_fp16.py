"""zero1, mode TORCH in fp16: state in parts, autocast in the model.

What the keys mean: zero1_fp32.py and torch_fp16.py.
"""

from torch_fp16 import *
from zero1_fp32 import *
