"""The small examples: each runs on one rank and on several, and prints what it promises."""

import os
import re
import shutil

import pytest

from tests.scripts.conversions import SCRIPTS
from tests.support.example_runs import ROOT, launch, numbers

EXAMPLES = ROOT / "examples"
SIDES = ("before", "after")
NAMES = "accumulation checkpoint evaluation finetune_llm fsdp huggingface pipeline precision tensor three_d trainer"
SMALL = [f"{name}.py" for name in NAMES.split()]
SMALL += [f"own_loop/{name}{side}.py" for name in ("", *(f"{script}_" for script in SCRIPTS)) for side in SIDES]
LARGE = {"gpt.py", "gpt_data.py", "gpt_report.py", "run_report.py", "train_gpt.py", "train_vit.py", "vit_data.py"}
LARGE |= {"vit_report.py"}  # with a data set's options, pictures and a command line of their own

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def needs_digits():
    pytest.importorskip("sklearn", reason="scikit-learn, which has the digits, is not here")


def test_all_examples_are_known():
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py") if "plugin" not in path.parts}
    assert files == {*SMALL, *LARGE}
    for name in SMALL:
        text = (EXAMPLES / name).read_text()
        assert f"    python examples/{name}" in text[:600], "the way to start it stands at its top"
    page = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|ipynb))`", page))
    assert {*SMALL, "notebook.ipynb"} <= named
    assert {name for name in named if not (EXAMPLES / name).exists()} == set()


@pytest.mark.slow
def test_precision():
    printed = launch("precision.py", 2)[0]
    rows = re.findall(r"^(\S+(?: \S+)?) +loss (\S+)  accuracy (\S+)  weights torch.(\w+),", printed, re.MULTILINE)
    assert [weights for *_, weights in rows] == ["float32"] * 3 + ["float16", "bfloat16", "float32", "float16"]
    for name, loss, accuracy, _ in rows:
        assert float(loss) == pytest.approx(float(rows[0][1]), abs=4e-3), name
        assert float(accuracy) == pytest.approx(float(rows[0][2]), abs=4e-3), name
    assert float(rows[0][2]) > 0.9


def test_accumulation():
    printed = launch("accumulation.py", 2)[0]
    assert "batches of 64: 15 batches, 15 updates\n" in printed
    assert "batches of 16: 57 batches, 15 updates\n" in printed
    assert numbers(r"difference of a weight: (\S+)", printed)[0] < 1e-6


@pytest.mark.promise("evaluation in the same precision")
@pytest.mark.slow
def test_evaluation_is_the_same_on_any_number_of_ranks():
    one = launch("evaluation.py", 1)[0]
    two = launch("evaluation.py", 2)
    assert [numbers(r"has seen (\d+) digits", printed) for printed in two] == [[149], [148]]
    (right,) = numbers(r"accuracy: (\d+) of 297\n", one)
    assert right > 200
    assert f"accuracy: {right:.0f} of 297\n" in two[0]
    assert numbers(r"loss: (\S+)", two[0]) == pytest.approx(numbers(r"loss: (\S+)", one), abs=1e-5)


@pytest.mark.promise("tensor parallelism of chosen layers")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "tolerance", "words"),
    [
        ("tensor.py", 2, {"abs": 2e-5}, "rank 1 holds 19434 of 36074 numbers"),
        ("pipeline.py", 2, {"abs": 2e-5}, "layers "),
        ("three_d.py", 4, {"abs": 2e-5}, "stage 1 of 2, copy 0 of 1, part 1 of 2 of each layer"),
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
    "the loop with autocast and GradScaler", "one config key", of="PyTorch", page="../examples/README.md"
)
@pytest.mark.slow
def test_the_loop_before_and_after():
    pattern = r"epoch \d: mean loss (\S+)"
    before = numbers(pattern, launch("own_loop/before.py", 1)[0])
    assert before[1] < before[0] / 2
    for script, ranks in (("before.py", 2), ("after.py", 2)):
        assert numbers(pattern, launch(f"own_loop/{script}", ranks)[0]) == pytest.approx(before, abs=1e-3), script


@pytest.mark.slow
def test_trainer():
    pytest.importorskip("torchmetrics")
    assert numbers(r"accuracy ([\d.]+),", launch("trainer.py", 2)[0])[0] > 0.8


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook, place = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4), {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert "apex fp16 x tensor: each rank of apex decides alone" in printed
    first, last = map(float, re.search(r"loss (\S+) -> (\S+), gradient norm", printed).groups())
    assert last < first / 2
