"""What --model names, and what it is called with."""

from __future__ import annotations

import pytest
import torch

from halfmesh import torch_private
from halfmesh.errors import InputError
from halfmesh.plan.subject import make, read_tensor

MODULE = """
import halfmesh
import torch
from torch import nn
MODEL = nn.Linear(2, 2)
def build(): return nn.Linear(2, 2)
def deferred():
    with halfmesh.deferred_init():
        return nn.Linear(2, 2)
def with_inputs(): return nn.Linear(2, 2), torch.zeros(6, 2)
def with_criterion(): return nn.Linear(2, 2), (torch.zeros(6, 2), torch.zeros(6, 2)), nn.MSELoss()
def fails(): return nn.Linear(2, 2).weight.sum().item()
def returns_text(): return "a model"
def four(): return nn.Linear(2, 2), 1, 2, 3
def no_pair(): return nn.Linear(2, 2), torch.zeros(6, 2), nn.MSELoss()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with torch_private.dry_run_mode():
        yield


def test_a_model_alone():
    subject = make("my_models:build")
    assert torch_private.has_no_memory(subject.model.weight)
    assert subject.model.weight.device.type == "cpu"
    assert subject.inputs is None
    assert subject.rows == 0


def test_a_model_that_is_deferred_already():
    subject = make("my_models:deferred")
    assert torch_private.has_no_memory(subject.model(torch.ones(1, 2)))
    assert subject.model.weight.device.type == "cpu"


def test_inputs_and_criterion():
    assert make("my_models:with_inputs").rows == 6
    subject = make("my_models:with_criterion")
    assert subject.targets.shape == (6, 2)
    assert not subject.targets.is_meta
    assert subject.criterion(subject.model(subject.inputs), subject.targets).dim() == 0
    smaller = subject.with_rows(2)
    assert smaller.inputs.shape == smaller.targets.shape == (2, 2)


def test_a_batch_given_takes_the_place_of_that_of_build():
    subject = make("my_models:with_criterion", ("8,2", "8:bool"))
    assert [tuple(tensor.shape) for tensor in subject.inputs] == [(8, 2), (8,)]
    assert subject.criterion is None
    assert subject.call == (subject.inputs, {})


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("my_models", "name a function as package.module:build"),
        ("my_model:build", "there is no module 'my_model'; did you mean 'my_models'?"),
        ("my_models:bild", "my_models.bild does not exist; did you mean 'build'?"),
        ("my_models:MODEL", "my_models.MODEL is no function"),
        ("my_models:fails", r"it raised RuntimeError: .*load no weights"),
        ("my_models:returns_text", "it returned str; let it return the model"),
        ("my_models:four", r"it returned \(Linear, int, int, int\)"),
        ("my_models:no_pair", r"the second has to be \(inputs, targets\)"),
        ("needs_more:build", "needs_more needs 'a_package_nobody_has', which is missing"),
        ("broken:build", "importing broken raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_model(reference, words):
    with pytest.raises(InputError, match=words):
        make(reference)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8,2:int46", "'int46' is no dtype; did you mean 'int64'"),
        ("8x2", "'8x2' is not a shape; write --batch 8,2048:int64"),
        ("0,2", "'0,2' is not a shape"),
        ("", "'' is not a shape"),
    ],
)
def test_what_is_no_batch(text, words):
    with pytest.raises(InputError, match=words):
        read_tensor(text)


def test_shapes_and_dtypes():
    assert read_tensor("8,3").dtype == torch.float32
    assert read_tensor("8, 3:int64").shape == (8, 3)
