"""Shards weights, gradients and optimizer state over the data ranks.

zero1, late_params             each rank steps its shard of the weights; weights that arrive while forward runs
fsdp, fsdp_reducer, fsdp_wrap  torch's FSDP2: also shards weights and gradients, and casts weights before a gather
"""
