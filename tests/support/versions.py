"""Which torch this is: what some tests expect differs."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

SPLIT_SCHEDULES = ("zero_bubble", "zbv", "dualpipev") if TORCH >= (2, 13) else ()
"""Schedules with split backwards. They are rejected where torch counts weights that a stage reuses twice."""
