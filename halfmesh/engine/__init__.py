"""The engine: the loop of forward, backward and step. In reading order:

initialize         from the user's objects and a config to an engine; launch: joins the ranks, before there is a model
inputs             checks of model, optimizer and loaders; all ranks start equal
parallelize        plans and applies shards; compilation: the modules to compile and to recompute
deferred           models built without memory: their scopes, and how each rank makes its values; recording: of what was
                   done to tensors without memory
recompute          activations that are computed again in backward; offload: kept on the host until then
engine             forward, backward, step. Below it:
accumulation       a cycle of microbatches: backward, reduction, the divisor of the gradients
executor           forward and criterion in one process; warnings of other calls of the model; even evaluations
pipeline_executor  the same under a pipeline, with pipeline_handles and microbatches
lr_scheduler       advances the scheduler; schedulers with a warm-up
ema                the moving average of the weights, and the model with it
guards             what may change while a run trains; hints: warnings of mistakes in the loop
ranges             named ranges for profilers
summary            the resolved configuration, printed at the start
convert_to_amp     a precision mode without an engine

It imports checkpoint, debug, data, config, parallel and amp, and the packages below them; never the engine's users:
trainer, report, dry_run, verify, cli.
"""
