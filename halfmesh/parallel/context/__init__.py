"""Sequences sharded over ranks: each computes its tokens of every sequence (`parallel.context`).

axis           its keys, its plan, calls of the model with this rank's tokens, and attention of all tokens
"""
