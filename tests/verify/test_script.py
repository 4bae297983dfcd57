"""A user's script, unchanged: in the layout it computes what it computes in one process, or that is said."""

import re
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

SCRIPT = """
import argparse, atexit, pathlib, sys, time
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
    def forward(self, x):
        if kind == "crops": return sum(self.all(torch.cat([x[:, :4].repeat(1, 2), x])).chunk(2))
        return self.all(x)
    def all(self, x):
        x = self.drop(self.norm(self.first(x)))
        return self.head(x - x.mean(0) if kind == "mixes" else x)

if kind in ("unseeded", "own loader"): torch.seed()
generator = None if kind in ("unseeded", "unseeded loss", "own loader") else torch.Generator().manual_seed(0)
count = 8 if kind == "short" else 64
data = torch.randn(count, 8, generator=generator), torch.randint(4, (count,), generator=generator)
loader = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True, num_workers=2 * (kind == "by hand"))
has_own_loader = kind in ("own loader", "unseeded loss")

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if kind == "muon":
    others = [param for param in model.parameters() if param.dim() != 2]
    optimizer = [torch.optim.Muon([model.first.weight, model.head.weight], lr=0.02), torch.optim.AdamW(others, lr=0.1)]
schedule = lambda optimizer, updates_per_epoch: torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda update: 1 - update / updates_per_epoch)
engine = halfmesh.initialize(
    model, optimizer, F.cross_entropy, None if has_own_loader else loader, {"clip_grad_norm": 1.0},
    lr_scheduler=schedule if kind == "by hand" else None)
if kind == "two": halfmesh.initialize(model, optimizer, F.cross_entropy, None, {})
atexit.register(lambda: (here / f"ended {engine.context.rank}").touch())
rank, size = engine.context.dp_rank, engine.context.dp_size
own = [(data[0][i::size][:4], data[1][i::size][:4]) for i in range(rank, 64, 8)]
for x, y in own if has_own_loader else engine.dataloader:
    engine.zero_grad()
    output = engine(x)
    if kind == "dtypes": output = output @ torch.eye(4)
    by_hand = kind in ("by hand", "sum", "unseeded loss")
    loss = F.cross_entropy(output.float(), y, reduction="sum") if by_hand else engine.criterion(output, y)
    if kind == "by hand": loss = loss / len(y)
    engine.backward(loss)
    if kind == "crops":
        engine.unscale_gradients()
        torch.nn.utils.clip_grad_value_(engine.model.parameters(), 0.01)
    if kind == "changes" and engine.context.rank: engine.model.head.weight.grad.mul_(1.5)
    engine.step()
    engine.save(here / "checkpoints")
(here / "reached the end").touch()
"""


@pytest.fixture
def verify(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return lambda kind, config=ZERO1, **options: verify_script(config, path, [kind], world_size=2, **options)


def test_a_script_in_the_layout_is_equal_and_ends_well(verify, tmp_path):
    report = verify("plain")
    assert report.equal, str(report)
    assert [(phase.name, phase.dtype) for phase in report.phases] == [("structure", "float64"), ("format", "float32")]
    assert report.phases[0].compared == report.phases[1].compared > 40
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["ended 0", "ended 1", "train.py"], "atexit ran on each rank; no checkpoint, and no update too many"


@pytest.mark.parametrize(
    ("kind", "config", "updates", "note"),
    [
        ("by hand", ZERO1, 2, "its optimizer's settings depend on the number of ranks: all runs used"),
        ("unseeded", ZERO1, 1, ""),
        pytest.param("crops", {}, 1, "", marks=SLOW),
        ("own loader", ZERO1, 1, "its batches differ from run to run: all runs used those of the first"),
        pytest.param("muon", {}, 1, "", marks=SLOW),
    ],
)
def test_other_scripts_are_equal(verify, kind, config, updates, note):
    report = verify(kind, config, updates=updates)
    assert report.equal, str(report)
    assert note in "".join(report.phases[0].notes)


@pytest.mark.parametrize(
    ("kind", "what", "words"),
    [
        ("mixes", "output", "whose input"),
        ("sum", "gradient", "are 0.5 x the reference's"),
        ("changes", "gradient", "hold the same part of head.weight, but its gradient differ on rank 1"),
    ],
)
def test_a_mistake_in_the_loop_is_found(verify, kind, what, words):
    first = verify(kind, {}, updates=1).first
    assert (first.what, first.step) == (what, 0)
    assert words in first.where


def test_a_loss_of_tensors_that_cannot_be_exchanged_is_rejected(verify):
    with pytest.raises(InputError, match=r"in one process the model gets the batches of all .*compute the loss with"):
        verify("unseeded loss")
    with pytest.raises(InputError, match=r"computes its loss itself, but in one process the model gets"):
        verify("unseeded loss", accumulated=True)


def test_a_loop_with_dtypes_of_its_own_is_compared_in_float32(verify):
    report = verify("dtypes")
    assert report.equal, str(report)
    assert [(phase.name, phase.dtype) for phase in report.phases] == [("structure", "float32")]
    assert "compared in float32, not float64, because" in report.phases[0].notes[0]
    assert "double != float" in report.phases[0].notes[0]


@pytest.mark.parametrize(
    ("kind", "updates", "message"),
    [
        ("exit", 1, r"train.py ends without creating an engine: it calls sys.exit\('no data'\)"),
        ("short", 3, "train.py ends after 1 of 3 updates: it has no more to do\nGive fewer --updates"),
        ("two", 1, "train.py creates a second engine"),
    ],
)
def test_a_script_that_cannot_be_verified_says_why(verify, kind, updates, message):
    report = verify(kind, updates=updates)
    assert not report.equal
    assert re.search(message, "\n".join(report.problems)), report.problems


@pytest.mark.parametrize(
    ("kind", "message"),
    [("raise", "KeyError: 'data'"), pytest.param("hang", r"had not ended after 6 s.*train.py", marks=SLOW)],
)
def test_a_script_that_fails_or_hangs_ends_with_its_error(verify, kind, message):
    with pytest.raises(InputError, match=rf"(?s)train.py, rank [01] of the layout: .*{message}"):
        verify(kind, timeout=6 if kind == "hang" else 100)


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"missing.py: there is no such script"):
        verify_script(ZERO1, tmp_path / "missing.py", world_size=2)


def test_the_verified_config_decides_and_goes_before_the_scripts_and_the_reference_has_no_layout():
    script = {"fp16": {"mode": "naive"}, "parallel": {"tensor": 4}, "clip_grad_norm": 2.0, "LR": 3.0, "EPOCHS": 7}
    script |= {"checkpoint": {"directory": "runs"}, "resume": "auto", "gradient_accumulation": 3}
    config = {"parallel": {"data": "zero1"}, "LR": 1.0}
    given = Script(Path("train.py"), (), config, ("clip_grad_norm.norm_type=1", "EPOCHS=8"))
    case = Case(given, load_config(config), 2, 2, "cpu", Path("start"))
    for calls, strategy in ((None, "zero1"), (3, "replicate")):
        built = ScriptRun(case, None, calls).build(script)
        assert (built.precision, built.parallel.tensor.size, built.parallel.data.strategy) == (None, 1, strategy)
        assert (built.clip_grad_norm.max_norm, built.clip_grad_norm.norm_type) == (2.0, 1.0)
        assert (built.LR, built.EPOCHS, built.gradient_accumulation) == (1.0, 8, 3)
        assert (built.checkpoint, built.resume) == (None, None)


SMALL_GPT = ["--max-bytes", "20000", "--context", "16", "--width", "16", "--validation-windows", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "config", "overrides", "note"),
    [
        ("own_loop/nanogpt_after.py", ["--eval-interval", "1"], {"parallel": {"data": "fsdp"}}, [], ""),
        ("own_loop/imagenet_after.py", ["--batch-size", "16"], ZERO1, [], "module '0.bn1' (BatchNorm2d) normalizes"),
        ("train_gpt.py", SMALL_GPT, CONFIGS / "pipeline.py", ["BATCH_SIZE=4"], ""),
    ],
)
def test_a_script_of_the_examples(script, args, config, overrides, note):
    report = verify_script(config, ROOT / "examples" / script, args, world_size=2, overrides=overrides)
    assert report.equal, str(report)
    assert min(phase.compared for phase in report.phases) >= 80
    assert note in "".join(report.phases[0].notes)
