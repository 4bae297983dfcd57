"""halfmesh verify: its usage, what it prints, and its exit status."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app

MODELS = """
import os
import torch
from torch import nn
print("the import")

class Model(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(8, 16), nn.Linear(16, 4), mixes

    def forward(self, x):
        print("a call")
        os.write(1, b"a write")
        x = self.first(x).relu()
        return self.last(x - x.mean(0) if self.mixes else x)

def data(rows=8):
    return torch.randn(rows, 8), torch.randint(4, (rows,))
def right(): return Model(False), data(), nn.CrossEntropyLoss()
def several(): return Model(False), [data() for _ in range(4)], nn.CrossEntropyLoss()
def mixing(): return Model(True), data(), nn.CrossEntropyLoss()
def adam(params): return torch.optim.AdamW(params, lr=0.01)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "verified_models.py").write_text(MODELS)
    (tmp_path / "config.py").write_text("print('the config')\nclip_grad_norm = 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, ["verify", *args])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--world-size", "2"], "give only --device, --quick or --json"),
        (["config.py", "--world-size", "2"], "give either --model or --script"),
        (["config.py", "--world-size", "2", "--model", "a:b", "--script", "t.py"], "give either --model or --script"),
        (["config.py", "--model", "a:b"], "give --world-size"),
        (["config.py", "--model", "a:b", "--world-size", "2", "--quick"], "--quick works only without a config"),
        (["config.py", "--model", "a:b", "--world-size", "2", "--", "--lr"], "--lr: only a --script takes arguments"),
        (["config.py", "--script", "t.py", "--world-size", "2", "--optimizer", "a:b"], "a script builds its own"),
        (["config.py", "--model", "a:b", "--world-size", "2", "--device", "tpu"], "--device tpu: use cpu or cuda"),
        (["config.py", "--model", "a:b", "--world-size", "2", "--updates", "0"], "greater than or equal to 1"),
    ],
)
def test_usage(run, args, words):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_equal(run):
    args = "config.py --model verified_models:several --world-size 2 --optimizer verified_models:adam"
    result = run(*args.split())
    assert result.exit_code == 0, result.output
    first, structure, form = result.stdout.splitlines()
    assert first == "equal: pp 1 x dp 2 x tp 1 (2 ranks) compared with one process"
    assert structure.startswith("  - structure, float64: equal (")
    assert form.startswith("  - format, float32: equal (")
    assert "the config\n" in result.stderr
    assert "2 ranks" in result.stderr  # what begins


def test_a_difference_in_words_and_as_json(run):
    args = ["config.py", "--model", "verified_models:mixing", "--world-size", "4", "--updates", "1"]
    result = run(*args, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert list(answer) == ["equal", "first", "phases", "layout", "world_size", "shrunk_from", "problems"]
    assert (answer["equal"], answer["world_size"], answer["shrunk_from"]) == (False, 2, 4)
    assert answer["first"] == answer["phases"][0]["first"]
    assert [answer["first"][name] for name in ("step", "what", "module")] == [0, "output", ""]
    assert answer["first"]["difference"] > 0.01 > answer["first"]["allowed"]
    words = run(*args, "--no-shrink", "--set", "parallel.data.size=4").stdout
    assert words.startswith("differs: pp 1 x dp 4 x tp 1 (4 ranks) compared with one process\n")
    assert "first difference: update 0, " in words


def test_a_rejected_config_and_one_with_mistakes(run):
    result = run("config.py", "--model", "a:b", "--world-size", "2", "--set", "parallel.tensor=3", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["equal"], answer["first"], answer["phases"]) == (False, None, [])
    assert "tensor" in answer["problems"][0]
    result = run("config.py", "--model", "a:b", "--world-size", "2", "--set", "clip=3", "--set", "seed=-1")
    assert result.exit_code == 1
    first, *problems = result.stdout.splitlines()
    assert first == "rejected: config.py (2 ranks) compared with one process"
    assert [line.split(":")[0] for line in problems] == ["  - clip", "  - seed"]


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_without_a_config_this_machine_is_verified(run, monkeypatch, equal, status):
    from halfmesh.verify import machine

    def verify_machine(device, quick):
        print("noise")
        return machine.MachineReport({"device": f"{device}, quick {quick}"}, [(None, Answer(equal), 0.0)])

    class Answer:
        def __init__(self, equal):
            self.equal = equal

    monkeypatch.setattr(machine, "verify_machine", verify_machine)
    monkeypatch.setattr(machine.MachineReport, "__str__", lambda self: f"{self.about['device']}: {self.equal}")
    result = run("--quick", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (status, f"cpu, quick True: {equal}\n")
