"""Converts configs of other engines, for `halfmesh convert-config`: table.py, a table for each engine, convert.py."""
