"""Checkpoints: complete or not there, of the whole model's tensors, and loaded into any layout.

Reading order: checkpointer.py saves and loads. state.py: which part of which whole tensor this rank holds. validate.py:
does it fit, before anything changes. storage.py: the files of one checkpoint; dcp.py: those of the tensors. folder.py:
the folder of all of them; lock.py keeps other jobs out of it. background.py: the thread that writes while training goes
on. preemption.py: automatic checkpoints. export.py: weights alone. rng.py: random numbers. collective.py: the same
error on all ranks.

May import loop, division, parallel, amp, data, launching and what is below them; not engine or assembly.
"""
