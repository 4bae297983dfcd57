"""halfmesh convert-config, as a user runs it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app


class Converted:
    """What `halfmesh convert-config --json` answers.

    Attributes:
        config: what was written, loaded.
        rest: keys that have no place, each with "without" or "not understood".
        reasons: why, by key.
        lost: keys of a precision or of a way to shard that the config has not.
        looks: what the user should look at, by key.
    """

    def __init__(self, origin: str, source: object, world_size: int | None = None) -> None:
        ranks = [] if world_size is None else ["--world-size", str(world_size)]
        text = source if isinstance(source, str) else repr(source)
        done = CliRunner().invoke(app, ["convert-config", text, "--from", origin, "--json", *ranks])
        assert done.exit_code in (0, 1), done.output
        self.answer: dict[str, Any] = json.loads(done.stdout)
        self.world_size, self.findings = self.answer["world_size"], self.answer["findings"]
        without, others = self.answer["without_equivalent"], self.answer["not_understood"]
        self.rest = {row["key"]: "without" for row in without} | {row["key"]: "not understood" for row in others}
        self.reasons = {row["key"]: row["reason"] for row in (*without, *others)}
        self.looks = {row["key"]: row["look"] for row in self.answer["converted"]}
        self.keys = [*self.looks, *self.rest]
        self.lost = self.answer["lost"]
        assert set(self.lost) <= {row["key"] for row in without}
        assert self.answer["ok"] == (not others and not self.findings and not self.lost) == (done.exit_code == 0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.py"
            path.write_text(self.answer["config"])
            self.config = halfmesh.load_config(path).to_dict()
