"""The data sets of train_vit.py, each as a training and a test set with the number of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

DATA_SETS = ("digits", "caltech101", "cifar10", "imagefolder")
TEST_SHARE = 5  # of Caltech101, which has no test set of its own: one image in five
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DIGITS_MEAN, DIGITS_STD = 0.305, 0.376

Transform = Callable[[Image.Image], torch.Tensor]


class MissingDataError(Exception):
    """The files of a data set are not there; the message says where they are expected and how to get them."""


@dataclass(frozen=True)
class VitData:
    """Both sets give (image, label): float32 images of shape [channels, size, size], and whole-number labels."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int


def load_data(name: str, root: Path, image_size: int = 224, download: bool = False) -> VitData:
    """One of `DATA_SETS`.

    Args:
        root: the directory that holds the data sets (imagefolder: the data set). digits needs none.
        image_size: what images are cropped to, in pixels. Digits stay 8 x 8.
        download: fetch missing files into `root`.

    Raises:
        MissingDataError: the files are not in `root`, and `download` is False or cannot help.
    """
    if name == "digits":
        return _load_digits()
    train, test = _train_transform(image_size), _test_transform(image_size)
    if name == "caltech101":
        return _load_caltech101(root, train, test, download)
    if name == "cifar10":
        return _load_cifar10(root, train, test, download)
    if name == "imagefolder":
        return _load_image_folder(root, train, test)
    raise ValueError(f"no data set {name!r}; there are {', '.join(DATA_SETS)}")


def limit(data: VitData, most: int) -> VitData:
    """At most `most` samples in each set, evenly spread over it (files are sorted by class)."""
    return VitData(_spread(data.train, most), _spread(data.test, most), data.classes)


def split_by_class(labels: Sequence[int], test_share: int = TEST_SHARE) -> tuple[list[int], list[int]]:
    """Indices for training and test: one in `test_share` of each class is for test, always the same ones."""
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    generator = torch.Generator().manual_seed(0)  # not the run's seed: runs must share one test set to be compared
    train: list[int] = []
    test: list[int] = []
    for label in sorted(by_class):
        indices = by_class[label]
        order = torch.randperm(len(indices), generator=generator).tolist()
        count = max(1, len(indices) // test_share)
        test += [indices[i] for i in order[:count]]
        train += [indices[i] for i in order[count:]]
    return sorted(train), sorted(test)


def _load_digits() -> VitData:
    """The 1,797 handwritten digits that come with scikit-learn, scanned and reduced to 8 x 8 grey levels 0 to 16."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32).unsqueeze(1)
    images = (images - DIGITS_MEAN) / DIGITS_STD
    labels = torch.tensor(bunch.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, stratify=bunch.target, random_state=0)
    return VitData(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]), 10)


def _load_caltech101(root: Path, train: Transform, test: Transform, download: bool) -> VitData:
    from torchvision.datasets import Caltech101

    files = root / "caltech101" / "101_ObjectCategories"
    if not files.is_dir() and not download:
        raise MissingDataError(
            f"Caltech101 is not there: no directory {files}.\n"
            f"Run once with --download (131 MB into {root}), or get caltech-101.zip from "
            "https://data.caltech.edu/records/mzrjq-6wc02 and unpack it, and the archives in it, so that "
            f"that directory holds one directory per class; --data-root or $DATA names another place than {root}"
        )
    # Two views of the same files, because augmentation is for training only.
    views = [Caltech101(root, transform=transform, download=download) for transform in (train, test)]
    train_indices, test_indices = split_by_class(views[0].y)
    return VitData(Subset(views[0], train_indices), Subset(views[1], test_indices), len(views[0].categories))


def _load_cifar10(root: Path, train: Transform, test: Transform, download: bool) -> VitData:
    from torchvision.datasets import CIFAR10

    files = root / CIFAR10.base_folder
    try:
        train_set = CIFAR10(root, train=True, transform=train, download=download)
        test_set = CIFAR10(root, train=False, transform=test)
    except RuntimeError as error:
        if download:
            raise
        raise MissingDataError(
            f"CIFAR10 is not there, or its files are damaged: {files} should hold data_batch_1 to 5, test_batch and "
            f"batches.meta.\nRun once with --download (170 MB into {root}), or get {CIFAR10.url} and unpack it in "
            f"{root}; --data-root or $DATA names another place than {root}"
        ) from error
    return VitData(train_set, test_set, len(train_set.classes))


def _load_image_folder(root: Path, train: Transform, test: Transform) -> VitData:
    from torchvision.datasets import ImageFolder

    folders = [root / "train", next((root / name for name in ("val", "test") if (root / name).is_dir()), root / "val")]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise MissingDataError(
            f"no directory {' and no '.join(missing)}.\nimagefolder reads {root}/train/<class>/<image> and "
            f"{root}/val/<class>/<image> (or test instead of val); --data-root or $DATA names another place than {root}"
        )
    train_set, test_set = ImageFolder(folders[0], transform=train), ImageFolder(folders[1], transform=test)
    if train_set.classes != test_set.classes:
        odd = sorted(set(train_set.classes) ^ set(test_set.classes))
        raise MissingDataError(
            f"{folders[0]} and {folders[1]} need the same class directories, but only one of them has: {', '.join(odd)}"
        )
    return VitData(train_set, test_set, len(train_set.classes))


def _spread(samples: Dataset[Any], most: int) -> Dataset[Any]:
    total = len(samples)  # type: ignore[arg-type]  # all sets here have a length
    return samples if total <= most else Subset(samples, [i * total // most for i in range(most)])


def _to_rgb(image: Image.Image) -> Image.Image:
    """Some of Caltech101's images are grey."""
    return image.convert("RGB")


def _train_transform(size: int) -> Transform:
    from torchvision import transforms

    return _compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()])


def _test_transform(size: int) -> Transform:
    from torchvision import transforms

    return _compose([transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)])


def _compose(steps: list[Any]) -> Transform:
    from torchvision import transforms

    last = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    composed: Transform = transforms.Compose([_to_rgb, *steps, *last])
    return composed
