"""The tensor axis: each rank holds shards of the layers, and all ranks see the same data.

plans              the style of each module: plans for classes of layers, or the config's patterns
feature_styles, sequence_styles, attention      the effect of a style on one module
checks             checks that the styles fit the model and each other
apply              shards the parameters, and installs the styles
layers             sharded layers
gradients, trial   refuse a plan that trains wrong weights, before the first update
"""
