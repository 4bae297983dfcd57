"""Converts configs of other engines: table.py (rows, and how they are followed), tables.py (a table per engine)."""
