"""halfmesh run: torchrun, after a check."""

import runpy
import signal
import sys

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args
from typer.testing import CliRunner

from halfmesh.cli import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command; gives its result, and what torchrun is given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.py").write_text("parallel = dict(tensor=2)\n")
    (tmp_path / "wrong.py").write_text("gradient_acumulation = 2\n")
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.extend)
    return lambda *arguments: (CliRunner().invoke(app, ["run", *arguments]), started)


@pytest.mark.parametrize(
    ("options", "understood"),
    [
        ([], {"standalone": True, "nnodes": "1", "max_restarts": 0}),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "a:29500", "--max-restarts", "3"],
            {"standalone": False, "nnodes": "2", "max_restarts": 3, "rdzv_endpoint": "a:29500", "rdzv_backend": "c10d"},
        ),
    ],
    ids=["one machine", "two"],
)
def test_torchrun_understands_its_options(run, options, understood):
    result, started = run("--nproc", "2", *options, "train.py", "--config", "config.py", "--nproc", "7")
    assert result.exit_code == 0, result.output
    found = vars(parse_args(started))
    assert (found["training_script"], found["nproc_per_node"]) == ("train.py", "2")
    assert found["training_script_args"] == ["--config", "config.py", "--nproc", "7"]
    assert {name: found[name] for name in understood} == understood


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "3", "train.py", "--config", "config.py"], "config.py: cannot run on 3 ranks"),
        (["--nproc", "2", "train.py", "--config=wrong.py"], "gradient_acumulation: unknown key; did you mean"),
        (["--nproc", "2", "missing.py"], "missing.py: there is no such file"),
        (["--nproc", "2", "--nnodes", "2", "train.py"], "--nnodes needs --rdzv-endpoint host:port"),
        (["--nproc", "2", "train.py", "--set", "parallel.tensor=3"], "--set parallel.tensor=3 changes the config that"),
        (["--set", "parallel.tensor=3", "train.py"], "--set belongs after the script: halfmesh run --nproc N train.py"),
        (["--config=config.py", "train.py"], "--config belongs after the script"),
        (["--nprok", "2", "train.py"], "--nprok: halfmesh run has no such option; did you mean '--nproc'?"),
    ],
)
def test_nothing_is_started(run, arguments, words):
    result, started = run(*arguments)
    assert result.exit_code in (1, 2)
    assert started == []
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (SignalException("Process 1 got signal: 2", signal.SIGINT), 130, ""),
        (SignalException("Process 1 got signal: 15", signal.SIGTERM), 143, ""),
        (
            ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "none")}),
            1,
            "rank 0 failed with status 1, the first of 1 rank",
        ),
    ],
)
def test_torchruns_end_is_a_status_without_a_traceback(run, monkeypatch, end, status, words):
    def main(_):
        raise end

    monkeypatch.setattr("torch.distributed.run.main", main)
    result, _ = run("--nproc", "2", "train.py")
    assert (result.exit_code, words in result.stderr) == (status, True)
    assert "Traceback" not in result.stderr


READS_OPTIONS = (
    "args = halfmesh.get_default_parser().parse_args(); c = halfmesh.load_config(args.config, args.overrides)"
)
INITIALIZE = "halfmesh.initialize(m, torch.optim.SGD(m.parameters(), 0.1), config="


@pytest.mark.parametrize(
    ("options", "source", "warning"),
    [
        (["other.py"], "'own.py'", "checked other.py, but this script trains with own.py (they differ in: seed);"),
        (["other.py"], "None", "checked other.py, but this script trains with no config (they differ in: seed);"),
        (["own.py", "--set", "seed=3"], "'own.py'", "checked own.py --set seed=3, but this script trains with own.py"),
        (["own.py"], "'own.py'", ""),
        (["other.py", "--set", "seed=3", "--set", "EPOCHS=2"], "c", ""),
        (["own.py"], f"'own.py').close(); {INITIALIZE}None", ""),  # a second engine may have another
        (["own.py"], "halfmesh.launch_from_torch('other.py', verbose=False)", "this script trains with other.py"),
    ],
)
def test_a_script_that_trains_with_another_config_than_the_checked_one(
    run, monkeypatch, caplog, options, source, warning
):
    lines = ["import halfmesh, torch", READS_OPTIONS, "m = torch.nn.Linear(2, 2)"]
    lines += [f"{INITIALIZE}{source}).close()"]
    for name, content in {"train.py": lines, "own.py": ["seed = 1"], "other.py": ["seed = 2"]}.items():
        with open(name, "w") as file:
            file.write("\n".join(content))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", *options])
    monkeypatch.setattr("halfmesh.engine.launch._launched", [])
    monkeypatch.setattr("torch.distributed.run.main", lambda _: runpy.run_path("train.py", run_name="__main__"))
    result, _ = run("train.py", "--config", *options)
    assert result.exit_code == 0, result.output
    warned = [record.getMessage() for record in caplog.records if "halfmesh run" in record.getMessage()]
    assert (len(warned), warning in "".join(warned)) == (bool(warning), True)
