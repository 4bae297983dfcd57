"""Data, tensor and sequence parallelism over 2 x 2 ranks, mode TORCH in fp16.

What the keys mean: data_tensor_fp32.py and torch_fp16.py.
"""

from torch_fp16 import *

parallel = dict(
    tensor=dict(size=2, sequence_parallel=True),
    data=dict(size=2, reduce_dtype="float32"),
)
