"""The small examples: each runs on one rank and on several, and prints what it promises."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec

import pytest

from tests.support.example_runs import ROOT, launch, numbers

EXAMPLES = ROOT / "examples"
SMALL = [
    "accumulation.py",
    "checkpoint.py",
    "evaluation.py",
    "finetune_llm.py",
    "fsdp.py",
    "huggingface.py",
    "own_loop/after.py",
    "own_loop/before.py",
    "own_loop/clm_after.py",
    "own_loop/clm_before.py",
    "own_loop/dino_after.py",
    "own_loop/dino_before.py",
    "own_loop/imagenet_after.py",
    "own_loop/imagenet_before.py",
    "own_loop/mae_after.py",
    "own_loop/mae_before.py",
    "own_loop/mnist_after.py",
    "own_loop/mnist_before.py",
    "own_loop/modded_after.py",
    "own_loop/modded_before.py",
    "own_loop/nanogpt_after.py",
    "own_loop/nanogpt_before.py",
    "own_loop/timm_after.py",
    "own_loop/timm_before.py",
    "pipeline.py",
    "precision.py",
    "tensor.py",
    "three_d.py",
    "trainer.py",
]
LARGE = {"gpt.py", "gpt_data.py", "gpt_report.py", "run_report.py", "train_gpt.py", "train_vit.py", "vit_data.py"}
LARGE |= {"vit_report.py"}  # with a data set's options, pictures and a command line of their own

pytestmark = pytest.mark.distributed
needs_digits = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn, which has the digits, is not here"
)


def test_all_examples_are_known():
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "plugin" not in path.parts}
    assert files == {*SMALL, *LARGE}
    for name in SMALL:
        text = (EXAMPLES / name).read_text()
        assert f"    python examples/{name}" in text[:600], "the way to start it stands at its top"
    page = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"^\| `([\w/]+\.(?:py|ipynb))` \|", page, re.MULTILINE))
    assert {*SMALL, "notebook.ipynb"} <= named
    assert {name for name in named if not (EXAMPLES / name).exists()} == set()


@pytest.mark.promise("three modes, chosen in the config")
@pytest.mark.slow
@needs_digits
def test_precision():
    printed = launch("precision.py", 2)[0]
    rows = re.findall(r"^(\S+(?: \S+)?) +loss (\S+)  accuracy (\S+)  weights torch.(\w+),", printed, re.MULTILINE)
    assert [(name, weights) for name, _, _, weights in rows] == [
        ("fp32", "float32"),
        ("torch fp16", "float32"),
        ("torch bf16", "float32"),
        ("naive fp16", "float16"),
        ("naive bf16", "bfloat16"),
        ("apex O1", "float32"),
        ("apex O2", "float16"),
    ]
    for name, loss, accuracy, _ in rows:
        assert float(loss) == pytest.approx(float(rows[0][1]), abs=4e-3), name
        assert float(accuracy) == pytest.approx(float(rows[0][2]), abs=4e-3), name
    assert float(rows[0][2]) > 0.9


@needs_digits
@pytest.mark.parametrize(
    ("ranks", "batches", "small", "updates"), [(1, 29, 113, 29), pytest.param(2, 15, 57, 15, marks=pytest.mark.slow)]
)
def test_accumulation(ranks, batches, small, updates):
    printed = launch("accumulation.py", ranks)[0]
    assert f"batches of 64: {batches} batches, {updates} updates\n" in printed
    assert f"batches of 16: {small} batches, {updates} updates\n" in printed
    assert numbers(r"difference of a weight: (\S+)", printed)[0] < 1e-6


@pytest.mark.promise("evaluation in the same precision")
@pytest.mark.slow
@needs_digits
def test_evaluation_is_the_same_on_any_number_of_ranks():
    one = launch("evaluation.py", 1)[0]
    two = launch("evaluation.py", 2)
    assert [re.search(r"has seen (\d+) digits", printed).group(1) for printed in two] == ["149", "148"]
    right, seen = numbers(r"accuracy: (\d+) of", one)[0], numbers(r"accuracy: \d+ of (\d+)", one)[0]
    assert seen == 297
    assert right > 200
    assert f"accuracy: {right:.0f} of 297\n" in two[0]
    assert numbers(r"loss: (\S+)", two[0]) == pytest.approx(numbers(r"loss: (\S+)", one), abs=1e-5)


@pytest.mark.promise("tensor parallelism of chosen layers")
@pytest.mark.slow
@needs_digits
@pytest.mark.parametrize(
    ("script", "ranks", "tolerance", "words"),
    [
        ("tensor.py", 2, {"abs": 2e-5}, "rank 1 holds 19434 of 36074 numbers"),
        ("pipeline.py", 2, {"abs": 2e-5}, "layers "),
        ("three_d.py", 8, {"abs": 2e-5}, "stage 1 of 2, copy 0 of 2, part 1 of 2 of each layer"),
        ("fsdp.py", 2, {"rel": 2e-2}, "state of 18037 of 36074"),
        ("huggingface.py", 2, {"abs": 0.02}, "loss of the last batch"),
    ],
)
def test_each_layout_trains_as_one_process(script, ranks, tolerance, words):
    if script == "huggingface.py":
        pytest.importorskip("transformers")
    pattern = r"loss(?: of the last batch)? (\S+)"
    one, several = launch(script, 1)[0], launch(script, ranks)
    losses = numbers(pattern, one)
    assert losses[-1] < losses[0]
    assert numbers(pattern, several[0]) == pytest.approx(losses, **tolerance)
    assert any(words in printed for printed in several)


@pytest.mark.slow
def test_fine_tuning_is_the_same_in_each_layout(tmp_path):
    pytest.importorskip("peft")
    losses = r"epoch \d: mean loss (\S+)"
    one = numbers(losses, launch("finetune_llm.py", 1, "--out", tmp_path / "one")[0])
    assert one[-1] < one[0]
    for layout in ("fsdp", "tensor"):
        printed = launch("finetune_llm.py", 2, "--layout", layout, "--out", tmp_path / layout)[0]
        assert numbers(losses, printed) == pytest.approx(one, abs=0.03), layout
        assert "['README.md', 'adapter_config.json', 'adapter_model.safetensors']: loss" in printed
        without, tuned = (numbers(rf"(\S+) {which}", printed)[0] for which in ("without the adapter", "with it"))
        assert tuned < without - 0.1, layout


@pytest.mark.slow
@needs_digits
def test_checkpoint(tmp_path):
    begin, end = r"begins after update (\d+)", r"ends after update 56, norm of the weights (\S+)"
    whole = launch("checkpoint.py", 1, tmp_path / "a")[0]
    assert numbers(begin, whole) == [0]
    assert launch("checkpoint.py", 1, tmp_path / "b", "--end-after", 33, status=75)[0] == "begins after update 0\n"
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    again = launch("checkpoint.py", 1, tmp_path / "b")[0]
    assert numbers(begin, again) == [33]
    assert numbers(end, again) == numbers(end, whole)
    elsewhere = launch("checkpoint.py", 2, tmp_path / "c")[0]
    assert numbers(begin, elsewhere) == [33]
    assert numbers(end, elsewhere) == pytest.approx(numbers(end, whole), rel=0.02)  # other random numbers in dropout


@pytest.mark.promise(
    "the loop with autocast and GradScaler",
    "one key",
    of="PyTorch",
    page="../examples/README.md",
)
@pytest.mark.slow
@needs_digits
def test_the_loop_before_and_after():
    pattern = r"epoch \d: mean loss (\S+)"
    before = numbers(pattern, launch("own_loop/before.py", 1)[0])
    assert before[1] < before[0] / 2
    for script, ranks in (("before.py", 2), ("after.py", 2)):
        assert numbers(pattern, launch(f"own_loop/{script}", ranks)[0]) == pytest.approx(before, abs=1e-3), script


@pytest.mark.slow
@needs_digits
def test_trainer():
    pytest.importorskip("torchmetrics")
    printed = launch("trainer.py", 2)[0]
    accuracy, right = numbers(r"accuracy ([\d.]+),", printed)[0], numbers(r"predicted right (\d+) of", printed)[0]
    assert accuracy == pytest.approx(right / 297, abs=1e-6)
    assert accuracy > 0.8
    assert numbers(r"stopped in epoch (\d+)", printed)[0] < 19
