"""Where inf and nan come from, what half precision does to each layer, FLOPs, and ranks that drift apart.

`probes.py` puts hooks on the modules in real updates, and measures tensors. On it stand `nonfinite.py` (the message of
NonFiniteError), `precision.py` (engine.precision_report) and `flops.py` (engine.count_flops). `sync_check.py` is
debug="sync". May import loop, checkpoint, division, parallel, amp and below.
"""
