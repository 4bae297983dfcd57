"""What cannot be verified is told, with its reason; ranks that fail, hang or are killed, too; and nothing is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from tests.distributed.test_local_ranks import running, wait_for

MODELS = """
import os
import signal
import time
import torch
from torch import nn

LOSS = nn.CrossEntropyLoss()
def rank(): return os.environ.get("RANK")
def model(): return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
def data(rows=8, targets=None): return torch.randn(rows, 8), torch.randint(4, (targets or rows,))
def right(): return model(), data(), LOSS
def fails(): return torch.load("no weights.pt")
def text(): return "a model"
def lacks_targets(): return model(), data(8, 5), LOSS
def one_row(): return model(), data(1), LOSS
class Leaving(nn.Sequential):
    def forward(self, x):
        if rank() == "1":
            raise LookupError("only here")
        return super().forward(x)
def leaves(): return Leaving(model()), data(), LOSS
def dies():
    if rank() == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return right()
def hangs():
    if rank() is not None:
        open(os.path.join(os.environ["SEEN"], str(os.getpid())), "w").close()
    while rank() == "1":
        time.sleep(0.1)
    return right()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the models above, and a folder for temporary files."""
    (tmp_path / "bad_models.py").write_text(MODELS)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "seen").mkdir()
    get_temp_dir()  # of multiprocessing, now: its sockets need a short path
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def verify(folder: Path) -> Callable[..., dict[str, Any]]:
    """The answer of the command, which has to have the exit status 1."""

    def run(build: str, *args: str, config: str = "") -> dict[str, Any]:
        (folder / "config.py").write_text(config)
        command = ["verify", str(folder / "config.py"), "--model", f"bad_models:{build}", "--world-size", "2"]
        result = CliRunner().invoke(app, [*command, "--json", *args])
        assert result.exit_code == 1, result.output
        answer = json.loads(result.stdout)
        assert not answer["equal"]
        return answer

    return run


TENSOR = "parallel = dict(tensor=dict(size=2, plan={'9': 'colwise'}))"


@pytest.mark.parametrize(
    ("build", "args", "config", "words"),
    [
        ("fails", [], "", "--model bad_models:fails: it raised FileNotFoundError: [Errno 2] No such file"),
        ("text", [], "", "it returned str; return the model"),
        ("lacks_targets", [], "", "Expected input batch_size (16) to match target batch_size (5)"),
        ("one_row", [], "", "the batch has one row, which proves nothing"),
        ("rihgt", [], "", "bad_models.rihgt does not exist; did you mean 'right'?"),
        ("right", [], TENSOR, "9"),
        ("right", [], "parallel = dict(pipeline=2, tensor=2)", "2 rank"),
        ("right", ["--optimizer=bad_models:adam"], "", "--optimizer bad_models:adam: bad_models.adam does not exist"),
        ("right", ["--device=cuda"], "", "ranks need a GPU each, but found 0 GPUs"),
    ],
)
def test_what_cannot_be_trained(
    verify: Callable[..., Any], folder: Path, monkeypatch: Any, build: str, args: list[str], config: str, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    answer = verify(build, *args, config=config)
    assert (answer["first"], answer["phases"]) == (None, [])
    assert words in answer["problems"][0]
    assert "halfmesh/" not in answer["problems"][0]
    assert not list((folder / "temporary").glob("halfmesh_*"))


@pytest.mark.parametrize(
    ("build", "words", "text"),
    [
        ("leaves", "rank 1 failed: LookupError: only here", 'raise LookupError("only here")'),
        ("dies", "rank 1 failed: killed by SIGKILL (out of memory?)", "killed"),
    ],
)
def test_a_rank_that_fails(verify: Callable[..., Any], folder: Path, build: str, words: str, text: str) -> None:
    first = verify(build)["first"]
    assert (first["what"], first["ranks"], first["where"]) == ("failed", [1], words)
    assert text in first["cause"]
    assert not list((folder / "temporary").glob("halfmesh_*"))


@pytest.mark.slow
def test_ranks_that_hang(verify: Callable[..., Any], folder: Path) -> None:
    answer = verify("hangs", "--timeout", "6")
    assert (answer["first"]["what"], answer["first"]["ranks"]) == ("hangs", [0])
    assert "had not ended after 6 s" in answer["first"]["where"]
    assert "in hangs" in answer["first"]["cause"].partition("rank 1 at:")[2]
    assert not running(wait_for(folder / "seen", 2))
    assert not list((folder / "temporary").glob("halfmesh_*"))
