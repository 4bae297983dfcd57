"""Tensor parallelism: each rank holds shards of the layers, and all ranks see the same data.

plans              the style of each module: plans for classes of layers, or the config's patterns, and checks
styles             the effect of a style on one module
layers             sharded layers, and attention with sharded heads; colwise: their products
logits             logits sharded over the vocabulary, and their cross entropy
apply              shards the parameters, installs the styles, and sums partial gradients
trial              rejects a plan that trains wrong weights, before the first update
"""
