"""Configs: their schema, loading, and messages about mistakes.

schema.py: the keys. config.py: Config, the value, and mistakes in words. load.py: from a file or a dict, with
overrides; text.py: YAML and JSON. composition.py: a config on a number of ranks, and keys that depend on each other;
`halfmesh.compat` is the table of what composes.
"""

from .config import Config

__all__ = ["Config"]
