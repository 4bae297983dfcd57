"""The example: training on digits, and the image sets from tiny files in the formats that they really have."""

import hashlib
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_vit
import vit_data
from PIL import Image
from torchvision.datasets import CIFAR10

import halfmesh
from tests.support.example_runs import CONFIGS, run
from tests.support.ranks import run_ranks

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


@pytest.fixture
def caltech101(tmp_path):
    """Two classes of 7 and 3 images, one of them grey, and the one directory that is not a class."""
    categories = tmp_path / "caltech101" / "101_ObjectCategories"
    for name, count in (("BACKGROUND_Google", 1), ("ant", 7), ("yin_yang", 3)):
        for i in range(1, count + 1):
            draw(categories / name / f"image_{i:04d}.jpg", mode="L" if (name, i) == ("ant", 1) else "RGB", seed=i)
    return tmp_path


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Two batches of 4 images; torchvision checks sums, so the sums are those of these files."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(labels):
        data = generator.integers(0, 256, (len(labels), 3072), dtype=np.uint8)
        return {"data": data, "labels": labels}

    names = ["data_batch_1", "data_batch_2", "test_batch"]
    sums = [
        [name, write(name, batch(labels))] for name, labels in zip(names, ([0, 1, 2, 3], [9] * 4, [5, 6]), strict=True)
    ]
    monkeypatch.setattr(CIFAR10, "train_list", sums[:2])
    monkeypatch.setattr(CIFAR10, "test_list", sums[2:])
    labels = [f"class {i}" for i in range(10)]
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": write("batches.meta", {"label_names": labels})})
    return tmp_path


# --- the script ---------------------------------------------------------------------------------------------------


def test_two_processes_learn_the_digits(tmp_path):
    args = ["--config", CONFIGS / "naive_fp16.py", "--epochs", 6, "--min-accuracy", 80]
    done = run("train_vit.py", *args, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    accuracy = float(lines[-1].removeprefix("test accuracy: ").removesuffix(" %"))
    assert 80 < accuracy <= 100
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == [f"{i}/6" for i in range(1, 7)]
    picture = tmp_path / "runs" / "naive_fp16" / "training.png"
    with Image.open(picture) as image:
        assert image.size == (1000, 600)
    metrics = json.loads(picture.with_name("metrics.json").read_text())
    assert metrics["test_accuracy"] == pytest.approx(accuracy, abs=0.05)
    assert metrics["tests"][-1] == {"update": 6 * 22, "accuracy": metrics["test_accuracy"]}
    assert metrics["training"][-1]["loss"] < metrics["training"][0]["loss"] / 4
    assert {point["loss_scale"] for point in metrics["training"]} <= {2.0**n for n in range(10, 18)}


SHORT = ["--epochs", 4, "--limit", 320, "--min-accuracy", 50]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The metrics of a short run on one process in fp32."""
    folder = tmp_path_factory.mktemp("reference")
    done = run("train_vit.py", "--config", CONFIGS / "fp32.py", *SHORT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / "fp32" / "metrics.json").read_text())


@pytest.mark.parametrize(
    ("ranks", "config", "batch"),  # 32 images on all data ranks together
    [
        (2, "tensor_naive_fp16", 32),
        (4, "data_tensor_torch_bf16", 16),
        (2, "interleaved_naive_bf16", 32),
        (4, "pipeline_tensor_fp32", 32),
    ],
)
def test_a_divided_model_learns_the_digits(ranks, config, batch, reference, tmp_path):
    args = ["--config", CONFIGS / f"{config}.py", "--batch-size", batch]
    done = run("train_vit.py", *args, *SHORT, ranks=ranks, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "runs" / config / "metrics.json").read_text())
    losses = [point["loss"] for point in metrics["training"]]
    assert losses == pytest.approx([point["loss"] for point in reference["training"]], rel=1e-2)
    accuracies = [point["accuracy"] for point in metrics["training"]]
    assert accuracies == pytest.approx([point["accuracy"] for point in reference["training"]], abs=5)
    assert metrics["test_accuracy"] == pytest.approx(reference["test_accuracy"], abs=2)
    assert metrics["tests"][-1]["update"] == 4 * 10


def test_a_pipeline_leaves_out_a_short_last_batch(tmp_path):
    """Of 3 images the interleaved schedule would make no microbatches."""
    args = ["--config", CONFIGS / "interleaved_fp32.py", "--epochs", 1, "--limit", 35]
    done = run("train_vit.py", *args, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs" / "interleaved_fp32" / "metrics.json").read_text())["tests"][0]["update"] == 1


def test_fewer_images_than_a_pipeline_needs(tmp_path, monkeypatch):
    launch = SimpleNamespace(config=halfmesh.load_config(CONFIGS / "pipeline_fp32.py"), world_size=4, local_rank=0)
    monkeypatch.setattr("sys.argv", ["train_vit.py", "--limit", "62"])
    message = "62 training images are no whole batch of 32 for each data rank, .* use a --batch-size below 32"
    with pytest.raises(vit_data.MissingDataError, match=message):
        train_vit.prepare_data(train_vit.parse_args(), launch)


@pytest.mark.parametrize("level", range(4))
def test_apex_levels_learn_the_digits(level, tmp_path):
    args = ["--config", CONFIGS / f"apex_o{level}.py", "--epochs", 3, "--min-accuracy", 80]
    done = run("train_vit.py", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "runs" / f"apex_o{level}" / "metrics.json").read_text())
    assert 80 < metrics["test_accuracy"] <= 100
    assert {point["loss_scale"] for point in metrics["training"]} <= ({1.0} if level in (0, 3) else {2.0**16, 2.0**15})


def test_one_process_and_a_bar_that_is_too_high(tmp_path):
    picture = tmp_path / "here" / "a.png"
    args = ["--epochs", 1, "--limit", 64, "--batch-size", 16, "--seed", 3, "--out", picture, "--min-accuracy", 100.5]
    done = run("train_vit.py", *args, "--config", CONFIGS / "fp32.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("test accuracy: ")
    assert done.stderr.splitlines()[-1] == "the test accuracy is below --min-accuracy 100.5 %"
    assert picture.exists()
    metrics = json.loads((tmp_path / "here" / "metrics.json").read_text())
    assert (metrics["config"], metrics["seed"], metrics["tests"][0]["update"]) == ("fp32", 3, 4)


def test_images_in_folders_end_to_end(image_folder, tmp_path):
    args = ["--data", "imagefolder", "--data-root", image_folder, "--model", "vit_tiny_patch16_224"]
    args += ["--image-size", SIZE, "--epochs", 1, "--batch-size", 2, "--workers", 1, "--out", tmp_path / "a.png"]
    done = run("train_vit.py", *args, "--config", CONFIGS / "torch_bf16.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "metrics.json").read_text())["tests"][0]["update"] == 3


def test_missing_files_end_the_script_with_a_message(tmp_path):
    done = run("train_vit.py", "--data", "caltech101", "--data-root", tmp_path / "nothing", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"no directory {tmp_path}/nothing/caltech101/101_ObjectCategories" in done.stderr


# --- its parts ----------------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    data = vit_data.load_data("digits", Path("unused"))
    assert (len(data.train), len(data.test), data.classes) == (1347, 450, 10)
    image, label = data.test[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert label.dtype == torch.int64
    images = torch.stack([image for image, _ in data.train])
    assert images.mean().abs() < 0.01
    assert images.std() == pytest.approx(1, abs=0.01)
    counts = torch.stack([label for _, label in data.test]).bincount()
    assert counts.min() >= 43  # each tenth of the 450
    again = vit_data.load_data("digits", Path("unused"))
    assert torch.equal(again.test[7][0], data.test[7][0])


def test_caltech101(caltech101):
    data = vit_data.load_data("caltech101", caltech101, SIZE)
    assert (len(data.train), len(data.test), data.classes) == (8, 2, 2)
    samples = [*data.train, *data.test]
    assert {tuple(image.shape) for image, _ in samples} == {(3, SIZE, SIZE)}  # the grey one, too
    assert sorted(label for _, label in samples) == [0] * 7 + [1] * 3
    assert [label for _, label in data.test] == [0, 1]
    assert torch.equal(data.test[0][0], data.test[0][0])  # no augmentation there


def test_cifar10(cifar10):
    data = vit_data.load_data("cifar10", cifar10, SIZE)
    assert (len(data.train), len(data.test), data.classes) == (8, 2, 10)
    assert [label for _, label in data.train] == [0, 1, 2, 3, 9, 9, 9, 9]
    assert data.test[0][0].shape == (3, SIZE, SIZE)
    (cifar10 / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"torn")
    with pytest.raises(vit_data.MissingDataError, match=r"CIFAR10 is not there, or its files are damaged"):
        vit_data.load_data("cifar10", cifar10, SIZE)


def test_image_folder(image_folder):
    data = vit_data.load_data("imagefolder", image_folder, SIZE)
    assert (len(data.train), len(data.test), data.classes) == (6, 4, 2)
    draw(image_folder / "val" / "owl" / "0.png")
    with pytest.raises(vit_data.MissingDataError, match=r"need the same class directories, .* only one .* has: owl"):
        vit_data.load_data("imagefolder", image_folder, SIZE)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("caltech101", r"no directory {root}/caltech101/101_ObjectCategories\.\nRun once with --download \(131 MB"),
        ("cifar10", r"{root}/cifar-10-batches-py should hold .*\nRun once with --download \(170 MB"),
        (
            "imagefolder",
            r"no directory {root}/train and no {root}/val\.\nimagefolder reads {root}/train/<class>/<image>",
        ),
    ],
)
def test_missing_files(data, expected, tmp_path):
    root = tmp_path / "nothing"
    with pytest.raises(vit_data.MissingDataError, match=expected.format(root=root)) as caught:
        vit_data.load_data(data, root)
    assert f"--data-root or $DATA names another place than {root}" in str(caught.value)
    assert not root.exists()  # nothing was downloaded, nothing was made


def test_unknown_data_set():
    with pytest.raises(ValueError, match="no data set 'mnist'; there are digits, caltech101"):
        vit_data.load_data("mnist", Path("unused"))


def test_split_by_class():
    labels = [0] * 10 + [1] * 3 + [2] * 15
    train, test = vit_data.split_by_class(labels)
    assert sorted(train + test) == list(range(28))
    assert [labels[i] for i in test] == [0, 0, 1, 2, 2, 2]
    torch.manual_seed(99)
    assert vit_data.split_by_class(labels) == (train, test)
    assert test[:2] != [0, 1]  # drawn, not the first ones


def test_limit_takes_samples_of_all_classes(image_folder):
    data = vit_data.limit(vit_data.load_data("imagefolder", image_folder, SIZE), 4)
    assert [label for _, label in data.train] == [0, 0, 1, 1]
    assert len(vit_data.limit(data, 100).train) == 4


@pytest.mark.parametrize(
    ("images", "ranks", "changes", "updates"),
    [
        (100, 1, {}, 13),
        (100, 2, {}, 7),
        (100, 2, {"gradient_accumulation": 4}, 2),
        (96, 2, {"BATCH_SIZE": 48}, 1),
        (100, 4, {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, 6),
        (100, 4, {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}, "gradient_accumulation": 4}, 2),
    ],
)
def test_count_updates(images, ranks, changes, updates):
    config = halfmesh.load_config({"BATCH_SIZE": 8, **changes})
    assert train_vit.count_updates(images, config, ranks) == updates


def evaluate_on_rank(rank, world_size):
    """The "model" answers 0 or 1 as its input says; of the 5 test samples 3 are labelled right."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(model.weight)
    answers, labels = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 1, 1, 0])
    samples = torch.utils.data.TensorDataset(torch.eye(2)[answers], labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = halfmesh.get_dataloader(samples, batch_size=2)
    config = {"fp16": {"mode": "naive"}}
    with halfmesh.initialize(model, optimizer, config=config, eval_dataloader=loader, device="cpu") as engine:
        return train_vit.evaluate(engine), engine.training


def test_accuracy_is_that_of_all_ranks():
    assert run_ranks(evaluate_on_rank, 2) == [(60.0, False)] * 2
