"""Mixture-of-experts layers whose experts are sharded over ranks (`parallel.expert`).

axis           the axis: its keys, its plan, layers that hold this rank's experts, and tokens sent to them and back
"""
