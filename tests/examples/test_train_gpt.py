"""The script that trains a GPT, on one and on several ranks, and the sample that it writes."""

import json
from types import SimpleNamespace

import pytest
import torch
import train_gpt
from gpt import GPT

import halfmesh
from tests.support.example_runs import CONFIGS, run
from tests.support.ranks import run_ranks

# Small enough for a test, and still on the real text. An update sees 32 windows, whatever the number of data ranks.
SMALL = ["--width", 32, "--depth", 2, "--heads", 2, "--context", 32, "--epochs", 3, "--steps", 8, "--sample", 30]
SMALL += ["--dropout", 0]  # to compare layouts, whose random numbers differ


def train(config, folder, *args, batch=32, ranks=None):
    """The metrics of a small run, and what it printed."""
    args = ["--config", CONFIGS / f"{config}.py", *SMALL, "--batch-size", batch, *args]
    done = run("train_gpt.py", *args, ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / f"gpt_{config}" / "metrics.json").read_text()), done.stdout


def losses(metrics):
    return [loss for point in metrics["training"] for loss in point["losses"]]


# --- the script ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process in fp32."""
    return train("fp32", tmp_path_factory.mktemp("reference"))


def test_one_process(reference):
    metrics, shown = reference
    assert len(losses(metrics)) == 24
    assert losses(metrics)[0] == pytest.approx(5.5, abs=0.5)  # log(256), where all bytes are alike
    assert losses(metrics)[-1] < 4.3
    assert [test["update"] for test in metrics["tests"]] == [8, 16, 24]
    assert metrics["tests"][-1]["loss"] == metrics["validation_loss"] < 4.3
    assert metrics["bits_per_byte"] == pytest.approx(metrics["validation_loss"] * 1.4427, rel=1e-4)
    assert shown.startswith("text: 2,000,000 bytes of ")
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("epoch")] == ["1/3", "2/3", "3/3"]
    assert f"a sample:\n{metrics['sample']}\n" in shown
    assert metrics["sample"].startswith("def ")
    assert shown.splitlines()[-1] == (
        f"validation loss {metrics['validation_loss']:.3f}, {metrics['bits_per_byte']:.2f} bits per byte"
    )


@pytest.mark.parametrize("config", ["tensor_fp32", "pipeline_fp32", "interleaved_fp32"])
def test_two_ranks_with_one_model_compute_the_same(config, reference, tmp_path):
    expected, _ = reference
    metrics, _ = train(config, tmp_path, ranks=2)
    assert losses(metrics) == pytest.approx(losses(expected), rel=1e-3)
    assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)


@pytest.mark.parametrize("config", ["zero1_fp32", "fsdp_fp32"])
def test_two_ranks_with_parts_of_the_state_compute_the_same(config, reference, tmp_path):
    expected, _ = reference
    metrics, _ = train(config, tmp_path, batch=16, ranks=2)
    assert losses(metrics) == pytest.approx(losses(expected), rel=1e-3)
    assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)


def test_four_ranks_in_fp16_compute_nearly_the_same(reference, tmp_path):
    expected, _ = reference
    metrics, _ = train("data_tensor_naive_fp16", tmp_path, batch=16, ranks=4)
    assert losses(metrics) == pytest.approx(losses(expected), rel=1e-2)
    assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-2)
    assert metrics["training"][-1]["loss_scale"] >= 2.0**14


def test_eight_ranks_in_three_dimensions_compute_nearly_the_same(reference, tmp_path):
    expected, _ = reference
    metrics, shown = train("data_pipeline_tensor_naive_bf16", tmp_path, "--epochs", 1, batch=16, ranks=8)
    assert losses(metrics) == pytest.approx(losses(expected)[:8], rel=1e-2)
    assert metrics["validation_loss"] == pytest.approx(expected["tests"][0]["loss"], rel=1e-2)
    assert f"a sample:\n{metrics['sample']}\n" in shown


@pytest.mark.parametrize(("config", "batch"), [("data_tensor_torch_bf16", 16), ("pipeline_tensor_torch_bf16", 32)])
def test_dropout_on_four_ranks(config, batch, reference, tmp_path):
    expected, _ = reference
    metrics, _ = train(config, tmp_path, "--dropout", 0.2, batch=batch, ranks=4)
    assert losses(metrics) != pytest.approx(losses(expected), rel=5e-3)
    assert losses(metrics) == pytest.approx(losses(expected), rel=0.1)


def test_missing_text_ends_the_script_with_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--data", str(tmp_path / "nothing"), "--device", "cpu"])
    with pytest.raises(SystemExit, match=f"no file or folder {tmp_path}/nothing"):
        train_gpt.main()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--width", "30", "--heads", "4"], "--width 30 is not divisible by --heads 4"),
        (["--steps", "0"], "argument --steps: 0 is not 1 or more"),
        (["--dropout", "1"], "argument --dropout: 1 is not between 0 and 1"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--prompt", ""], "--prompt not empty"),
    ],
)
def test_arguments_that_cannot_be(args, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_gpt.py", *args])
    with pytest.raises(SystemExit):
        train_gpt.parse_args()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "config", "windows"),
    [
        (1, {}, 40),
        (4, {}, 160),
        (4, {"parallel": {"tensor": 2}}, 80),
        (2, {"parallel": {"tensor": 2}, "gradient_accumulation": 3}, 120),
        (8, {"parallel": {"tensor": 2, "pipeline": 2}}, 80),
    ],
)
def test_windows_per_epoch(ranks, config, windows):
    assert train_gpt.windows_per_epoch(5, halfmesh.load_config({"BATCH_SIZE": 8, **config}), ranks) == windows


def test_next_byte_loss():
    logits = torch.full((2, 3, 256), 0.0)
    targets = torch.randint(256, (2, 3))
    assert train_gpt.next_byte_loss(logits, targets) == pytest.approx(5.5452, abs=1e-4)
    logits.scatter_(2, targets.unsqueeze(2), 100.0)
    assert train_gpt.next_byte_loss(logits, targets) == pytest.approx(0, abs=1e-6)


# --- the sample ---------------------------------------------------------------------------------------------------


class Alphabet:
    """An engine whose model expects the next byte of the alphabet."""

    context = SimpleNamespace(device=torch.device("cpu"))
    config = SimpleNamespace(seed=0)

    def eval(self):
        pass

    def __call__(self, ids):
        assert ids.shape == (1, 4)
        return torch.nn.functional.one_hot(ids + 1, 256) * 1e4


@pytest.mark.parametrize(("prompt", "expected"), [(b"a", b"abcdefg"), (b"tuvwx", b"tuvwxyz{|}~")])
def test_each_byte_follows_those_before_it(prompt, expected):
    assert train_gpt.generate(Alphabet(), prompt, 6, context=4, temperature=1.0) == expected


LAYOUTS = {
    "one process": {},
    "tensor": {"tensor": {"size": 2, "sequence_parallel": True}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2}},
}


def generate_on_rank(rank, world_size, layout):
    """Twice the context, from a prompt, with a model that is divided over all ranks."""
    torch.manual_seed(0)
    model = GPT(context=8, width=16, depth=2, num_heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"seed": 3, "parallel": LAYOUTS[layout]}
    with halfmesh.initialize(model, optimizer, config=config, device="cpu") as engine:
        text = train_gpt.generate(engine, b"abc", 16, context=8, temperature=1.0)
        return text, train_gpt.generate(engine, b"abc", 16, context=8, temperature=1.0), engine.training


def test_a_sample_is_the_same_on_all_ranks():
    [(expected, again, training)] = run_ranks(generate_on_rank, 1, "one process")
    assert len(expected) == 3 + 16
    assert expected.startswith(b"abc")
    assert len(set(expected[3:])) > 4
    assert again == expected
    assert not training
    for layout in ("tensor", "pipeline"):
        assert run_ranks(generate_on_rank, 2, layout) == [(expected, expected, False)] * 2, layout


def test_what_a_terminal_shows():
    assert train_gpt.readable("def f():\n\té".encode()) == "def f():\n\té"
    assert train_gpt.readable(b"a\xffb\x1b[0m\r\0") == "a�b�[0m��"
