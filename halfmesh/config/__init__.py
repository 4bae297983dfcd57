"""Configs: their schema, loading, and messages about mistakes.

schema.py (with activations.py, automatic.py): the keys. config.py: Config, the value. load.py: from a file or a dict,
with overrides.py, pyfile.py, text.py. problems.py, foreign.py: messages. key_checks.py, global_batch.py: what keys mean
together; `halfmesh.compat` is the table of what composes.
"""

from .config import Config

__all__ = ["Config"]
