"""Mixture-of-experts layers whose experts are sharded over ranks (`parallel.expert`).

axis           the axis: its keys, its plan, and layers that hold this rank's experts
dispatch       tokens to the ranks of their experts, and back
"""
