"""Finds the source of inf and nan, measures half precision per layer, and detects ranks that diverge.

`probes.py` puts hooks on the modules in real updates, and measures tensors, for `nonfinite.py` (the message of
NonFiniteError) and `precision.py` (engine.precision_report). `sync_check.py` is debug="sync". It imports checkpoint,
parallel, amp and the packages below them.
"""
