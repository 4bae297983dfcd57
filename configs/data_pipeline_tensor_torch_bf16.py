"""Data, pipeline, tensor and sequence parallelism over 2 x 2 x 2 ranks, mode TORCH in bf16.

What the keys mean: data_pipeline_tensor_fp32.py and torch_bf16.py.
"""

from data_pipeline_tensor_fp32 import *
from torch_bf16 import *
