"""halfmesh check: what it prints, with and without a model, and its exit status."""

import json

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from tests.support.llama import SMALL


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
    assert lines[0].endswith("config.py: can run on 4 ranks")
    assert lines[1:] == [
        "  mode naive, float16",
        "  mesh pp 1 x dp 4 x tp 1, data strategy replicate",
        "  gradient_accumulation 4, clip_grad_norm 1.0",
    ]
    apex = run("fp16 = dict(mode='apex', opt_level='O0')\n", "--world-size", "1")
    assert apex.stdout.splitlines()[1] == "  mode apex O0, float32"


def test_a_strategy_that_shards_nothing_over_one_data_rank(run):
    said = "  advice: parallel.data.strategy: 'zero1' has nothing to shard over one data rank"
    for parallel, ranks in (("data='zero1'", "1"), ("data='zero1', tensor=2", "2")):
        *_, mesh, _, advice = run(f"parallel = dict({parallel})\n", "--world-size", ranks).stdout.splitlines()
        assert mesh.endswith("data strategy replicate")
        assert advice.startswith(said)
    *_, mesh, _ = run("parallel = dict(data='fsdp')\n", "--world-size", "1").stdout.splitlines()
    assert mesh.endswith("data strategy fsdp")


def test_ranks_of_experts_are_said_as_what_they_are(run):
    config = "parallel = dict(expert=2)\n"
    *_, mesh, _ = run(config, "--world-size", "4").stdout.splitlines()
    assert mesh == "  mesh pp 1 x dp 4 (edp 2 x ep 2) x tp 1, data strategy replicate"
    answer = json.loads(run(config, "--world-size", "4", "--json").stdout)
    assert answer["plan"]["views"] == {"dp": {"edp": 2, "ep": 2}}


def test_json(run):
    result = run("print('noise')\n", "--world-size", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["problems"], answer["findings"]) == (True, [], [])
    assert answer["plan"]["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert "noise" in result.stderr
    rejected = run("resume: auto\n", "--world-size", "1", "--json", name="config.yaml")
    assert rejected.exit_code == 1
    answer = json.loads(rejected.stdout)
    assert (answer["ok"], answer["plan"]) == (False, None)
    assert [(row["kind"], row["where"]) for row in answer["findings"]] == [("rejected", "resume")]


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ("fp16 = dict(mode='apex', opt_levle='O2')\nlr = 3", ["config problems", "  - lr", "  - fp16.opt_levle"]),
        (
            "fp16 = dict(mode='apex')\nparallel = dict(tensor=3)",
            ["rejected", "  - parallel", "  - device", "  - apex fp16 x tensor"],
        ),
    ],
)
def test_all_problems_at_once(run, config, lines):
    result = run(config, "--world-size", "8", "--device", "mps", "--model", SMALL)
    assert result.exit_code == 1
    found = result.stdout.splitlines()
    assert found[0].endswith("config.py: cannot run on 8 ranks")
    assert [line.split(":")[0] for line in found[1:]] == lines


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--world-size", "0"], 1, "world_size: 0 is not a number of ranks"),
        ([], 2, "--world-size"),
        (["--world-size", "1", "--gpu-memory", "80GB"], 2, "--picture need --model"),
        (["--world-size", "1", "--model", SMALL, "--picture", "/none/mesh.png"], 2, "give a name that ends in .svg"),
        (["--world-size", "1", "--model", SMALL, "--gpu-memory", "80"], 2, "'80' is 80 bytes; did you mean 80GB?"),
        (["--world-size", "1", "--model", SMALL, "--picture", "/proc/a.svg"], 2, "a.svg: it cannot be written (No"),
        (["--world-size", "1", "--model", SMALL, "--gpu-memory", "80GBB"], 2, "'80GBB' is not an amount of memory"),
    ],
)
def test_what_is_rejected(run, args, status, words):
    result = run("", *args)
    assert result.exit_code == status
    assert words in " ".join(result.output.replace("│", "").split())


def test_a_config_that_cannot_be_read_is_said_as_it_is(run, tmp_path):
    result = run("seed = = 3\n", "--world-size", "1")
    assert result.exit_code == 2
    assert f": cannot read {tmp_path}/config.py: {tmp_path}/config.py:1: SyntaxError: invalid syntax" in result.stderr
    result = run("fp16: {mode: naive\nseed: 3\n", "--world-size", "1", name="config.yaml")
    assert f": cannot read {tmp_path}/config.yaml: not valid YAML: line 2, column 5: " in result.stderr
    result = run("fp16 = '[red]:art:" + "x" * 200 + "'\n", "--world-size", "1")
    assert "'[red]:art:" + "x" * 200 + "' is not a dict" in result.stdout, "not wrapped, and neither markup nor emoji"


# --- with a model --------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_divide(run):
    result = run("parallel = dict(tensor=3)", "--world-size", "3", "--model", SMALL)
    assert result.exit_code == 1
    assert "problems with the model:\n  - " in result.stdout
    assert "8 heads are not divisible by tensor=3" in result.stdout


def test_what_a_model_needs(run):
    config = "bf16 = dict(mode='naive')\nparallel = dict(tensor=2)\n"
    result = run(config, "--world-size", "8", "--model", SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("config.py: can run on 8 ranks")
    assert lines[4] == "  one update with AdamW, batches of 8 rows per data rank, without allocating memory"
    titles = [line[2:].split("  ")[0] for line in lines[5:]]
    assert titles[:17] == [
        "bytes, each part at its largest", "parameters", "masters", "optimizer", "gradients", "communication",
        "activations", "temporary", "between two updates", "peak", "sent over dp", "sent over tp",
        "note: NCCL's buffers take another 300.0 MiB to 2.1 GiB, for 3 communicators (world, tp, dp)",
    ]  # fmt: skip


def test_too_little_memory(run):
    result = run("", "--world-size", "2", "--model", SMALL, "--gpu-memory", "7MiB")
    assert result.exit_code == 1
    assert "can run on 2 ranks, but does not fit" in result.stdout
    assert "  does not fit: rank 0 needs 7.6 MiB of 7.0 MiB, " in result.stdout
    result = run("", "--world-size", "2", "--model", SMALL, "--gpu-memory", "7MB")
    assert "  does not fit: rank 0 needs 7.6 MiB of 6.7 MiB (7 MB), " in result.stdout
    assert "too much. halfmesh plan finds the simplest change that fits" in result.stdout


def test_the_picture_and_the_json_of_a_dry_run(run, tmp_path):
    picture = tmp_path / "mesh.svg"
    args = ("--world-size", "2", "--model", SMALL, "--gpu-memory", "1KB", "--json", "--picture", picture)
    result = run("", *args)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["dry_run"]["fits"], answer["dry_run"]["limit"]) == (False, False, 1000)
    assert answer["dry_run"]["batch_rows"] == 8
    rank = answer["dry_run"]["ranks"][0]
    assert rank["bytes"]["parameters"] >= rank["parameters"] * 4
    assert rank["peak"] > rank["kept"]
    assert "rank 1" in picture.read_text()
    again = run("", *args)
    assert again.exit_code == 2
    assert "the file exists; --force replaces it" in " ".join(again.stderr.split())
