"""What all commands share: help, files that cannot be read, rejections; and init, configs, env and convert-config."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app
from tests.cli import run, words
from tests.support.llama import SMALL

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {command.name or command.callback.__name__: command for command in app.registered_commands}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("ranks", "answers", "expected"),
    [
        (1, ["", "", "", "", ""], {"bf16": "torch", "clip_grad_norm": 1.0, "resume": "auto"}),
        (8, ["fp16", "naive", "pipeline", "2", "4", "0", "none"], {"fp16": "naive", "gradient_accumulation": 4}),
    ],
)
def test_init_writes_a_config_that_can_run(folder, ranks, answers, expected):
    result = CliRunner().invoke(app, ["init", "mine.py"], input="\n".join([str(ranks), *answers, ""]))
    assert result.exit_code == 0, result.output
    assert f"halfmesh check mine.py --world-size {ranks}" in result.output
    config = halfmesh.load_config("mine.py")
    assert halfmesh.compat.check(config, ranks) == []
    written = config.to_dict()
    for key, value in expected.items():
        assert written[key] in (value, {"max_norm": value}, {"mode": value})


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("4\nfp32\ntensor\n3\n\n\n\n", "tensor=3 x pipeline=1 = 3"),
        ("4\n\n", "the input ended before the last answer, so config.py is not written"),
    ],
)
def test_init_writes_nothing_that_cannot_run(folder, answers, said):
    result = CliRunner().invoke(app, ["init"], input=answers)
    assert (result.exit_code, said in words(result.output)) == (2, True), result.output
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_listed_its_example_is_understood_and_its_help_is_for_people(name, monkeypatch):
    """No Python types, and no option or example is broken at a hyphen."""
    monkeypatch.setenv("COLUMNS", "80")
    assert re.search(rf"^  {name} +\w", run("--help").stdout, re.MULTILINE)
    text = run(name, "-h").stdout
    assert text.startswith(f"Usage: root {name}")
    assert re.search(r"<[a-z]|[{}]|-$", text, re.MULTILINE) is None
    example = re.search(r"Example: halfmesh (.*)", COMMANDS[name].epilog, re.DOTALL)[1]
    given, *arguments = shlex.split(example.replace("\\\n", " ").partition(" > ")[0])
    assert given == name
    typer.main.get_command(app).commands[name].make_context(name, arguments, resilient_parsing=False)


def test_the_package_runs_as_a_module_and_its_help_needs_no_torch():
    run_module = "sys.argv = ['halfmesh', '--help']; runpy.run_module('halfmesh', run_name='__main__')"
    code = f"import sys, runpy\ntry: {run_module}\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "precision and parallel layout from one config" in done.stdout) == (0, True), done.stderr
    assert run("-V").stdout == f"halfmesh {halfmesh.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "check {} --world-size 1",
        "plan {} --world-size 1 --gpu-memory 1GB --model a:b",
        "run train.py --config {}",
        "verify {} --world-size 2 --model a:b",
        "convert-config {} --from colossal",
        "report {}",
    ],
)
def test_a_file_that_cannot_be_read_is_a_mistake_in_the_command_line(command, folder):
    (folder / "train.py").touch()
    (folder / "no.yaml").write_text("a: [")
    (folder / "no.py").write_text("seed = = 3")
    (folder / "d").mkdir()
    for name in ("none.py", "no.yaml", "no.py", "d"):
        result = run(*command.format(name).split())
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert name in result.stderr


CONVERTED = """
from halfmesh import AMP_TYPE
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
NUM_MICRO_BATCHES = 4
gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]
"""
FROZEN = "def build():\n    m, i, c = llama.small()\n    return m.requires_grad_(False), i, c\n"
FILES = {
    "empty.py": "",
    "train.py": "",
    "tensor.py": "parallel = dict(tensor=2)\n",
    "wrong.py": "gradient_acumulation = 2\n",
    "colossal.py": CONVERTED,
    "old.py": "from colossalai.amp import AMP_TYPE\n",
    "frozen_llama.py": f"from tests.support import llama\n{FROZEN}",
}
CHECK, PLAN, OUT = "check empty.py --world-size", "plan --world-size 1 --model", "--gpu-memory 1GB --out /none"
RUN, VERIFY = "run --nproc 2", "verify empty.py --world-size 2"
REJECTED = [
    (f"{CHECK} 0", 1, "world_size: 0 is not a number of ranks"),
    (f"{CHECK} 1 --gpu-memory 80GB", 2, "--picture need --model"),
    (f"{CHECK} 1 --model {SMALL} --gpu-memory 80GBB", 2, "'80GBB' is not an amount of memory"),
    (f"{CHECK} 3 --model {SMALL} --set parallel.tensor=3", 1, "8 heads are not divisible by tensor=3"),
    (f"{CHECK} 2 --model {SMALL} --gpu-memory 7MiB", 1, "can run on 2 ranks, but does not fit mode none"),
    (f"{CHECK} 2 --model {SMALL} --gpu-memory 7MiB", 1, "does not fit: rank 0 needs 7.6 MiB of 7.0 MiB, "),
    (f"{PLAN} {SMALL} --gpu-memory 80", 2, "'80' is 80 bytes; did you mean 80GB?"),
    (f"{PLAN} {SMALL} {OUT}/config.py", 2, "there is no directory /none"),
    (f"{PLAN} {SMALL} {OUT}/fits.txt", 2, "--out /none/fits.txt: give a name that ends in .py"),
    (f"{PLAN} {SMALL} --gpu-memory 1GB --set clip_grad_nrm=1", 1, "cannot run on 1 rank config problems: - clip_"),
    (f"{PLAN} {SMALL} --gpu-memory 1GB --set parallel.tensor=2", 1, "= 2 ranks, but there is 1; start them with"),
    (f"{PLAN} frozen_llama:build --gpu-memory 1GB", 1, "frozen_llama:build cannot be simulated with the config as it"),
    (f"{PLAN} tests.support.llama:smal --gpu-memory 1GB", 1, "llama.smal does not exist; did you mean 'small'?"),
    ("run --nproc 3 train.py --config tensor.py", 1, "tensor.py: cannot run on 3 ranks"),
    (f"{RUN} train.py --config=wrong.py", 1, "gradient_acumulation: unknown key; did you mean"),
    (f"{RUN} --nnodes 2 train.py", 2, "--nnodes needs --rdzv-endpoint host:port"),
    (f"{RUN} train.py --set parallel.tensor=3", 2, "--set parallel.tensor=3 changes the config that"),
    ("run --set a=3 train.py", 2, "--set belongs after the script: halfmesh run --nproc N train.py --set"),
    ("verify --world-size 2", 2, "give only --device, --quick or --json"),
    (VERIFY, 2, "give either --model or --script"),
    ("verify empty.py --model a:b", 2, "give --world-size"),
    (f"{VERIFY} --model a:b --quick", 2, "--quick works only without a config"),
    (f"{VERIFY} --script t.py --optimizer a:b", 2, "a script builds its own"),
    ("convert-config colossal.py --from colossal --world-size 6", 1, "# cannot run on 6 ranks: "),
    ("convert-config 'opt_level=O2 opt_levl=1' --from apex", 1, "# cannot run: fp16.opt_levl: unknown key; did you"),
    ("convert-config 'mixed_precision=fp16 mixed=1' --from accelerate", 1, "# not understood: mixed = 1: not a known"),
    (f"convert-config 'opt_level=O2 {'x' * 300}=1' --from apex", 1, "unknown key"),
    ("convert-config old.py --from colossal", 2, "from halfmesh import AMP_TYPE"),
    ("convert-config nothing.py --from colosal", 2, "did you mean 'colossal'?"),
    ("convert-config train.py --from apex", 2, "scripts are not executed; give the arguments"),
    ("convert-config {1 --from apex", 2, "neither JSON nor a Python dict"),
]


@pytest.mark.parametrize(("command", "status", "said"), REJECTED, ids=[command for command, *_ in REJECTED])
def test_what_is_rejected(command, status, said, folder, monkeypatch):
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("torch.distributed.run.main", lambda _: pytest.fail("it was started"))
    result = run(*shlex.split(command))
    assert (result.exit_code, said in words(result.output)) == (status, True), result.output
    assert status == 1 or result.stdout == "", "it says what is wrong with the command itself"


def test_configs_are_listed_and_printed_as_one_file(tmp_path):
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
    assert [line.split()[0] for line in run("configs").stdout.splitlines()] == names
    for name in names:
        (tmp_path / "config.py").write_text(run("configs", name).stdout)
        expected = halfmesh.load_config(ROOT / "configs" / f"{name}.py")
        assert halfmesh.load_config(tmp_path / "config.py") == expected
    wrong = run("configs", "naive_fp61")
    assert wrong.exit_code == 2
    assert "there is no config 'naive_fp61'; did you mean 'naive_fp16'?" in words(wrong.stderr)
    listed = json.loads(run("configs", "--json").stdout)["configs"]
    assert json.loads(run("configs", "tensor", "--json").stdout)["about"] == listed["tensor"]


def test_env_has_what_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip3", "numpy==2"))  # it takes long
    text = run("env").stdout
    for said in (f"halfmesh: {halfmesh.__version__}", "gloo", "pydantic 2", "NCCL_DEBUG INFO", torch.__version__):
        assert said in text
    assert "hidden" not in text
    answer = json.loads(run("env", "--json").stdout)
    assert (answer["halfmesh"], answer["torch"]["torch_version"]) == (halfmesh.__version__, torch.__version__)


KEYS = (
    "6 keys: 5 converted, 1 without equivalent; the comments above the config say what to do "
    "(--verbose lists all keys)\n"
)


def convert(source, origin, *options):
    return run("convert-config", source, "--from", origin, *options)


def test_what_is_printed_and_its_json(folder):
    (folder / "colossal.py").write_text(CONVERTED)
    printed = convert("colossal.py", "colossal")
    assert (printed.exit_code, printed.stderr) == (0, KEYS)
    assert printed.stdout.count("keep your loop as it is") == 1
    (folder / "config.py").write_text(printed.stdout)
    assert halfmesh.load_config("config.py").parallel.pipeline.microbatches == 4
    assert "# without equivalent: 1\n#   gradient_handler = " in convert("colossal.py", "colossal", "--verbose").stdout
    answer = json.loads(convert("colossal.py", "colossal", "--world-size", "8", "--json").stdout)
    assert (answer["ok"], answer["library"], answer["problems"]) == (True, "Colossal-AI", [])
    assert halfmesh.load_config(answer["config"]) == halfmesh.load_config("config.py")
    rejected = convert("mixed_precision=fp8 mixed=1 use_cpu=true", "accelerate", "--json")
    assert (rejected.exit_code, rejected.stderr) == (1, "")
    answer = json.loads(rejected.stdout)
    assert answer["ok"] is False
    assert [row["kind"] for row in answer["keys"]] == ["lost", "not understood", "by hand"]


@pytest.mark.parametrize(
    ("text", "origin", "lost"),
    [
        ({"mixed_precision": "fp8"}, "accelerate", "mixed_precision"),
        ({"distributed_type": "MEGATRON_LM"}, "accelerate", "distributed_type"),
        ({"fsdp_plugin": "plugin"}, "accelerate", "fsdp_plugin"),
        ({"deepspeed_config": {"deepspeed_config_file": "ds.json"}}, "accelerate", "deepspeed_config_file"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "deepspeed", "mics_shard_size"),
        ({"parallel": {"sequence": {"size": 2}}}, "colossal", "sequence.size"),
        ({"hybrid_shard_degree": 0}, "sagemaker", "hybrid_shard_degree"),
        ({"distributed_type": "FSDP", "deepspeed_config": {"deepspeed_config_file": "x"}}, "accelerate", ""),
    ],
)
def test_a_lost_precision_or_sharding_is_no_success(text, origin, lost):
    printed = convert(repr(text), origin)
    found = "".join(re.findall(r"^# lost: (\S+) = ", printed.stdout, re.MULTILINE))
    assert (found.endswith(lost) if lost else found == "", printed.exit_code) == (True, 1 if lost else 0)


def test_what_is_to_be_done_by_hand_is_said():
    for text, origin, said in (
        ("gradient_accumulation_steps=4", "accelerate", "delete the `if (i + 1) % N == 0` around the step"),
        ("fp16.enabled=true", "deepspeed", "# check: clip_grad_norm = 1.0 is the default of DeepSpeed"),
    ):
        result = convert(text, origin)
        assert (result.exit_code, said in words(result.stdout)) == (0, True), result.output
