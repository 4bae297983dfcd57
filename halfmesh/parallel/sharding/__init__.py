"""Shards weights, gradients and optimizer state over the data ranks.

zero1                          each rank steps its shard of the weights
fsdp, fsdp_reducer, fsdp_wrap  torch's FSDP2: also shards weights and gradients, and casts weights before a gather
"""
