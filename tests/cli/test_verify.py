"""halfmesh verify: its usage, what it prints, and its exit status."""

from __future__ import annotations

import json

import pytest

from tests.cli import run as halfmesh
from tests.cli import words

MODELS = """
import os
import torch
from torch import nn
print("the import")

class Model(nn.Linear):
    def forward(self, x):
        os.write(1, b"a write")
        x = super().forward(x)
        return x - x.mean(0) if self.out_features == 4 else x

def build(classes=5): return Model(8, classes), (torch.randn(8, 8), torch.randint(4, (8,))), nn.CrossEntropyLoss()
def mixing(): return build(4)
def adam(params): return torch.optim.AdamW(params, lr=0.01)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "verified_models.py").write_text(MODELS)
    (tmp_path / "config.py").write_text("print('the config')\nclip_grad_norm = 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda *args: halfmesh("verify", *args)


GIVEN = ["config.py", "--world-size", "2"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--world-size", "2"], "give only --device, --quick or --json"),
        (GIVEN, "give either --model or --script"),
        (["config.py", "--model", "a:b"], "give --world-size"),
        ([*GIVEN, "--model", "a:b", "--quick"], "--quick works only without a config"),
        ([*GIVEN, "--script", "t.py", "--optimizer", "a:b"], "a script builds its own"),
    ],
)
def test_usage(run, args, said):
    result = run(*args)
    assert (result.exit_code, result.stdout, said in words(result.stderr)) == (2, "", True)


def test_equal(run):
    result = run(*GIVEN, "--model", "verified_models:build", "--optimizer", "verified_models:adam")
    assert result.exit_code == 0, result.output
    first, structure, form = result.stdout.splitlines()
    assert first == "equal: pp 1 x dp 2 x tp 1 (2 ranks) compared with one process"
    assert structure.startswith("  - structure, float64: equal (")
    assert form.startswith("  - format, float32: equal (")
    assert "the config\n" in result.stderr


def test_a_difference_as_json_and_in_words(run):
    args = ["config.py", "--model", "verified_models:mixing", "--world-size", "4", "--updates", "1"]
    result = run(*args, "--json")
    answer = json.loads(result.stdout)
    assert list(answer) == ["equal", "first", "phases", "layout", "world_size", "shrunk_from", "problems"]
    assert [result.exit_code, *map(answer.get, ("equal", "world_size", "shrunk_from"))] == [1, False, 2, 4]
    assert [answer["first"][name] for name in ("step", "what", "module")] == [0, "output", ""]
    shown = run(*args, "--no-shrink", "--set", "parallel.data.size=4").stdout
    assert shown.startswith("differs: pp 1 x dp 4 x tp 1 (4 ranks) compared with one process\n")


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_without_a_config_this_machine_is_verified(run, monkeypatch, equal, status):
    class Report:
        def __init__(self, *asked):
            print("noise")
            self.equal, self.text = equal, str(asked)

        def __str__(self):
            return self.text

    monkeypatch.setattr("halfmesh.verify.machine.verify_machine", Report)
    result = run("--quick", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (status, "('cpu', True)\n")
