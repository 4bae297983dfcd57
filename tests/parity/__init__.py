"""What trains as one process does: a row for each fact, proven as `halfmesh verify` proves a layout.

The product of precisions and layouts is in `tests/composition`; here is what else may be in a training: models, losses,
optimizers and options of a layout.
"""
