"""The pipeline axis: splits a model into stages, through which batches pass in microbatches.

axis                       the config keys, checks of the model, and the parameters of this rank's stages
partition                  the pieces of a model, and their partition into stages
fx_split, fx_trace         the pieces of a model that no partitioner knows: traces its forward, and splits it at modules
stage                      a stage as torch's schedules call it, and messages between stages
schedules, runner          microbatches and their order, the shapes of what stages return, and the passes of batches
"""
