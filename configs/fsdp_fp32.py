"""Fully sharded data parallelism (FSDP2), in full precision: weights, gradients and optimizer state in parts.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config configs/fsdp_fp32.py

For models of which one device cannot hold weights and optimizer state. The loop, and the weights after training, are
those of plain data parallelism. The fsdp_ configs of other precisions differ in the precision only. See
docs/sharding.md.
"""

from fp32 import *

parallel = dict(
    data=dict(
        strategy="fsdp",
        reduce_dtype="float32",  # the default: gradients are summed in fp32, whatever the weights' format
        reshard_after_forward=True,  # the default: a block's weights are given up between its forward and its backward
        prefetch=1,  # the default: the next block's weights are gathered while one computes
    ),
)
