"""A training loop over the engine, with hooks. Everything it does is a public call of `halfmesh.Engine`.

batch.py        From a batch to a loss: Outcome, compute_batch.
hook.py         What a hook may do, and when.
loaders.py      Which batches are trained and evaluated on.
evaluation.py   The mean loss over batches and data ranks; predict.
fit_state.py    What of a `fit` is saved with the engine.
named_hooks.py  Hooks by name.
trainer.py      Trainer, which calls all of these; none of them imports it.

The hooks themselves are in `halfmesh.hooks`.
"""
