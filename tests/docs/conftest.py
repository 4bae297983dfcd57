"""How tests of pages execute snippets."""

from typing import Any

import pytest
import torch

import halfmesh
from tests.support.pages import snippet, stand_ins


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(page, *snippets)` writes `files` of a page into a folder, and executes snippets there with names `given`; by
    default those that the page supposes a user to have. Returns the names that they leave."""
    monkeypatch.chdir(tmp_path)

    def run(page: str, *names: str, files: tuple[str, ...] = (), given: dict[str, Any] | None = None) -> dict[str, Any]:
        for name in files:
            (tmp_path / name).write_text(snippet(page, name))
        space = stand_ins() | {"torch": torch, "halfmesh": halfmesh, "config": {}} if given is None else given
        for name in names:
            exec(snippet(page, name), space)
        return space

    return run
