"""Configs of other engines as ours, for `halfmesh convert-config`: table.py, a table for each engine, convert.py."""
