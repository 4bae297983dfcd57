"""Mixture-of-experts layers whose experts are sharded over ranks (`parallel.expert`).

axis           the axis: its keys, its plan, layers that hold this rank's experts; tokens to the ranks of their experts, and back
"""
