"""A training loop over the engine, with hooks. Everything it does is a public call of `halfmesh.Engine`.

batch.py        From a batch to a loss: Outcome, compute_batch.
hook.py         The events of a hook; hooks by name.
evaluation.py   The batches to evaluate on; the mean loss over batches and data ranks; predict.
trainer.py      Trainer, which calls all of these; none of them imports it.

The hooks (`halfmesh.hooks` has their public names):
metrics.py      On evaluation: torchmetrics over the right ranks; best weights, early stopping, LR schedulers.
throughput.py   Samples, tokens and FLOPs per second; memory; peak FLOP/s of devices.
profiling.py    Traces of torch.profiler, and histories of the GPU's memory, of some updates.
records.py      Records on the terminal, in the run folder, to trackers.
"""
