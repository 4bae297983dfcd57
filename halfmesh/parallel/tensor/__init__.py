"""The tensor axis: each rank holds shards of the layers, and all ranks see the same data.

plans              which module gets which style: plans for classes of layers, or the config's patterns
style, feature_styles, sequence_styles, attention      what a style does to one module
checks             whether the styles fit the model and each other
apply              shards the parameters, and installs the styles
layers, collectives      what sharded layers run
gradients, trial   refuse a plan that trains wrong weights, before the first update
"""
