"""The files of a run's folder, and the names in them."""

CONFIG = "config.json"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
PRECISION = "precision.json"
FILES = (CONFIG, PLAN, METRICS, PRECISION)

WARNINGS = "warnings"
"""In a record: [updates that were made by then, text] of each warning since the record before."""

SKIPPED = "skipped"
"""In a record: the numbers of the updates that were skipped since the record before, counted from 1."""
