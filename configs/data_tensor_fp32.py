"""Data and tensor parallelism in 2D, with sequence parallelism, in full precision: 2 copies, each divided in 2.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --config configs/data_tensor_fp32.py

tensor_fp32.py on 4 ranks, with less memory for activations, and with each key spelled out. The data_tensor_ configs of
other precisions differ in the precision only.
"""

from fp32 import *

parallel = dict(
    tensor=dict(
        size=2,  # what `tensor=2` is short for
        # Between the divided layers, at norms, dropout and residual sums, each rank keeps its half of the sequence
        # instead of all of it. The traffic is the same. `size` has to divide the length of the sequence.
        sequence_parallel=True,
    ),
    data=dict(
        size=2,  # copies of the model; without it, what `tensor` leaves. With it, any other number of ranks is refused
        reduce_dtype="float32",  # the default: gradients are summed over the copies in fp32, whatever their own format
    ),
)
