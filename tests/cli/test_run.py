"""halfmesh run: torchrun, after a check."""

import runpy
import signal
import sys

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from tests.cli import run as halfmesh
from tests.cli import words


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "config.py").write_text("parallel = dict(tensor=2)\n")
    (tmp_path / "wrong.py").write_text("gradient_acumulation = 2\n")
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "3", "train.py", "--config", "config.py"], "config.py: cannot run on 3 ranks"),
        (["--nproc", "2", "train.py", "--config=wrong.py"], "gradient_acumulation: unknown key; did you mean"),
        (["--nproc", "2", "--nnodes", "2", "train.py"], "--nnodes needs --rdzv-endpoint host:port"),
        (["--nproc", "2", "train.py", "--set", "parallel.tensor=3"], "--set parallel.tensor=3 changes the config that"),
        (["--set", "a=3", "train.py"], "--set belongs after the script: halfmesh run --nproc N train.py --set"),
    ],
)
def test_nothing_is_started(run, arguments, said):
    result, started = run(*arguments)
    assert result.exit_code in (1, 2)
    assert started == []
    assert said in words(result.output)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (SignalException("Process 1 got signal: 15", signal.SIGTERM), 143, ""),
        (
            ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "none")}),
            1,
            "rank 0 failed with status 1, the first",
        ),
    ],
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
def test_a_script_that_trains_with_another_config_than_the_checked_one(
    run, monkeypatch, caplog, options, source, warning
):
    read = "args = halfmesh.get_default_parser().parse_args(); c = args.config and halfmesh.load_config(args.config, "
    lines = ["import halfmesh, torch", f"{read}args.overrides)", "m = torch.nn.Linear(2, 2)"]
    lines += [f"halfmesh.initialize(m, torch.optim.SGD(m.parameters(), 0.1), config={source}).close()"]
    for name, content in {"train.py": lines, "own.py": ["seed = 1"], "other.py": ["seed = 2"]}.items():
        with open(name, "w") as file:
            file.write("\n".join(content))
    options = ["--config", *options] if options else []
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    monkeypatch.setattr("halfmesh.engine.launch._launched", [])
    monkeypatch.setattr("torch.distributed.run.main", lambda _: runpy.run_path("train.py", run_name="__main__"))
    result, _ = run("train.py", *options)
    assert result.exit_code == 0, result.output
    warned = [record.getMessage() for record in caplog.records if "halfmesh run" in record.getMessage()]
    assert (len(warned), warning in "".join(warned)) == (bool(warning), True)
