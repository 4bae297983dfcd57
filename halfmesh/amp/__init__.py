"""FORMAT: which number format each tensor has. Works alone, in one process, and knows nothing of ranks or loops."""

from .plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin, Composes

__all__ = ["AMP_PLUGINS", "AMP_TYPE", "AMPPlugin", "Composes"]
