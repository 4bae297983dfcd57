"""train_gpt.py: the model, the text, the script on one and on several ranks, and the sample that it writes."""

import json
from types import SimpleNamespace

import gpt_data
import gpt_report
import pytest
import torch
import train_gpt
from gpt import GPT

from tests.support.example_runs import CONFIGS, run

# --- the model and the text ----------------------------------------------------------------------------------------


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return GPT(context=8, width=16, depth=2, num_heads=2, dropout=dropout)


def test_no_byte_is_predicted_from_later_ones():
    model = make_model()
    ids, changed = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 9, 8]])
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] - after[:, 2:]).abs().amin(1).max() > 1e-3
    first, second = model(torch.tensor([[5, 5]]))[0]
    assert (first - second).abs().max() > 1e-2, "places count"
    assert model.head.weight is model.tokens.weight


def test_dropout_is_for_training_only():
    model, ids = make_model(dropout=0.5), torch.arange(8).unsqueeze(0)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def load(path, context=4, max_bytes=10_000, validation_windows=5):
    return gpt_data.load_text(path, context, max_bytes, validation_windows)


def test_the_end_of_the_text_is_held_out(tmp_path):
    text = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(text)
    data = load(tmp_path / "a.txt")
    ids, targets = data.train[5]
    assert (ids.tolist(), targets.tolist()) == ([5, 6, 7, 8], [6, 7, 8, 9])
    seen = {byte for window in data.train for part in window for byte in part.tolist()}
    held_out = {byte for window in data.validation for part in window for byte in part.tolist()}
    assert seen == set(text[:180])
    assert held_out <= set(text[180:])
    assert [ids[0].item() for ids, _ in data.validation] == [180, 183, 186, 189, 192]


# --- the script ----------------------------------------------------------------------------------------------------

# Small enough for a test, and still on the real text. An update sees 32 windows, whatever the number of data ranks.
SMALL = ["--width", 32, "--depth", 2, "--heads", 2, "--context", 32, "--steps", 8, "--sample", 30]
SMALL += ["--set", "NUM_EPOCHS=3"]
FP32 = "bf16=null"
SMALL += ["--dropout", 0]  # to compare layouts, whose random numbers differ


def train(config, folder, *args, batch=32, ranks=None):
    """The metrics of a small run with a config and overrides, and what it printed."""
    config, *overrides = config
    args = [*args, *(word for override in overrides for word in ("--set", override))]
    args = ["--config", CONFIGS / f"{config}.py", *SMALL, "--set", f"BATCH_SIZE={batch}", *args]
    done = run("train_gpt.py", *args, ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / f"gpt_{config}" / "metrics.json").read_text()), done.stdout


def losses(metrics):
    return [loss for point in metrics["training"] for loss in point["losses"]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process in fp32."""
    return train(("torch_bf16", FP32), tmp_path_factory.mktemp("reference"))


@pytest.mark.slow
def test_one_process(reference):
    metrics, shown = reference
    assert len(losses(metrics)) == 24
    assert losses(metrics)[0] == pytest.approx(5.5, abs=0.5)  # log(256), where all bytes are alike
    assert [test["update"] for test in metrics["tests"]] == [8, 16, 24]
    assert metrics["tests"][-1]["loss"] == metrics["validation_loss"] < 4.3
    assert metrics["bits_per_byte"] == pytest.approx(metrics["validation_loss"] * 1.4427, rel=1e-4)
    assert f"a sample:\n{metrics['sample']}\n" in shown
    assert metrics["sample"].startswith("def ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "batch", "rel"),
    [
        (("fsdp", FP32), 2, 16, 1e-3),
        (("tensor", FP32, "fp16.mode=naive", "parallel.tensor.sequence_parallel=true"), 4, 16, 1e-2),
        (("three_d",), 8, 16, 1e-2),
    ],
)
def test_several_ranks_compute_the_same(config, ranks, batch, rel, reference, tmp_path):
    expected, _ = reference
    metrics, _ = train(config, tmp_path, batch=batch, ranks=ranks)
    assert losses(metrics) == pytest.approx(losses(expected), rel=rel)
    assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=rel)


def test_next_byte_loss():
    logits = torch.full((2, 3, 256), 0.0)
    targets = torch.randint(256, (2, 3))
    loss = train_gpt.next_byte_loss(logits, targets)
    assert loss == pytest.approx(5.5452, abs=1e-4)
    assert gpt_report.bits_per_byte(loss.item()) == pytest.approx(8.0)
    logits.scatter_(2, targets.unsqueeze(2), 100.0)
    assert train_gpt.next_byte_loss(logits, targets) == pytest.approx(0, abs=1e-6)


# --- the sample ----------------------------------------------------------------------------------------------------


class Alphabet:
    """An engine whose model expects the next byte of the alphabet."""

    context = SimpleNamespace(
        device=torch.device("cpu"), is_last_stage=True, last_stage=0, broadcast=lambda tensor, axis, place: None
    )
    config = SimpleNamespace(seed=0)

    def eval(self):
        pass

    def __call__(self, ids):
        assert ids.shape == (1, 4)
        return torch.nn.functional.one_hot(ids + 1, 256) * 1e4


@pytest.mark.parametrize(("prompt", "expected"), [(b"a", b"abcdefg"), (b"tuvwx", b"tuvwxyz{|}~")])
def test_each_byte_follows_those_before_it(prompt, expected):
    assert train_gpt.generate(Alphabet(), prompt, 6, context=4, temperature=1.0) == expected
