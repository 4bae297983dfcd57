"""When each thing happens in a step; `halfmesh/engine/engine.py` calls it. In reading order:

parts.py              What an engine is made of, and the hooks that take part in its loop.
accumulation.py       A cycle of microbatches: backward, reduction, what the gradients are divided by.
executor.py           Forward, criterion and backward, in one process.
pipeline_executor.py  The same under a pipeline, with handles.py and last_stage.py.
lr.py                 Who advances the scheduler, and schedulers with a warm-up.
average.py            The moving average of the weights.
model_guard.py, loop_checks.py   Warnings of mistakes in the user's loop.

May import amp, parallel, data and division; not engine, checkpoint or debug.
"""
