"""What the examples measure, show and keep of a run."""

import json
import sys
from types import SimpleNamespace

import gpt_report
import pytest
import run_report
import torch
import vit_report
from PIL import Image

import halfmesh
from halfmesh import ParallelContext
from halfmesh.engine.handles import PipelineLoss, PipelineOutput
from tests.support.ranks import run_ranks

VIT_POINT = vit_report.Point(
    update=1, epoch=0.5, loss=0.25, loss_scale=1024.0, skipped=1, accuracy=50.0, images_per_s=10.0
)
GPT_POINT = gpt_report.Point(
    update=3, epoch=1.0, loss=2.0, loss_scale=1.0, skipped=0, losses=(3.0, 2.0, 1.0), bytes_per_s=9.6
)


def make_engine(**config):
    model = torch.nn.Linear(2, 2)
    return halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)


# --- meters -------------------------------------------------------------------------------------------------------


def test_the_vit_meter():
    with make_engine() as engine:
        meter = vit_report.Meter(engine)
        right, wrong = torch.tensor([[2.0, 1.0]] * 3), torch.tensor([[1.0, 2.0]])
        meter.add(torch.tensor(1.0), right, torch.zeros(3, dtype=torch.int64))
        meter.add(torch.tensor(3.0), wrong, torch.zeros(1, dtype=torch.int64))
        assert meter.batches == 2
        point = meter.take(epoch=0.5)
    assert (point.loss, point.accuracy, point.skipped, point.loss_scale) == (1.5, 75.0, 0, 1.0)
    assert meter.batches == 0


def test_the_gpt_meter_joins_the_batches_of_an_update():
    with make_engine(gradient_accumulation=2) as engine:
        meter = gpt_report.Meter(engine)
        for value, targets in ((1.0, 3), (3.0, 1), (5.0, 2), (7.0, 2)):
            loss = engine(torch.ones(1, 2)).sum() * 0 + value
            engine.backward(loss)
            engine.step()
            meter.add(loss, torch.zeros(1, targets))
        assert (meter.batches, meter.updates) == (4, 2)
        point = meter.take(epoch=1.0)
        assert (meter.batches, meter.updates) == (0, 0)
    assert (point.losses, point.loss, point.update) == ((1.5, 6.0), 3.75, 2)


def test_meters_take_what_a_pipeline_gives():
    output = PipelineOutput(None)
    loss = PipelineLoss(output, None)
    output.settle(lambda: torch.eye(2))
    loss.settle(lambda: torch.tensor(1.5))
    with make_engine() as engine:
        images, text = vit_report.Meter(engine), gpt_report.Meter(engine)
        images.add(loss, output, torch.tensor([0, 0]))
        engine.global_step = 1
        text.add(loss, torch.zeros(2, 3))
        point = images.take(1.0)
        assert (point.loss, point.accuracy) == (1.5, 50.0)
        assert text.take(1.0).losses == (1.5,)


def measure_on_rank(rank, world_size):
    """Two data ranks see other losses than each other; the two ranks of each tensor group see the same."""
    context = ParallelContext(1, 2, torch.device("cpu"))
    engine = SimpleNamespace(context=context, global_step=0, loss_scale=1.0, skipped_steps=0)
    for module in (vit_report, gpt_report):
        module.time = SimpleNamespace(perf_counter=iter([0.0, 2.0, 2.0]).__next__)
    vit, gpt = vit_report.Meter(engine), gpt_report.Meter(engine)
    loss = torch.tensor(1.0 + context.dp_rank)
    vit.add(loss, torch.eye(2), torch.tensor([0, 0]))
    engine.global_step = 1
    gpt.add(loss, torch.zeros(2, 3))
    images, text = vit.take(1.0), gpt.take(1.0)
    context.close()
    return images.loss, images.accuracy, images.images_per_s, text.losses, text.bytes_per_s


def test_meters_count_what_the_data_ranks_see_once():
    assert run_ranks(measure_on_rank, 4) == [(1.5, 50.0, 4 / 2, (1.5,), 12 / 2)] * 4


def test_bits_per_byte():
    assert gpt_report.bits_per_byte(torch.tensor(256.0).log().item()) == pytest.approx(8.0)


# --- reports ------------------------------------------------------------------------------------------------------


def test_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(run_report, "LINE_EVERY_S", 0.0)
    report = vit_report.Report(epochs=2, batches=4, shown=True)
    report.training(VIT_POINT, 2)
    report.test(1, 4, 80.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "epoch 0.50/2  loss 0.250  accuracy  50.0 %  loss scale 1024  skipped 1  10 images/s"
    assert lines[1].endswith("test 80.0 %")


def test_lines_of_text(capsys):
    report = gpt_report.Report(epochs=2, batches=4, shown=True)
    report.training(GPT_POINT, 2)  # soon after the beginning: no line of its own
    report.test(1, 4, 2.0)
    numbers = "update 3  loss 2.000  loss scale 1  skipped 0  10 bytes/s"
    line = f"epoch 1/2  {numbers}  validation loss 2.000, 2.89 bits per byte\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(("module", "point"), [(vit_report, VIT_POINT), (gpt_report, GPT_POINT)])
def test_what_is_kept(module, point, tmp_path):
    report = module.Report(epochs=1, batches=1, shown=True)
    report.training(point, 1)
    report.test(1, 3, 1.5)
    report.write(tmp_path / "a" / "b.png", "title", {"seed": 7})
    with Image.open(tmp_path / "a" / "b.png") as image:
        assert image.size == (1000, 600)
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert metrics["seed"] == 7
    assert metrics["tests"] == [{"update": 3, report.measured: 1.5}]
    assert metrics["training"][0]["loss"] == point.loss


def test_other_ranks_are_silent(capsys, tmp_path):
    report = vit_report.Report(epochs=1, batches=1, shown=False)
    report.training(VIT_POINT, 1)
    report.test(1, 1, 50.0)
    report.write(tmp_path / "a.png", "title", {})
    report.close()
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    report = vit_report.Report(epochs=1, batches=2, shown=True)
    report.training(VIT_POINT, 1)
    report.test(1, 2, 61.5)
    report.close()
    shown = capsys.readouterr().out
    assert "test 61.5 %" in shown
    assert "1/2" in shown
