"""The pipeline axis: a model is cut into stages, and batches go through them in microbatches."""
