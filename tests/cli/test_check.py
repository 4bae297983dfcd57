"""halfmesh check: what it prints and its exit status."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app


@pytest.fixture
def run(tmp_path):
    def invoke(text, *args, name="config.py"):
        (tmp_path / name).write_text(text)
        return CliRunner().invoke(app, ["check", str(tmp_path / name), *args])

    return invoke


def test_a_config_that_can_run(run):
    result = run("fp16 = dict(mode='naive')\nclip_grad_norm = 1.0\ngradient_accumulation = 4\n", "--world-size", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].endswith("config.py: can run on 4 rank(s)")
    assert lines[1:] == [
        "  mode naive, float16",
        "  mesh pp 1 x dp 4 x tp 1, data strategy replicate",
        "  gradient_accumulation 4, clip_grad_norm 1.0",
    ]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("opt_level='O0'", "  mode apex O0, float32"),
        ("opt_level='O2'", "  mode apex O2, float16"),
        ("backend='apex'", "  mode apex O1 by NVIDIA's apex, float16"),
        ("enabled=False", "  mode apex disabled, float32"),
    ],
)
def test_the_variant_of_a_mode(run, keys, line):
    assert run(f"fp16 = dict(mode='apex', {keys})\n", "--world-size", "1").stdout.splitlines()[1] == line


def test_json_of_a_config_that_can_run(run):
    result = run("print('noise')\n", "--world-size", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "problems": [],
        "findings": [],
        "plan": {
            "mode": None,
            "dtype": "float32",
            "mesh": {"pp": 1, "dp": 2, "tp": 1},
            "data_strategy": "replicate",
            "gradient_accumulation": 1,
            "clip_grad_norm": None,
        },
    }
    assert "noise" in result.stderr


def test_problems_and_findings_together(run):
    text = "fp16 = dict(mode='apex', opt_levle='O2')\nparallel = dict(tensor=3)\nlr = 3\n"
    result = run(text, "--world-size", "8", "--device", "mps")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].endswith("config.py: cannot run on 8 rank(s)")
    starts = [line.split(":")[0] for line in lines[1:]]
    assert starts == [
        "config problems", "  - lr", "  - fp16.opt_levle",
        "refused", "  - parallel", "  - device", "  - apex fp16 x tensor",
    ]  # fmt: skip


NO_FOLDER = (
    "'auto' goes on from the newest checkpoint of checkpoint.directory, which is not set; set "
    "checkpoint='checkpoints', or give resume a folder"
)


def test_json_of_findings(run):
    result = run("resume: auto\n", "--world-size", "1", "--json", name="config.yaml")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "ok": False,
        "problems": [],
        "findings": [{"kind": "refused", "where": "resume", "message": NO_FOLDER}],
        "plan": None,
    }


ADVICE = "parallel.data.param_dtype: weights are gathered in float32; bf16 = dict(mode='naive')"


def test_advice(run):
    text = "parallel = dict(data='fsdp')\n"
    result = run(text, "--world-size", "2")
    assert result.exit_code == 0
    assert f"  advice: {ADVICE}" in result.stdout
    answer = json.loads(run(text, "--world-size", "2", "--json").stdout)
    assert answer["ok"] is True
    assert [row["kind"] for row in answer["findings"]] == ["advice"]
    assert "advice:" not in run(text, "--world-size", "1").stdout  # where nothing is gathered
    wrong = run(text + "resume = 'auto'\n", "--world-size", "2")
    assert wrong.exit_code == 1
    assert f"advice:\n  - {ADVICE}" in wrong.stdout


def test_unreadable_config(run, tmp_path):
    result = run("seed = = 3\n", "--world-size", "1")
    assert result.exit_code == 1
    assert f"  - {tmp_path}/config.py:1: SyntaxError: invalid syntax" in result.stdout


def test_messages_are_not_wrapped_or_read_as_markup(run):
    result = run("fp16 = '[red]" + "x" * 200 + "'\n", "--world-size", "1")
    assert "'[red]" + "x" * 200 + "' is not a dict" in result.stdout


def test_bad_world_size(run):
    result = run("", "--world-size", "0")
    assert result.exit_code == 1
    assert "world_size: 0 is not a number of ranks" in result.stdout


def test_world_size_is_required(run):
    result = run("")
    assert result.exit_code == 2
    assert "--world-size" in result.output


def test_help_has_an_example():
    result = CliRunner().invoke(app, ["check", "--help"])
    assert "halfmesh check config.py --world-size 8 --device cuda" in result.stdout
    result = CliRunner().invoke(app, ["--help"])
    assert "check" in result.stdout  # a group: the subcommand's name is needed


def test_help_does_not_import_torch():
    code = (
        "import sys, halfmesh.cli\n"
        "try: halfmesh.cli.app(['check', '--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_main_is_the_console_script(monkeypatch, capsys):
    from halfmesh.cli import main

    monkeypatch.setattr(sys, "argv", ["halfmesh", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "any precision mode with any parallel layout" in capsys.readouterr().out
