"""Atomic checkpoints of the model's full tensors, which load into any layout.

checkpointer.py   saves and loads for one engine, also in a thread while training continues
state.py          this rank's shards of the tensors, and tensors that are made of others
full_state.py     joins what ranks say of the full tensors that they hold
validate.py       rejects a checkpoint that does not fit, and reports settings that a load overwrites
storage.py        the files of a checkpoint, and the folder of all, locked by the one job that saves; dcp.py: tensors
preemption.py     automatic checkpoints: every N steps, and when a signal ends the run
agreement.py      agreement between ranks that work succeeded on all, and at which step to stop
export.py         weights alone, for other programs
rank_state.py     random numbers, and state that the loop attaches

It imports parallel, amp, config and the packages below them, but not the engine.
"""
