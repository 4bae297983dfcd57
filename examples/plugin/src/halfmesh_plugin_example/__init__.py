"""What halfmesh finds here by the entry points of pyproject.toml: a mode, a tensor plan and a hook."""
