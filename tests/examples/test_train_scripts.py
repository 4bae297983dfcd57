"""train_vit.py and train_gpt.py: what they train and write, alone and in layouts, and the data that they read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vit_data
from PIL import Image

from halfmesh.verify.phases import verify_script
from tests.support.example_runs import CONFIGS, ROOT, launch

pytestmark = pytest.mark.distributed

SIZE = 32  # pixels: a ViT-Tiny with patches of 16 sees four of them
INTERLEAVED = ["parallel.pipeline.schedule=interleaved", "parallel.pipeline.chunks=2", "bf16=null"]
SMALL_GPT = ["--max-bytes", 20_000, "--context", 16, "--width", 16, "--validation-windows", 4, "--dropout", 0]


def train(script: str, folder: Path, config: str, settings: list[str], *args: Any, ranks: int = 1) -> tuple[Any, str]:
    """The metrics of a run with a config and settings that change it; and what it printed."""
    sets = [word for setting in settings for word in ("--set", setting)]
    printed = launch(script, ranks, "--config", CONFIGS / f"{config}.py", *sets, *args, folder=folder)[0]
    name = config if script == "train_vit.py" else f"gpt_{config}"
    return json.loads((folder / "runs" / name / "metrics.json").read_text()), printed


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


def draw(path, mode="RGB", seed=0):
    """A small picture of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (40, 36) if mode == "L" else (40, 36, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.mark.slow
def test_images_in_folders_end_to_end(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for number in range(2 * count):
            draw(tmp_path / "pets" / part / ("cat", "dog")[number % 2] / f"{number}.png", seed=number)
    args = ["--data", "imagefolder", "--data-root", tmp_path / "pets", "--model", "vit_tiny_patch16_224"]
    args += ["--image-size", SIZE, "--workers", 1]
    metrics, _ = train("train_vit.py", tmp_path, "torch_bf16", ["NUM_EPOCHS=1", "BATCH_SIZE=2"], *args)
    assert metrics["tests"][0]["update"] == 3


@pytest.mark.promise("ViT on Caltech101", "`examples/train_vit.py`", of="Colossal-AI", page="../examples/README.md")
def test_caltech101(tmp_path):
    """Two classes of 7 and 3 images, one of them grey, and the one directory that is not a class. What is missing is
    named, and nothing is downloaded."""
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
    root = tmp_path / "nothing"
    message = rf"no directory {root}/caltech101/101_ObjectCategories\.\nRun once with --download \(131 MB"
    with pytest.raises(vit_data.MissingDataError, match=message):
        vit_data.load_data("caltech101", root)
    assert not root.exists()


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
        ("train_vit.py", ["--limit", 64], "pipeline", 2, INTERLEAVED),
        ("train_gpt.py", SMALL_GPT, "three_d", 4, ["parallel.data.size=null", "bf16=null"]),
    ],
)
def test_a_layout_trains_as_one_process(script, args, config, ranks, settings):
    settings, args = [*settings, "BATCH_SIZE=8"], [*map(str, args)]
    path = ROOT / "examples" / script
    report = verify_script(CONFIGS / f"{config}.py", path, args, world_size=ranks, overrides=settings, updates=1)
    assert report.equal, str(report)
