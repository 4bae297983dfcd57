"""Weights, gradients and optimizer state sharded over the data ranks.

zero1, slice_bucket            each rank steps its shard of the weights
fsdp, fully_shard, fsdp_wrap   torch's FSDP2: weights and gradients are sharded, too
withheld                       what stands in `param.grad` where the gradient is not to be used
"""
