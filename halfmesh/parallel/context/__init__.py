"""Sequences sharded over ranks: each computes its tokens of every sequence (`parallel.context`).

axis           its keys, its plan, and calls of the model with this rank's tokens
attention      this rank's tokens attend to all of them
"""
