"""A user's script, unchanged: what it trains is equal in the layout, or that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmesh.config.load import load_config
from halfmesh.errors import InputError
from halfmesh.verify.phases import verify_script
from halfmesh.verify.script import Script, ScriptRun
from halfmesh.verify.subject import Case
from tests.support.example_runs import CONFIGS, ROOT

pytestmark = pytest.mark.distributed

SLOW = pytest.mark.slow
ZERO1 = {"parallel": {"data": "zero1"}}
MLP_PLAN = {"size": 2, "plan": {"fc1": "colwise", "fc2": "rowwise"}}

SCRIPT = """
import argparse, pathlib, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import halfmesh

parser = argparse.ArgumentParser()
parser.add_argument("kind")
kind = parser.parse_args().kind
here = pathlib.Path(__file__).parent
if kind == "exit": sys.exit("no data")
if kind == "raise": raise KeyError("data")
if kind == "hang": time.sleep(1000)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, 4)
    def forward(self, x, *, scale=1.0):
        x = self.drop(self.norm(self.first(x * scale)))
        return self.head(x - x.mean(0) if kind == "mixes" else x)

data = torch.randn(64, 8), torch.randint(4, (64,))
loader = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True, num_workers=2 * (kind == "names"))

def criterion(output, target):
    output = output - output.mean(0) if kind == "in batch" else output
    return F.cross_entropy(output, target)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if kind == "muon":
    others = [param for param in model.parameters() if param.dim() != 2]
    optimizer = [torch.optim.Muon([model.first.weight, model.head.weight], lr=0.02), torch.optim.AdamW(others, lr=0.1)]
engine = halfmesh.initialize(model, optimizer, criterion, loader, {"clip_grad_norm": 1.0})
if kind == "two": halfmesh.initialize(model, optimizer, criterion, None, {})
for x, y in engine.dataloader:
    engine.zero_grad()
    output = engine(x, scale=0.5) if kind == "names" else engine(x)
    loss = F.cross_entropy(output @ torch.eye(4), y) if kind == "own loss" else engine.criterion(output, y)
    engine.backward(loss)
    engine.step()
    engine.save(here / "checkpoints")
(here / "reached the end").touch()
"""


@pytest.fixture
def verify(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return lambda kind, config=ZERO1, **options: verify_script(config, path, [kind], world_size=2, **options)


def test_a_script_is_equal_and_saves_nothing(verify, tmp_path):
    report = verify("names")
    assert report.equal, str(report)
    assert [(phase.name, phase.dtype) for phase in report.phases] == [("structure", "float64"), ("format", "float32")]
    assert min(phase.compared for phase in report.phases) > 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"], "no checkpoint, and no update too many"


@pytest.mark.parametrize(
    ("kind", "options", "note"),
    [
        ("own loss", {}, "its loss is not that of engine.criterion(engine(...), ...): another one took its place"),
        pytest.param("muon", {}, "", marks=SLOW),
        pytest.param("in batch", {"accumulated": True}, "as asked: compared with one process", marks=SLOW),
    ],
)
def test_other_scripts_are_equal(verify, kind, options, note):
    report = verify(kind, updates=1, **options)
    assert report.equal, str(report)
    assert note in "".join(report.phases[0].notes)


def test_rows_that_are_mixed_are_found_in_their_module(verify):
    first = verify("mixes").first
    assert (first.what, first.step, "whose input" in first.where, "head" in first.where) == ("output", 0, True, True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", r"train.py ends without an update of an engine: it calls sys.exit\('no data'\)"),
        ("two", "train.py creates a second engine"),
        ("raise", r"(?s)train.py.*KeyError: 'data'"),
        pytest.param("hang", r"(?s)had not ended after 8 s.*train.py", marks=SLOW),
    ],
)
def test_a_script_that_cannot_be_verified_says_why(verify, kind, message):
    with pytest.raises(InputError, match=message):
        verify(kind, timeout=8 if kind == "hang" else 100)


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"missing.py: there is no such script"):
        verify_script(ZERO1, tmp_path / "missing.py", world_size=2)


def test_the_verified_config_decides_and_the_script_gets_that_of_one_process_without_checkpoints():
    script = {"fp16": {"mode": "naive"}, "parallel": {"tensor": 4}, "clip_grad_norm": 2.0, "LR": 3.0, "EPOCHS": 7}
    script |= {"checkpoint": {"directory": "runs"}, "resume": "auto", "gradient_accumulation": 3}
    config = {"bf16": {"mode": "naive"}, "parallel": {"data": "zero1"}, "LR": 1.0}
    given = Script(Path("train.py"), (), config, ("clip_grad_norm.norm_type=1", "EPOCHS=8"))
    run = ScriptRun(Case(given, load_config(config), 2, 2, "cpu", Path("start")), trains=True)
    alone, merged = run.build(script), run.config
    assert (alone.precision, alone.parallel.data.strategy, alone.checkpoint, alone.resume) == (
        None,
        "replicate",
        None,
        None,
    )
    assert (merged.precision.label, merged.parallel.tensor.size, merged.parallel.data.strategy) == ("naive", 1, "zero1")
    assert (merged.clip_grad_norm.max_norm, merged.clip_grad_norm.norm_type) == (2.0, 1.0)
    assert (merged.LR, merged.EPOCHS, merged.gradient_accumulation) == (1.0, 8, 3)


SMALL_GPT = ["--max-bytes", "20000", "--context", "16", "--width", "16", "--validation-windows", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "config", "overrides", "note"),
    [
        ("own_loop/mnist_after.py", [], {"parallel": {"tensor": MLP_PLAN}}, [], ""),
        ("own_loop/nanogpt_after.py", ["--eval-interval", "1"], {"parallel": {"data": "fsdp"}}, [], ""),
        ("own_loop/dino_after.py", [], {"fp16": {"mode": "torch"}}, [], "another one took its place"),
        ("own_loop/modded_after.py", [], {"bf16": {"mode": "torch"}}, [], ""),
        ("own_loop/imagenet_after.py", ["--batch-size", "16"], ZERO1, [], "module '0.bn1' (BatchNorm2d) normalizes"),
        ("train_vit.py", ["--limit", "64"], CONFIGS / "torch_bf16.py", ["BATCH_SIZE=8"], ""),
        ("train_gpt.py", SMALL_GPT, CONFIGS / "pipeline.py", ["BATCH_SIZE=4"], ""),
    ],
)
def test_a_script_of_the_examples(script, args, config, overrides, note):
    report = verify_script(config, ROOT / "examples" / script, args, world_size=2, overrides=overrides)
    assert report.equal, str(report)
    assert min(phase.compared for phase in report.phases) >= 80
    assert note in "".join(report.phases[0].notes)
