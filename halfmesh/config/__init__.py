"""What a user writes: the schema of a config and the ways to load one."""

from .config import Config

__all__ = ["Config"]
