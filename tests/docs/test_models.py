"""What docs/models.md, memory.md and planning.md show: it runs, and the numbers are measured again."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.support.models import make_engine
from tests.support.pages import check, find_blocks, find_rows, read_page, stand_ins
from tests.support.saved_memory import bytes_left

pytestmark = pytest.mark.slow


def test_models_that_are_built_later(run):
    images, labels = torch.randn(32, 16), torch.randint(4, (32,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    given = stand_ins() | {"torch": torch, "halfmesh": halfmesh, "config": {}, "dataloader": loader}
    engine = run("memory.md", "build.py", given=given)["engine"]
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    assert engine.global_step == 4


def left_after_a_forward(config):
    torch.manual_seed(0)
    engine = make_engine(config, model=GPT(context=64, width=64, depth=6, num_heads=4, dropout=0.1))
    ids = torch.randint(256, (8, 64))
    engine(ids)
    return bytes_left(lambda: engine(ids)) / 2**20


def test_the_memory_that_activations_leave():
    for form, _, *expected in find_rows(read_page("memory.md"), "value | what is recomputed"):
        config = {"activation_checkpoint": eval(form.strip("`"))}
        for mode, mebibytes in zip(({}, {"bf16": {"mode": "torch"}}), expected, strict=True):
            assert left_after_a_forward(mode | config) == pytest.approx(float(mebibytes), abs=0.006), form


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_dry_runs_of_the_page_about_planning(run):
    """The page shows some lines of what each command prints; versions of torch keep a little more or less."""
    pytest.importorskip("timm")
    run("planning.md", files=("config.py",))
    page = read_page("planning.md")
    commands = re.findall(r"^(halfmesh .*)$", page, re.MULTILINE)
    for command, shown in zip(commands, find_blocks(page, "text"), strict=True):
        printed = [(NUMBER.sub("#", line), numbers_in(line)) for line in check(f"$ {command}").splitlines()]
        for line in shown.splitlines():
            expected = NUMBER.sub("#", line), pytest.approx(numbers_in(line), rel=0.05)
            assert expected in printed, line


def numbers_in(line):
    return [float(number) for number in NUMBER.findall(line)]


def test_a_model_of_timm(run):
    timm = pytest.importorskip("timm")
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.manual_seed(0)
    images = DataLoader(TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(4, (16,))), batch_size=8)
    given = {"timm": timm, "torch": torch, "halfmesh": halfmesh, "criterion": torch.nn.CrossEntropyLoss()}
    names = run("models.md", "timm_vit.py", given=given | {"images": images})
    assert names["engine"].global_step == 2
    names["model"].load_state_dict(load_file("vit.safetensors"))


def test_a_loss_without_all_logits(run):
    forward = run("memory.md", "large_vocabulary.py", given={"halfmesh": halfmesh})["forward"]
    model = type("Bigrams", (nn.Module,), {"forward": forward})()
    model.words, model.head = nn.Embedding(5000, 16), nn.Linear(16, 5000)
    ids, targets = torch.randint(5000, (2, 2, 8))
    engine = halfmesh.initialize(model, torch.optim.AdamW(model.parameters()), None, None, {})
    torch.testing.assert_close(engine(ids, targets), F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()))
    transformers = pytest.importorskip("transformers")
    given = {"LlamaForCausalLM": transformers.LlamaForCausalLM, "halfmesh": halfmesh}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False)
    model = run("models.md", "large_vocabulary.py", given=given)["Llama"](config)
    labels = torch.randint(1, 64, (4, 8))
    loss = model(labels, F.pad(labels, (0, 1), value=-100)[:, 1:])
    torch.testing.assert_close(loss, model(labels, labels=labels).loss)


def test_a_weighted_loss(run):
    names = run("models.md", "weighted.py", given={})
    output = type("Output", (), {"logits": torch.zeros(2, 3, 4)})
    total, weight = names["criterion"](output, torch.tensor([[1, 2, -100], [1, 2, 3]]))
    assert (weight.item(), (total / weight).item()) == (3, pytest.approx(torch.log(torch.tensor(4.0)).item()))


def test_the_table_of_models():
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    from tests.models_table.page import BEGIN, END, render

    again = "write it anew: .venv/bin/python -m tests.models_table.page"
    assert read_page("models.md").split(BEGIN)[1].split(END)[0] == render(), again
