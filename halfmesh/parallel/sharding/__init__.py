"""Weights, gradients and optimizer state in parts over the data ranks.

zero1, slice_bucket                  each rank steps a part of the weights
fsdp, fully_shard, fsdp_wrap         torch's FSDP2: weights and gradients, too
reducers                             how gradients become those of the parts, for both
"""
