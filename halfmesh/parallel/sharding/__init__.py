"""Weights, gradients and optimizer state sharded over the data ranks.

zero1                          each rank steps its shard of the weights
fsdp, fsdp_reducer, fsdp_wrap  torch's FSDP2: weights and gradients are sharded, too; weights cast before a gather
"""
