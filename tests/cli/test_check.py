"""halfmesh check: what it prints, with and without a model, and its exit status."""

import json

import pytest

from tests.cli import run as halfmesh
from tests.cli import words
from tests.support.llama import SMALL


@pytest.fixture
def run(tmp_path):
    def invoke(text, *args, name="config.py"):
        (tmp_path / name).write_text(text)
        return halfmesh("check", tmp_path / name, "--world-size", *args)

    return invoke


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (
            "fp16 = dict(mode='naive')\nclip_grad_norm = 1.0\ngradient_accumulation = 4\n",
            4,
            "mode naive, float16 mesh pp 1 x dp 4 x tp 1, data strategy replicate gradient_accumulation 4, clip_grad",
        ),
        ("fp16 = dict(mode='apex', opt_level='O0')\n", 1, "mode apex O0, float32"),
        ("parallel = dict(data='zero1')\n", 1, "x tp 1, data strategy replicate"),
        ("parallel = dict(data='zero1')\n", 1, "advice: parallel.data.strategy: 'zero1' has nothing to shard over one"),
        ("parallel = dict(data='fsdp')\n", 1, "x tp 1, data strategy fsdp"),
        ("parallel = dict(expert=2)\n", 4, "mesh pp 1 x dp 4 (edp 2 x ep 2) x tp 1"),
    ],
)
def test_a_config_that_can_run(run, config, ranks, said):
    result = run(config, ranks)
    assert (result.exit_code, f"config.py: can run on {ranks} rank" in result.stdout) == (0, True)
    assert said in words(result.stdout)


def test_json(run):
    result = run("print('noise')\n", 2, "--device", "cpu", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"], answer["problems"], answer["findings"]) == (0, True, [], [])
    assert answer["plan"]["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert "noise" in result.stderr
    answer = json.loads(run("resume: auto\n", 1, "--json", name="config.yaml").stdout)
    assert (answer["ok"], answer["plan"]) == (False, None)
    assert [(row["kind"], row["where"]) for row in answer["findings"]] == [("rejected", "resume")]


def test_all_problems_at_once(run):
    for config, expected in (
        ("fp16 = dict(mode='apex', opt_levle='O2')\nlr = 3", ["config problems", "  - lr", "  - fp16.opt_levle"]),
        ("fp16 = dict(mode='apex')\nresume = 'auto'", ["rejected", "  - device", "  - resume"]),
    ):
        first, *lines = run(config, 8, "--device", "mps", "--model", SMALL).stdout.splitlines()
        assert first.endswith("config.py: cannot run on 8 ranks")
        assert [line.split(":")[0] for line in lines] == expected


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["0"], 1, "world_size: 0 is not a number of ranks"),
        (["1", "--gpu-memory", "80GB"], 2, "--picture need --model"),
        (["1", "--model", SMALL, "--gpu-memory", "80GBB"], 2, "'80GBB' is not an amount of memory"),
        (["3", "--model", SMALL, "--set", "parallel.tensor=3"], 1, "8 heads are not divisible by tensor=3"),
        (["2", "--model", SMALL, "--gpu-memory", "7MiB"], 1, "can run on 2 ranks, but does not fit"),
        (["2", "--model", SMALL, "--gpu-memory", "7MiB"], 1, "does not fit: rank 0 needs 7.6 MiB of 7.0 MiB, "),
    ],
)
def test_what_is_rejected(run, args, status, said):
    result = run("", *args)
    assert (result.exit_code, said in words(result.output)) == (status, True), result.output


def test_what_a_model_needs(run):
    result = run("bf16 = dict(mode='naive')\nparallel = dict(tensor=2)\n", 8, "--model", SMALL)
    lines = result.stdout.splitlines()
    assert lines[4] == "  one update with AdamW, batches of 8 rows per data rank, without allocating memory"
    assert [line[2:].split("  ")[0] for line in lines[5:]][:13] == [
        "bytes, each part at its largest", "parameters", "masters", "optimizer", "gradients", "communication",
        "activations", "temporary", "between two updates", "peak", "sent over dp", "sent over tp",
        "note: NCCL's buffers take another 300.0 MiB to 2.1 GiB, for 3 communicators (world, tp, dp)",
    ]  # fmt: skip


def test_the_picture_and_the_json_of_a_dry_run(run, tmp_path):
    args = (2, "--model", SMALL, "--gpu-memory", "1KB", "--json", "--picture", tmp_path / "mesh.svg")
    result = run("", *args)
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert [answer["dry_run"][key] for key in ("fits", "limit", "batch_rows")] == [False, 1000, 8]
    assert "rank 1" in (tmp_path / "mesh.svg").read_text()
