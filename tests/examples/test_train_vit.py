"""train_vit.py: training on digits, image sets from tiny files in their real formats, and what it measures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import train_vit
import vit_data
from PIL import Image

import halfmesh
from tests.support.example_runs import CONFIGS, run

SIZE = 32  # pixels: a ViT-Tiny with patches of 16 sees four of them


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


# --- the script ----------------------------------------------------------------------------------------------------


FP32 = ("torch_bf16", "bf16=null")
INTERLEAVED = ("pipeline", "parallel.pipeline.schedule=interleaved", "parallel.pipeline.chunks=2")


def train(folder, *args, config=FP32, ranks=None):
    """The metrics of a run with a config and overrides, and what it printed."""
    config, *overrides = config
    args = [*args, *(word for override in overrides for word in ("--set", override))]
    done = run("train_vit.py", "--config", CONFIGS / f"{config}.py", *args, ranks=ranks, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / config / "metrics.json").read_text()), done.stdout.splitlines()


def test_one_process_and_an_accuracy_that_is_too_low(tmp_path):
    picture = tmp_path / "here" / "a.png"
    args = [
        *["--set", "NUM_EPOCHS=1", "--set", "BATCH_SIZE=16", "--set", "seed=3", "--limit", "64"],
        "--out",
        picture,
        "--min-accuracy",
        100.5,
    ]
    done = run("train_vit.py", *args, "--config", CONFIGS / "naive_fp16.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("test accuracy: ")
    assert done.stderr.splitlines()[-1] == "the test accuracy is below --min-accuracy 100.5 %"
    with Image.open(picture) as image:
        assert image.size == (1000, 600)
    metrics = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert (metrics["config"], metrics["seed"], metrics["tests"][0]["update"]) == ("naive_fp16", 3, 4)


@pytest.mark.slow
def test_two_processes_learn_the_digits(tmp_path):
    metrics, lines = train(tmp_path, "--set", "NUM_EPOCHS=6", "--min-accuracy", 80, config=["naive_fp16"], ranks=2)
    accuracy = float(lines[-1].removeprefix("test accuracy: ").removesuffix(" %"))
    assert 80 < accuracy <= 100
    assert metrics["test_accuracy"] == pytest.approx(accuracy, abs=0.05)
    assert metrics["tests"][-1] == {"update": 6 * 22, "accuracy": metrics["test_accuracy"]}
    assert metrics["training"][-1]["loss"] < metrics["training"][0]["loss"] / 4
    assert {point["loss_scale"] for point in metrics["training"]} <= {2.0**n for n in range(10, 18)}


SHORT = ["--set", "NUM_EPOCHS=4", "--limit", 320, "--min-accuracy", 50]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The metrics of a short run on one process in fp32."""
    return train(tmp_path_factory.mktemp("reference"), *SHORT)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "config", "batch"),  # 32 images on all data ranks together
    [
        (4, ("tensor", "parallel.tensor.sequence_parallel=true"), 16),
        (2, (*INTERLEAVED, "bf16.mode=naive"), 32),
        (4, ("three_d", "parallel.data.size=null", "bf16=null"), 32),
    ],
)
def test_a_divided_model_learns_the_digits(ranks, config, batch, reference, tmp_path):
    metrics, _ = train(tmp_path, "--set", f"BATCH_SIZE={batch}", *SHORT, config=config, ranks=ranks)
    losses, expected = ([point["loss"] for point in found["training"]] for found in (metrics, reference))
    assert losses == pytest.approx(expected, rel=1e-2)
    assert metrics["test_accuracy"] == pytest.approx(reference["test_accuracy"], abs=2)
    assert metrics["tests"][-1]["update"] == 4 * 10


@pytest.mark.slow
def test_a_pipeline_leaves_out_a_short_last_batch(tmp_path):
    """Of 3 images the interleaved schedule would make no microbatches."""
    metrics, _ = train(tmp_path, "--set", "NUM_EPOCHS=1", "--limit", 35, config=INTERLEAVED, ranks=2)
    assert metrics["tests"][0]["update"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_apex_levels_learn_the_digits(level, tmp_path):
    metrics, _ = train(
        tmp_path, "--set", "NUM_EPOCHS=3", "--min-accuracy", 80, config=["apex", f"fp16.opt_level=O{level}"]
    )
    assert 80 < metrics["test_accuracy"] <= 100
    assert {point["loss_scale"] for point in metrics["training"]} <= {2.0**16, 2.0**15}


@pytest.mark.slow
def test_images_in_folders_end_to_end(image_folder, tmp_path):
    args = ["--data", "imagefolder", "--data-root", image_folder, "--model", "vit_tiny_patch16_224"]
    args += ["--image-size", SIZE, "--set", "NUM_EPOCHS=1", "--set", "BATCH_SIZE=2", "--workers", 1]
    metrics, _ = train(tmp_path, *args, config=["torch_bf16"])
    assert metrics["tests"][0]["update"] == 3


# --- data ----------------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    data, again = (vit_data.load_data("digits", Path("unused")) for _ in range(2))
    assert (len(data.train), len(data.test), data.classes) == (1347, 450, 10)
    images = torch.stack([image for image, _ in data.train])
    assert images.shape[1:] == (1, 8, 8)
    assert images.mean().abs() < 0.01
    assert images.std() == pytest.approx(1, abs=0.01)
    assert torch.stack([label for _, label in data.test]).bincount().min() >= 43  # each tenth of the 450
    assert torch.equal(again.test[7][0], data.test[7][0])


@pytest.mark.promise(
    "ViT on Caltech101",
    "`examples/train_vit.py` with `configs/vit_base_caltech101.py`, timm, torchvision and `$DATA`",
    of="Colossal-AI",
    page="../examples/README.md",
)
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


def test_image_folder_and_its_limit(image_folder):
    data = vit_data.load_data("imagefolder", image_folder, SIZE)
    assert (len(data.train), len(data.test), data.classes) == (6, 4, 2)
    assert [label for _, label in vit_data.limit(data, 4).train] == [0, 0, 1, 1]
    draw(image_folder / "val" / "owl" / "0.png")
    with pytest.raises(vit_data.MissingDataError, match=r"need the same class directories, .* only one .* has: owl"):
        vit_data.load_data("imagefolder", image_folder, SIZE)


def test_missing_files_are_named_and_nothing_is_downloaded(tmp_path):
    root = tmp_path / "nothing"
    message = rf"no directory {root}/caltech101/101_ObjectCategories\.\nRun once with --download \(131 MB"
    with pytest.raises(vit_data.MissingDataError, match=message):
        vit_data.load_data("caltech101", root)
    assert not root.exists()


# --- updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "ranks", "changes", "updates"),
    [
        (100, 1, {}, 13),
        (100, 2, {"gradient_accumulation": 4}, 2),
        (100, 4, {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, 6),
    ],
)
def test_count_updates(images, ranks, changes, updates):
    config = halfmesh.load_config({"BATCH_SIZE": 8, **changes})
    assert train_vit.count_updates(images, config, ranks) == updates
