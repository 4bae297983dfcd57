"""The tensor axis: each rank holds parts of a layer, and all see the same data.

plans              which module gets which style: by kinds of layers, or patterns
style, feature_styles, sequence_styles, attention      what a style does to one module
checks, proposal   whether styles fit the model and each other; a plan for a model that has none
apply              cuts parameters, and installs the styles
axis, layers, collectives      what divided layers run
verify, block_trial, mixing    a plan of the user's own is compared with whole blocks before the first update
"""
