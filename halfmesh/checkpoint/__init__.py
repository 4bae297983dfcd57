"""Atomic checkpoints of the whole model's tensors, which load into any layout.

checkpointer.py   saves and loads for one engine
state.py          which shard of which tensor this rank holds
compound.py       tensors that are made of others, apart and together
validate.py       whether a checkpoint fits, checked before anything changes
settings.py       settings that a load overwrites
storage.py        the files of one checkpoint; dcp.py: those of tensors
folder.py         the folder of all checkpoints, locked by the one job that saves into it
background.py     the thread that writes while training continues
preemption.py     automatic checkpoints: periodic, and when a signal ends the run
export.py         weights alone, for other programs
rank_state.py, collective.py: random numbers and the loop's own state; the same error on all ranks

Imports parallel, amp, config and what is below them; not the engine.
"""
