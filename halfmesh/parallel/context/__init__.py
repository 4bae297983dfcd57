"""Context parallelism (`parallel.context`): each rank computes its tokens of every sequence.

axis           the keys, the plan, and calls of the model and the criterion with this rank's tokens
attention      the tokens that a rank has, and their attention to all tokens
loss           means over the targets of all ranks, and the outputs that a loss depends on
trial          checks if a model or a criterion combines tokens in other ways
"""
