"""The tensor axis: each rank holds parts of a layer, and all see the same data.

plans              which module gets which style: by kinds of layers, or patterns
style, feature_styles, sequence_styles, attention      what a style does to one module
checks             whether styles fit the model and each other
apply              cuts parameters, and installs the styles
layers, collectives      what divided layers run
gradients, trial   what a wrong plan would train is refused before the first update
"""
