"""docs/trainer.md: its snippets run, and its tables are right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh import hooks as hooks_module
from halfmesh.trainer.outcome import TARGETS
from tests.docs.test_readme import find_python, stand_ins

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "trainer.md").read_text()


def test_the_loop(tmp_path, monkeypatch):
    pytest.importorskip("torchmetrics")
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    names = stand_ins()
    names["test_dataloader"] = names["eval_dataloader"]
    exec(find_python(PAGE, "train.py"), names)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"loss", "samples_per_s", "lr"} <= set(lines[0])
    assert {"eval_loss", "eval_accuracy"} <= set(lines[-1])
    assert Path("run/checkpoints/best.safetensors").exists()
    assert len(names["outputs"]) == len(names["eval_dataloader"].dataset)


def test_a_compute_and_a_hook_of_ones_own():
    names, records = stand_ins() | {"halfmesh": halfmesh}, []
    exec(find_python(PAGE, "compute.py"), names)
    try:
        exec(find_python(PAGE, "hook.py"), names)

        class Keep(halfmesh.Hook):
            def write(self, trainer, record):
                records.append(record)

        model = names["model"]
        name = next(iter(dict(model.named_parameters())))
        engine = halfmesh.initialize(model, names["optimizer"], names["criterion"], names["dataloader"], {})
        trainer = halfmesh.Trainer(engine, compute=names["f"])
        trainer.fit(epochs=1, hooks=[{"type": "weights", "name": name}, Keep()])
    finally:
        halfmesh.HOOKS.unregister("weights")
    assert records[-1]["weights"] == torch.linalg.vector_norm(model.get_parameter(name)).item()


def test_the_table_of_hooks():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", PAGE, re.MULTILINE)
    listed = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == set(halfmesh.HOOKS.names())
    classes = {name for _, classes in rows for name in re.findall(r"`(\w+)\(", classes)}
    assert classes == set(hooks_module.__all__)


def test_the_names_of_targets():
    assert all(f"`{name}`" in PAGE or f'"{name}"' in PAGE for name in TARGETS)
