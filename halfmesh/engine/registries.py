"""The registry of the engine room."""

from __future__ import annotations

from typing import Any

from ..registry import Registry

HOOKS: Registry[Any] = Registry("hook", "halfmesh.hooks")
