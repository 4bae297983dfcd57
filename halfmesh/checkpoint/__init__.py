"""Atomic checkpoints of the model's full tensors, which load into any layout.

checkpointer.py   saves and loads for one engine
state.py          this rank's shards of the tensors
compound.py       saves tensors that are made of others as their inner tensors
validate.py       checks that a checkpoint fits, before anything changes
settings.py       settings that a load overwrites
storage.py        the files of one checkpoint; dcp.py: those of tensors
folder.py         the folder of all checkpoints, locked by the one job that saves into it
background.py     the thread that writes while training continues
preemption.py     automatic checkpoints: periodic, and when a signal ends the run
export.py         weights alone, for other programs
rank_state.py     random numbers, and state that the loop attaches

It imports parallel, amp, config and the packages below them; not the engine.
"""
