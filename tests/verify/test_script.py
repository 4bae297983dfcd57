"""A user's script, unchanged: in the layout it computes what it computes in one process, or that is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfmesh.config.load import load_config
from halfmesh.errors import InputError
from halfmesh.verify.phases import verify_script
from halfmesh.verify.run import Case
from halfmesh.verify.script import Script, ScriptRun
from tests.support.example_runs import CONFIGS, ROOT

pytestmark = pytest.mark.distributed

EXAMPLES = ROOT / "examples"
ZERO1 = {"parallel": {"data": "zero1"}}
MLP_PLAN = {"size": 2, "plan": {"fc1": "colwise", "fc2": "rowwise"}}

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
if kind == "stdin": input("which data? ")
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

generator = None if kind in ("unseeded", "unseeded loss") else torch.Generator().manual_seed(0)
count = 8 if kind == "short" else 64
data = torch.randn(count, 8, generator=generator), torch.randint(4, (count,), generator=generator)
loader = DataLoader(TensorDataset(*data), batch_size=4, shuffle=True, num_workers=2 * (kind == "workers"))
has_own_loader = kind in ("own loader", "unseeded loss", "other rows")

def criterion(output, target):
    output = output - output.mean(0) if kind == "in batch" else output
    return F.cross_entropy(output, target)

model = Model()
if kind == "batchnorm": model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
if kind == "other rows": model = nn.Linear(8, 4)
if kind == "deferred":
    with halfmesh.deferred_init(): model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if kind == "muon":
    others = [param for param in model.parameters() if param.dim() != 2]
    optimizer = [torch.optim.Muon([model.first.weight, model.head.weight], lr=0.02), torch.optim.AdamW(others, lr=0.1)]
engine = halfmesh.initialize(model, optimizer, criterion, None if has_own_loader else loader, {"clip_grad_norm": 1.0})
if kind == "two": halfmesh.initialize(model, optimizer, criterion, None, {})
atexit.register(lambda: (here / f"ended {engine.context.rank}").touch())
rank, size = engine.context.dp_rank, engine.context.dp_size
own = [(data[0][i::size][:4], data[1][i::size][:4]) for i in range(rank, 64, 8)]
for x, y in own if has_own_loader else engine.dataloader:
    engine.zero_grad()
    output = engine(x)
    if kind == "other rows" and not torch.equal(output, engine.model(x.to(output.dtype))): raise ValueError(kind)
    if kind == "dtypes": output = output @ torch.eye(4)
    loss = F.cross_entropy(output, y) if kind == "unseeded loss" else engine.criterion(output, y)
    engine.backward(loss)
    if kind == "crops":
        engine.unscale_gradients()
        torch.nn.utils.clip_grad_value_(engine.model.parameters(), 0.01)
    engine.step()
    engine.save(here / "checkpoints")
(here / "reached the end").touch()
"""


@pytest.fixture
def verify(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return lambda kind, config=ZERO1, size=2, **options: verify_script(config, path, [kind], world_size=size, **options)


def test_a_script_in_the_layout_is_equal_and_ends_well(verify, tmp_path):
    report = verify("plain")
    assert report.equal, str(report)
    assert [(phase.name, phase.dtype, phase.compared) for phase in report.phases] == [
        ("structure", "float64", report.phases[0].compared),
        ("format", "float32", report.phases[0].compared),
    ]
    assert report.phases[0].compared > 40
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["ended 0", "ended 1", "train.py"], "atexit ran on each rank; no checkpoint, and no update too many"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "config", "size", "options"),
    [
        ("own loader", ZERO1, 2, {}),
        ("unseeded", ZERO1, 2, {}),  # on the batches of its first run
        ("muon", {}, 2, {}),
        ("crops", {}, 2, {}),
        ("in batch", {}, 2, {"accumulated": True}),
        pytest.param("workers", ZERO1, 2, {}, marks=SLOW),
        pytest.param("batchnorm", {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}, 4, {}, marks=SLOW),
        pytest.param("deferred", ZERO1, 2, {}, marks=SLOW),
    ],
)
def test_other_scripts_are_equal(verify, kind, config, size, options):
    report = verify(kind, config, size, updates=1, **options)
    assert report.equal, str(report)


def test_a_loss_of_tensors_that_cannot_be_exchanged_is_rejected(verify):
    with pytest.raises(
        InputError, match=r"computes its loss itself.*compute the loss with engine.criterion\(output, target\)"
    ) as raised:
        verify("unseeded loss")
    assert str(raised.value).count("verify can exchange only") == 1


def test_another_error_after_an_exchange_says_what_is_exchanged(verify):
    with pytest.raises(
        InputError, match=r"(?s)ValueError: other rows.*in one process the model gets the batches of all"
    ):
        verify("other rows")


def test_a_loop_with_dtypes_of_its_own_is_compared_in_float32(verify):
    report = verify("dtypes")
    assert report.equal, str(report)
    assert [(phase.name, phase.dtype) for phase in report.phases] == [("structure", "float32")]
    assert "compared in float32, not float64, because" in report.phases[0].notes[0]
    assert "double != float" in report.phases[0].notes[0]


def test_rows_that_are_mixed_are_found_in_their_module(verify):
    report = verify("mixes")
    assert report.first is not None
    assert (report.first.what, report.first.step) == ("output", 0)
    assert "'norm'" in report.first.where or "drop" in report.first.where
    assert "head" in report.first.where


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
    [
        ("raise", "KeyError: 'data'"),
        pytest.param("stdin", "EOFError", marks=SLOW),
        pytest.param("hang", r"had not ended after 8 s.*train.py", marks=SLOW),
    ],
)
def test_a_script_that_fails_or_hangs_ends_with_its_error(verify, kind, message):
    with pytest.raises(InputError, match=rf"(?s)train.py, rank [01] of the layout: .*{message}"):
        verify(kind, timeout=8 if kind == "hang" else 100)


def test_a_script_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"missing.py: there is no such script"):
        verify_script(ZERO1, tmp_path / "missing.py", world_size=2)


# -- what the script's config becomes --------------------------------------------------------------------------------


def built(raw, calls=None, overrides=(), config=None):
    config = {"parallel": {"data": "zero1"}, "LR": 1.0} if config is None else config
    loaded = load_config(config)
    given = Script(Path("train.py"), (), config, tuple(overrides))
    return ScriptRun(Case(given, loaded, 2, 2, "cpu", Path("start")), None, calls).build(raw)


def test_the_verified_config_decides_precision_and_layout_and_goes_before_the_scripts():
    script = {"fp16": {"mode": "naive"}, "parallel": {"tensor": 4}, "clip_grad_norm": 2.0, "LR": 3.0, "EPOCHS": 7}
    config = built(script, overrides=["clip_grad_norm.norm_type=1", "EPOCHS=8"])
    assert (config.precision, config.parallel.tensor.size, config.parallel.data.strategy) == (None, 1, "zero1")
    assert (config.clip_grad_norm.max_norm, config.clip_grad_norm.norm_type) == (2.0, 1.0)
    assert (config.LR, config.EPOCHS) == (1.0, 8)


def test_nothing_is_written_or_loaded():
    config = built({"checkpoint": {"directory": "runs"}, "resume": "auto"})
    assert (config.checkpoint, config.resume) == (None, None)


def test_the_reference_has_no_layout():
    assert built({"gradient_accumulation": 3}, calls=3).parallel.data.strategy == "replicate"
    assert built({"gradient_accumulation": 3}, calls=3).gradient_accumulation == 3


# -- the scripts of the examples -------------------------------------------------------------------------------------

SMALL_GPT = ["--max-bytes", "20000", "--context", "16", "--width", "16", "--validation-windows", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "config", "overrides", "note"),
    [
        ("own_loop/mnist_after.py", [], {"parallel": {"tensor": MLP_PLAN}}, [], ""),
        ("own_loop/nanogpt_after.py", ["--eval-interval", "1"], {"parallel": {"data": "fsdp"}}, [], ""),
        ("own_loop/dino_after.py", [], {"fp16": {"mode": "torch"}}, [], ""),
        ("own_loop/timm_after.py", [], {"parallel": {"data": "replicate"}}, [], ""),
        ("own_loop/modded_after.py", [], {"bf16": {"mode": "torch"}}, [], ""),
        (
            "own_loop/imagenet_after.py",
            ["--batch-size", "16"],
            ZERO1,
            [],
            "module '0.bn1' (BatchNorm2d) normalizes each rank's batch separately",
        ),
        ("train_vit.py", ["--limit", "64"], CONFIGS / "torch_bf16.py", ["BATCH_SIZE=8"], "settings depend on the"),
        ("train_gpt.py", SMALL_GPT, CONFIGS / "tensor.py", ["BATCH_SIZE=4"], ""),
        ("train_gpt.py", SMALL_GPT, CONFIGS / "pipeline.py", ["BATCH_SIZE=4"], ""),
    ],
)
def test_a_script_of_the_examples(script, args, config, overrides, note):
    report = verify_script(config, EXAMPLES / script, args, world_size=2, overrides=overrides)
    assert report.equal, str(report)
    assert [phase.name for phase in report.phases] == ["structure", "format"]
    assert min(phase.compared for phase in report.phases) >= 80
    assert note in "".join(report.phases[0].notes)
