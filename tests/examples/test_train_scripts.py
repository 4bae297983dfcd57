"""train_vit.py and train_gpt.py: what they train and write, alone and in layouts, and the data that they read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt_data
import numpy as np
import pytest
import torch
import train_gpt
import train_vit
import vit_data
from gpt import GPT
from PIL import Image

import halfmesh
from halfmesh.verify.phases import verify_script
from tests.support.example_runs import CONFIGS, ROOT, launch

pytestmark = pytest.mark.distributed

SIZE = 32  # pixels: a ViT-Tiny with patches of 16 sees four of them
INTERLEAVED = ["parallel.pipeline.schedule=interleaved", "parallel.pipeline.chunks=2"]
SMALL_GPT = ["--max-bytes", 20_000, "--context", 16, "--width", 16, "--validation-windows", 4, "--dropout", 0]


def train(script: str, folder: Path, config: str, settings: list[str], *args: Any, ranks: int = 1) -> tuple[Any, str]:
    """The metrics of a run with a config and settings that change it; and what it printed."""
    sets = [word for setting in settings for word in ("--set", setting)]
    printed = launch(script, ranks, "--config", CONFIGS / f"{config}.py", *sets, *args, folder=folder)[0]
    name = config if script == "train_vit.py" else f"gpt_{config}"
    return json.loads((folder / "runs" / name / "metrics.json").read_text()), printed


# --- the Vision Transformer -----------------------------------------------------------------------------------------


def test_an_accuracy_that_is_too_low(tmp_path):
    args = ["--set", "NUM_EPOCHS=1", "--set", "BATCH_SIZE=16", "--set", "seed=3", "--limit", 64]
    args += ["--out", tmp_path / "here" / "a.png", "--min-accuracy", 100.5]
    (printed,) = launch("train_vit.py", 1, "--config", CONFIGS / "naive_fp16.py", *args, status=1, folder=tmp_path)
    assert printed.splitlines()[-2].startswith("test accuracy: ")
    assert printed.splitlines()[-1] == "the test accuracy is below --min-accuracy 100.5 %"
    with Image.open(tmp_path / "here" / "a.png") as image:
        assert image.size == (1000, 600)
    metrics = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert (metrics["config"], metrics["seed"], metrics["tests"][0]["update"]) == ("naive_fp16", 3, 4)


@pytest.mark.slow
def test_two_processes_learn_the_digits(tmp_path):
    metrics, printed = train("train_vit.py", tmp_path, "naive_fp16", ["NUM_EPOCHS=6"], "--min-accuracy", 80, ranks=2)
    accuracy = float(printed.splitlines()[-1].removeprefix("test accuracy: ").removesuffix(" %"))
    assert metrics["test_accuracy"] == pytest.approx(accuracy, abs=0.05)
    assert metrics["tests"][-1] == {"update": 6 * 22, "accuracy": metrics["test_accuracy"]}
    assert metrics["training"][-1]["loss"] < metrics["training"][0]["loss"] / 4
    assert {point["loss_scale"] for point in metrics["training"]} <= {2.0**n for n in range(10, 18)}


@pytest.mark.slow
def test_a_pipeline_measures_what_one_process_measures(tmp_path):
    found = []
    for name, settings, ranks in (("torch_bf16", [], 1), ("pipeline", INTERLEAVED, 2)):
        settings = [*settings, "bf16=null", "NUM_EPOCHS=2"]
        found.append(train("train_vit.py", tmp_path, name, settings, "--limit", 64, ranks=ranks)[0])
    expected, metrics = found
    losses, others = ([point["loss"] for point in each["training"]] for each in found)
    assert losses == pytest.approx(others, rel=1e-3)
    assert metrics["tests"][-1]["update"] == 4
    assert metrics["test_accuracy"] == pytest.approx(expected["test_accuracy"], abs=2)


@pytest.mark.slow
def test_images_in_folders_end_to_end(image_folder, tmp_path):
    args = ["--data", "imagefolder", "--data-root", image_folder, "--model", "vit_tiny_patch16_224"]
    args += ["--image-size", SIZE, "--workers", 1]
    metrics, _ = train("train_vit.py", tmp_path, "torch_bf16", ["NUM_EPOCHS=1", "BATCH_SIZE=2"], *args)
    assert metrics["tests"][0]["update"] == 3


@pytest.mark.parametrize(
    ("images", "ranks", "changes", "updates"),
    [
        (100, 1, {}, 13),
        (100, 2, {"gradient_accumulation": 4}, 2),
        (100, 4, {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, 6),  # without the short last batch
    ],
)
def test_count_updates(images, ranks, changes, updates):
    config = halfmesh.load_config({"BATCH_SIZE": 8, **changes})
    assert train_vit.count_updates(images, config, ranks) == updates


# --- its images -----------------------------------------------------------------------------------------------------


def draw(path, mode="RGB", seed=0):
    """A small picture of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (40, 36) if mode == "L" else (40, 36, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def image_folder(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for label in ("cat", "dog"):
            for i in range(count):
                draw(tmp_path / "pets" / part / label / f"{i}.png", seed=i)
    return tmp_path / "pets"


@pytest.mark.promise("ViT on Caltech101", "`examples/train_vit.py`", of="Colossal-AI", page="../examples/README.md")
def test_caltech101(tmp_path):
    """Two classes of 7 and 3 images, one of them grey, and the one directory that is not a class."""
    categories = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, count in (("BACKGROUND_Google", 1), ("ant", 7), ("yin_yang", 3)):
        for i in range(1, count + 1):
            draw(categories / name / f"image_{i:04d}.jpg", mode="L" if (name, i) == ("ant", 1) else "RGB", seed=i)
    data = vit_data.load_data("caltech101", tmp_path, SIZE)
    assert (len(data.train), len(data.test), data.classes) == (8, 2, 2)
    samples = [*data.train, *data.test]
    assert {tuple(image.shape) for image, _ in samples} == {(3, SIZE, SIZE)}  # the grey one, too
    assert sorted(label for _, label in samples) == [0] * 7 + [1] * 3
    assert [label for _, label in data.test] == [0, 1]
    assert torch.equal(data.test[0][0], data.test[0][0])  # no augmentation there


def test_what_is_missing_is_named_and_nothing_is_downloaded(image_folder, tmp_path):
    draw(image_folder / "val" / "owl" / "0.png")
    with pytest.raises(vit_data.MissingDataError, match=r"need the same class directories, .* only one .* has: owl"):
        vit_data.load_data("imagefolder", image_folder, SIZE)
    root = tmp_path / "nothing"
    message = rf"no directory {root}/caltech101/101_ObjectCategories\.\nRun once with --download \(131 MB"
    with pytest.raises(vit_data.MissingDataError, match=message):
        vit_data.load_data("caltech101", root)
    assert not root.exists()


# --- the GPT --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_and_writes_and_so_it_does_in_three_dimensions(tmp_path):
    """The layout's training is proven below; evaluation and the sample go through it, too."""
    found = []
    for name, changes, ranks in (("torch_bf16", [], 1), ("three_d", ["parallel.data.size=null"], 4)):
        settings = [*changes, "bf16=null", "NUM_EPOCHS=3"]
        args = [*SMALL_GPT, "--width", 32, "--steps", 8, "--sample", 30]
        found.append(train("train_gpt.py", tmp_path, name, settings, *args, ranks=ranks))
    (expected, printed), (metrics, _) = found
    assert [test["update"] for test in expected["tests"]] == [8, 16, 24]
    losses = [loss for point in expected["training"] for loss in point["losses"]]
    assert len(losses) == 24
    assert losses[0] == pytest.approx(5.5, abs=0.5)  # log(256), where all bytes are alike
    assert expected["tests"][-1]["loss"] == expected["validation_loss"] < 4.5
    assert expected["bits_per_byte"] == pytest.approx(expected["validation_loss"] * 1.4427, rel=1e-4)
    assert f"a sample:\n{expected['sample']}\n" in printed
    assert expected["sample"].startswith("def ")
    assert metrics["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)
    assert metrics["sample"].startswith("def ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "config", "ranks", "settings"),
    [
        ("train_vit.py", ["--limit", 64], "pipeline", 2, [*INTERLEAVED, "bf16=null"]),
        ("train_gpt.py", SMALL_GPT, "three_d", 4, ["parallel.data.size=null", "bf16=null"]),
    ],
)
def test_a_layout_trains_as_one_process(script, args, config, ranks, settings):
    settings, args = [*settings, "BATCH_SIZE=8"], [*map(str, args)]
    path = ROOT / "examples" / script
    report = verify_script(CONFIGS / f"{config}.py", path, args, world_size=ranks, overrides=settings, updates=1)
    assert report.equal, str(report)


def test_no_byte_is_predicted_from_later_ones():
    torch.manual_seed(0)
    model = GPT(context=8, width=16, depth=2, num_heads=2, dropout=0.0)
    before, after = model(torch.tensor([[5, 6, 7, 8]])), model(torch.tensor([[5, 6, 9, 8]]))
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2:] - after[:, 2:]).abs().amin(1).max() > 1e-3
    first, second = model(torch.tensor([[5, 5]]))[0]
    assert (first - second).abs().max() > 1e-2, "places count"


def test_the_end_of_the_text_is_held_out(tmp_path):
    text = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(text)
    data = gpt_data.load_text(tmp_path / "a.txt", 4, 10_000, 5)
    ids, targets = data.train[5]
    assert (ids.tolist(), targets.tolist()) == ([5, 6, 7, 8], [6, 7, 8, 9])
    seen = {byte for window in data.train for part in window for byte in part.tolist()}
    assert seen == set(text[:180])
    assert [ids[0].item() for ids, _ in data.validation] == [180, 183, 186, 189, 192]


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
