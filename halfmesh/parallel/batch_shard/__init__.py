"""Batches that the ranks of an axis share: each computes its tokens of every sequence, or its rows.

shard       which part of a batch a rank has
calls       calls of the model with this rank's part, and a trial before the first; the base of such axes
trial       helpers of the trial
losses      losses of the whole batch, from each rank's outputs
"""
