"""Batches that are sharded over the ranks of an axis: each computes its tokens of every sequence, or its rows.

shard       a rank's shard of a batch, and losses of the full batch from each rank's outputs
calls       calls of the model with this rank's shard, and a trial before the first; the base of such axes
"""
