"""halfmesh run: torchrun, after a check; halfmesh verify: what it prints, and its exit status."""

import json
import runpy
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from tests.cli import run as halfmesh


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.py").write_text("parallel = dict(tensor=2)\n")
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.extend)
    return lambda *arguments: (halfmesh("run", *arguments), started)


def test_torchrun_understands_its_options(run):
    options = ["--nnodes", "2", "--rdzv-endpoint", "a:29500", "--max-restarts", "3", "train.py"]
    result, started = run("--nproc", "2", *options, "--config", "config.py", "--nproc", "7")
    assert result.exit_code == 0, result.output
    found, several = vars(parse_args(started)), ["2", 3, "a:29500", "c10d"]
    assert (found["training_script"], found["nproc_per_node"], found["standalone"]) == ("train.py", "2", False)
    assert found["training_script_args"] == ["--config", "config.py", "--nproc", "7"]
    assert [found[name] for name in ("nnodes", "max_restarts", "rdzv_endpoint", "rdzv_backend")] == several
    started.clear()
    run("train.py")
    assert parse_args(started).standalone


KILLED = SignalException("Process 1 got signal: 15", signal.SIGTERM)
FAILED = ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "none")})


@pytest.mark.parametrize(
    ("end", "status", "said"), [(KILLED, 143, ""), (FAILED, 1, "rank 0 failed with status 1, the first")]
)
def test_torchruns_end_is_a_status_without_a_traceback(run, monkeypatch, end, status, said):
    def main(_):
        raise end

    monkeypatch.setattr("torch.distributed.run.main", main)
    result, _ = run("--nproc", "2", "train.py")
    assert (result.exit_code, said in result.stderr, "Traceback" in result.stderr) == (status, True, False)


@pytest.mark.parametrize(
    ("options", "source", "warning"),
    [
        (["other.py"], "None", "checked other.py, but this script trains with no config (they differ in: seed);"),
        (["own.py"], "'own.py'", ""),
        (["other.py", "--set", "seed=3", "--set", "EPOCHS=2"], "c", ""),
        ([], "'own.py'", ""),  # the variable holds no JSON
    ],
)
def test_a_script_that_trains_with_another_config_is_told(run, monkeypatch, caplog, options, source, warning):
    read = "args = halfmesh.get_default_parser().parse_args(); c = args.config and halfmesh.load_config(args.config, "
    lines = ["import halfmesh, torch", f"{read}args.overrides)", "m = torch.nn.Linear(2, 2)"]
    lines += [f"halfmesh.initialize(m, torch.optim.SGD(m.parameters(), 0.1), config={source}).close()"]
    for name, content in {"train.py": lines, "own.py": ["seed = 1"], "other.py": ["seed = 2"]}.items():
        Path(name).write_text("\n".join(content))
    options = ["--config", *options] if options else []
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    monkeypatch.setattr("halfmesh.engine.launch._launched", [])
    monkeypatch.setattr("torch.distributed.run.main", lambda _: runpy.run_path("train.py", run_name="__main__"))
    result, _ = run("train.py", *options)
    assert result.exit_code == 0, result.output
    warned = [record.getMessage() for record in caplog.records if "halfmesh run" in record.getMessage()]
    assert (len(warned), warning in "".join(warned)) == (bool(warning), True)


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
def verify(tmp_path, monkeypatch):
    (tmp_path / "verified_models.py").write_text(MODELS)
    (tmp_path / "config.py").write_text("print('the config')\nclip_grad_norm = 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda *args: halfmesh("verify", *args)


GIVEN = "config.py", "--world-size"


def test_equal(verify):
    result = verify(*GIVEN, "2", "--model", "verified_models:build", "--optimizer", "verified_models:adam")
    assert result.exit_code == 0, result.output
    first, structure, form = result.stdout.splitlines()
    assert first == "equal: pp 1 x dp 2 x tp 1 (2 ranks) compared with one process"
    assert structure.startswith("  - structure, float64: equal (")
    assert form.startswith("  - format, float32: equal (")
    assert "the config\n" in result.stderr


def test_a_difference_as_json_and_in_words(verify):
    args = [*GIVEN, "4", "--model", "verified_models:mixing", "--updates", "1"]
    result = verify(*args, "--json")
    answer = json.loads(result.stdout)
    assert list(answer) == ["equal", "first", "phases", "layout", "world_size", "shrunk_from", "problems"]
    assert [result.exit_code, *map(answer.get, ("equal", "world_size", "shrunk_from"))] == [1, False, 2, 4]
    assert [answer["first"][name] for name in ("step", "what", "module")] == [0, "output", ""]
    shown = verify(*args, "--no-shrink", "--set", "parallel.data.size=4").stdout
    assert shown.startswith("differs: pp 1 x dp 4 x tp 1 (4 ranks) compared with one process\n")


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_without_a_config_this_machine_is_verified(verify, monkeypatch, equal, status):
    class Report:
        def __init__(self, *asked):
            print("noise")
            self.equal, self.text = equal, str(asked)

        def __str__(self):
            return self.text

    monkeypatch.setattr("halfmesh.verify.machine.verify_machine", Report)
    result = verify("--quick", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (status, "('cpu', True)\n")
