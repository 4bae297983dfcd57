"""Faults put in on purpose, and where `halfmesh verify` says first that something is wrong."""
