"""The pipeline axis: a model is cut into stages, and batches go through them in microbatches.

axis                       the keys, and what does not fit
pieces, partition          the pieces of a model, and which of them make a stage
fx_trace, fx_split         the pieces of a model that nobody knows: a trace of its forward, cut at modules
stage_params               this rank keeps the parameters of its stages; those that stages share
shape_inference            what each stage returns, found without data
transport, stage           what is sent, and a stage as torch's schedules call it
schedules, microbatches, executor      batches go through the stages
"""
