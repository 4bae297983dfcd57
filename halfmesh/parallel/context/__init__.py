"""Sequences sharded over ranks: each computes its tokens of every sequence (`parallel.context`).

axis           its keys, its plan, and calls of the model and the criterion with this rank's tokens
attention      this rank's tokens attend to all of them
loss           means over the targets of all ranks, and what a loss was made of
sequences      the tokens that a rank has
trial          whether a model or a criterion combines tokens otherwise
"""
