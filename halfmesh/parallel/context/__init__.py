"""Sequences sharded over ranks: each computes its tokens of every sequence (`parallel.context`).

axis           the axis: its keys, its plan, and calls of the model with this rank's tokens
attention      attention of all tokens, from each rank's queries, keys and values
"""
