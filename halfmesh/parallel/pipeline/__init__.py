"""The pipeline axis: a model is cut into stages, and batches pass through them in microbatches.

axis                       the config keys, and checks of the model, the optimizer and the batches
pieces, partition          the pieces of a model, and the stages that are made of them
fx_split, fx_trace         the pieces of a model that no partitioner knows: its forward is traced, and cut at modules
stage_params               this rank keeps the parameters of its stages, and sums gradients of shared ones
shape_inference            what each stage returns, found without data
transport, stage           what stages send, and a stage as torch's schedules call it
schedules, microbatches, executor      how batches pass through the stages
"""
