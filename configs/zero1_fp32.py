"""zero1, in full precision: each data rank keeps optimizer state of its part of the weights, and steps that part.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/zero1_fp32.py

Weights and gradients stay whole on each rank; of Adam's state a rank has one part. The loop, and the weights after
training, are those of plain data parallelism. The zero1_ configs of other precisions differ in the precision only. See
docs/sharding.md.
"""

from fp32 import *

parallel = dict(
    data=dict(
        strategy="zero1",
        reduce_dtype="float32",  # the default: gradients are summed in fp32, whatever their own format
        bucket_mb=25,  # the default: so much is sent at a time
        max_inflight=8,  # the default: so many of these at most are under way
    ),
)
