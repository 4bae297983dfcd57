"""Colossal-AI's ViT script runs with its imports renamed by the table of docs/migration/colossal-ai.md."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh.errors import InputError
from halfmesh.migration import colossalai
from tests.docs.test_readme import find_rows
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration" / "colossal-ai.md").read_text()
SCRIPT = Path(__file__).with_name("colossal_vit.py").read_text()
CONFIG = """from colossalai.amp import AMP_TYPE

BATCH_SIZE = {rows}
NUM_EPOCHS = 2
fp16 = dict(mode=AMP_TYPE.{mode})
clip_grad_norm = 1.0
gradient_accumulation = {cycle}
"""


def rename_imports(text):
    """Whole lines, by the page's table; nothing else."""
    names = {old.strip("`"): new.strip("`") for old, new in find_rows(PAGE, "old import")}
    lines = [names.get(line, line) for line in text.splitlines()]
    left = [line for line in lines if line.startswith(("import colossalai", "from colossalai"))]
    assert not left, f"the table has no row for {left}"
    return "\n".join(lines) + "\n"


@pytest.fixture
def images(tmp_path):
    """What $DATA names: two classes of three pictures."""
    image = pytest.importorskip("PIL.Image")
    for label in ("ant", "bee"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(3):
            image.new("RGB", (20, 20), (i * 60, 90, 30)).save(tmp_path / "data" / label / f"{i}.png")
    return tmp_path / "data"


def prepare(folder, mode, rows, cycle=1):
    folder.mkdir()
    (folder / "train.py").write_text(rename_imports(SCRIPT))
    (folder / "config.py").write_text(rename_imports(CONFIG.format(mode=mode, rows=rows, cycle=cycle)))
    return folder


def start(folder, images, *arguments):
    """The script, in this process, as `python train.py --config config.py` would run it."""
    code = compile((folder / "train.py").read_text(), "train.py", "exec")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DATA", str(images))
        patch.setattr(sys, "argv", ["train.py", "--config", "config.py", *arguments])
        exec(code, {"__name__": "__main__"})
    colossalai.global_context.destroy()


def start_on_ranks(rank, world_size, runs, images):
    for folder, arguments in runs:
        start(folder, images, *arguments)
        torch.distributed.barrier()
    return accuracy()


def accuracy():
    """Of a model that always answers 1, on 5 samples, of which 3 are 1: data ranks have 3 and 2 of them."""
    model = torch.nn.Linear(1, 2)
    torch.nn.init.zeros_(model.weight)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    samples = torch.utils.data.TensorDataset(torch.zeros(5, 1), torch.tensor([0, 1, 1, 0, 1]))
    with halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config={}, device="cpu") as engine:
        hook = colossalai.hooks.AccuracyHook(accuracy_func=lambda output, target: (output.argmax(1) == target).sum())
        trainer = halfmesh.Trainer(
            engine, compute=lambda e, b: halfmesh.Outcome(loss=None, output=e(b[0]), target=b[1], rows=len(b[0]))
        )
        return trainer.evaluate(torch.utils.data.DataLoader(samples, batch_size=1), hooks=[hook])["eval_accuracy"]


@pytest.mark.distributed
def test_the_script_on_one_and_two_processes(tmp_path, images, caplog):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    one, two = prepare(tmp_path / "one", "TORCH", 4), prepare(tmp_path / "two", "TORCH", 2)
    with_trainer = prepare(tmp_path / "trainer", "NAIVE", 3, cycle=2)
    with caplog.at_level(logging.INFO, "halfmesh"):
        start(one, images)
    measured = run_ranks(start_on_ranks, 2, [(two, []), (with_trainer, ["--use_trainer"])], images, timeout=200)
    assert measured == [0.6, 0.6] == [accuracy()] * 2
    outcomes = [torch.load(folder / "outcome.pt", weights_only=True) for folder in (one, two, with_trainer)]
    assert [found["steps"] for found in outcomes] == [18, 18, 6]
    rates = [pytest.approx(3e-3 * (20 - steps) / (20 - 2)) for steps in (18, 18, 6)]
    assert [found["lr"] for found in outcomes] == rates, "advanced by the script alone, once per update"
    (line,) = [record.message for record in caplog.records if "epoch 1: loss" in record.message]
    assert line.endswith("of 6")
    assert any((with_trainer / "checkpoints").iterdir())


def test_every_new_import_works():
    for _, new in find_rows(PAGE, "old import"):
        exec(new.strip("`"), {})


def test_the_names_are_frozen():
    names = "AMP_TYPE Trainer convert_to_amp get_current_device get_dataloader get_default_parser global_context hooks "
    names += "initialize launch launch_from_openmpi launch_from_slurm launch_from_torch"
    assert sorted(colossalai.__all__) == sorted(names.split())
    assert all(hasattr(colossalai, name) for name in colossalai.__all__)


def test_before_a_launch_and_what_is_not_there():
    colossalai.global_context.destroy()
    with pytest.raises(InputError, match="nothing was launched yet"):
        _ = colossalai.global_context.config
    with pytest.raises(AttributeError, match=r"engine\.context has ranks"):
        colossalai.global_context.get_world_size()
    with pytest.raises(AttributeError, match="no hook 'LogTimingByEpochHook'"):
        _ = colossalai.hooks.LogTimingByEpochHook
    with pytest.raises(InputError, match="a checkpoint is saved after each epoch"):
        colossalai.hooks.SaveCheckpointHook(interval=3, checkpoint_dir="c")


def test_a_scheduler_under_accumulation():
    """Per batch, as in Colossal-AI's loops, and it counts updates."""
    colossalai.launch_from_torch({"gradient_accumulation": 2}, device="cpu", verbose=False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    data = halfmesh.get_dataloader(torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1)))
    engine, batches, evaluation, scheduler = colossalai.initialize(
        model, optimizer, torch.nn.MSELoss(), data, lr_scheduler=plan
    )
    assert evaluation is None
    rates = []
    for x, y in batches:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25]
    assert colossalai.global_context.data_parallel_size == 1
    engine.close()
    colossalai.global_context.destroy()
