"""Converts configs of other engines, for `halfmesh convert-config`: table.py (a row), tables.py, convert.py."""
