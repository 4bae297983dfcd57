"""Finds the source of inf and nan, measures half precision per layer, and detects ranks that diverge.

`probes.py` puts hooks on the modules in real updates, and measures tensors. On it stand `nonfinite.py` (the message of
NonFiniteError) and `precision.py` (engine.precision_report). `sync_check.py` is debug="sync". Imports checkpoint,
parallel, amp and what is below them.
"""
