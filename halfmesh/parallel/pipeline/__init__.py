"""The pipeline axis: splits a model into stages, through which batches pass in microbatches.

axis                       the config keys, and checks of the model, the optimizer and the batches
pieces, partition          the pieces of a model, and their partition into stages
fx_split, fx_trace         the pieces of a model that no partitioner knows: traces its forward, and splits it at modules
stage_params               keeps the parameters of this rank's stages, and sums gradients of shared ones
transport, stage           shapes and messages between stages, and a stage as torch's schedules call it
schedules, runner          microbatches and their order, and the passes of batches through the stages
"""
