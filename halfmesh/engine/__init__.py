"""What an engine does, and when. In reading order:

initialize         from the user's objects and a config to an engine; launch: the ranks before there is a model
inputs             whether model, optimizer and loaders can be trained
parallel_plans     how the model will be sharded, compiled and recomputed, before anything changes
parallelize        the model, sharded in place; activation, compilation: what is recomputed, and compiled
engine             forward, backward, step. Below it:
parts              what an engine is made of
accumulation       a cycle of microbatches: backward, reduction, what the gradients are divided by
executor           forward, criterion and backward in one process
pipeline_executor  the same under a pipeline, with pipeline_handles, last_stage and row_trial
lr_scheduler       who advances the scheduler, and schedulers with a warm-up
ema                the moving average of the weights, and the model with it
model_guard, loop_checks, same_trained   mistakes in the user's loop
summary, memory    the resolved configuration, printed at the start
convert_to_amp     a precision mode without an engine

Imports checkpoint, debug, data, config, parallel and amp, and what is below them; nothing of it imports the engine's
users: trainer, report, dry_run, verify, cli.
"""
