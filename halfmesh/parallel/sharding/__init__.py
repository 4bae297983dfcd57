"""Weights, gradients and optimizer state in parts over the data ranks.

zero1, slice_bucket                    each rank steps a part of the weights
fsdp, units, wrap, hooks, withheld     torch's FSDP2: weights and gradients, too
reducers                               how gradients become those of the parts, for both
unwrap, explain                        FSDP2 taken back; its errors in our words
"""
