"""The pipeline axis: a model is cut into stages, and batches go through them in microbatches.

partition, block_partition, pieces     where a model is cut: by its modules
tracing, questions, graph_pieces, traced       or by a trace of its forward
cut, ties          this rank keeps the parameters of its stages; those that stages share
skeleton, boundary the shapes of what is sent between stages
stage, schedules, microbatches, runner         stages run
"""
