"""Checkpoints: complete or not there, of the whole model's tensors, and loaded into any layout.

checkpointer.py saves and loads; state.py says what this rank holds; snapshot.py takes it to the files and back,
storage.py is the folder, dcp.py the files of tensors, lock.py keeps other jobs out; validate.py compares before
anything changes; export.py writes and reads weights alone; preemption.py saves without being called; rng.py and
collective.py are below all of them.
"""
