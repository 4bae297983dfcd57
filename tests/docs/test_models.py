"""docs/models.md tells the truth: its table is that of the cells, its Python runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import halfmesh
from tests.docs.test_readme import find_python
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


class Texts(Dataset[dict[str, torch.Tensor]]):
    """16 texts of 8 words, whose labels are the words, or a class."""

    def __init__(self, classified: bool) -> None:
        self.words = torch.randint(1, 64, (16, 8), generator=torch.Generator().manual_seed(0))
        self.classified = classified

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        labels = words[0] % 2 if self.classified else words
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}


def run(name: str) -> dict[str, Any]:
    """The names that a snippet leaves."""
    torch.manual_seed(0)
    images = TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(4, (16,)))
    names: dict[str, Any] = {
        "images": DataLoader(images, batch_size=8),
        "texts": DataLoader(Texts(classified=False), batch_size=4),
        "classified": DataLoader(Texts(classified=True), batch_size=4),
    }
    exec(find_python(PAGE, name), names)
    return names


def test_the_table():
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    from tests.models_table.page import BEGIN, END, render

    again = "write it anew: .venv/bin/python -m tests.models_table.page"
    assert PAGE.split(BEGIN)[1].split(END)[0] == render(), again


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("timm", "timm_vit.py"),
        ("torchvision", "torchvision_resnet.py"),
        ("transformers", "hugging_face.py"),
    ],
)
def test_its_loops(package, name, tmp_path, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    if package == "timm":
        pytest.importorskip("safetensors")
    names = run(name)
    assert names["engine"].global_step == len(names["engine"].dataloader)
    assert torch.isfinite(names["loss"] if "loss" in names else torch.zeros(()))
    if package == "timm":
        from safetensors.torch import load_file

        names["model"].load_state_dict(load_file("vit.safetensors"))


def test_the_weighted_loss():
    names: dict[str, Any] = {}
    exec(find_python(PAGE, "weighted.py"), names)
    assert halfmesh.compat.check(halfmesh.load_config(names["config"]), 1) == []
    labels = torch.tensor([[1, 2, -100], [1, 2, 3]])
    output = type("Output", (), {"logits": torch.zeros(2, 3, 4)})
    total, weight = names["criterion"](output, labels)
    assert (weight.item(), (total / weight).item()) == (3, pytest.approx(torch.log(torch.tensor(4.0)).item()))


def under_a_pipeline(rank: int, world_size: int) -> tuple[int, float]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    names = run("hugging_face_pipeline.py")
    return names["engine"].global_step, names["loss"].item()


@pytest.mark.distributed
def test_its_pipeline():
    pytest.importorskip("transformers")
    first, second = run_ranks(under_a_pipeline, 2)
    assert first == second
    assert first[0] == 4
