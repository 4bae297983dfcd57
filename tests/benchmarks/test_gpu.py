"""What is computed for a GPU without one, and the page that says that nothing was measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu
from benchmarks.gpu_figures import Shape, mfu, peak_flops
from benchmarks.gpu_works import gpt, tiny_works


@pytest.mark.parametrize("work", [gpt("", 2, 64, 3, length=16, vocabulary=128, head_size=32), *tiny_works()])
def test_flops_are_those_that_torch_counts(work):
    """But for the first layer, whose input has no gradient: its backward has one product and not two."""
    model = work.work.model()
    x, y = work.work.batch()
    # Flash attention computes its products again in backward, which is not a model's FLOPs.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work.work.criterion(model(x), y).backward()
    stem = 2 * work.shape.weights[1][0] * work.shape.weights[1][1] if len(work.shape.weights) > 1 else 0
    assert counter.get_total_flops() == work.shape.step_flops - stem


def test_peaks_and_utilization():
    assert peak_flops("NVIDIA H100 80GB HBM3", half=True) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", half=True) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", half=False) == 19.5e12
    assert peak_flops("Some other device", half=True) is None
    shape = Shape(((1000, 10),), layers=2, width=4, length=5, batch=2)
    assert shape.step_flops == 6 * 1000 * 10 + 12 * 2 * 4 * 5 * 10
    assert mfu(shape, shape.step_flops / 989e12, "NVIDIA H200", half=True) == pytest.approx(1.0)


def test_page_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "results" / "gpu.md")])
    gpu.main()
    page = (tmp_path / "results" / "gpu.md").read_text()
    assert "no CUDA device here: nothing was measured" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "mode" not in line]
    assert len(rows) == 5
    assert all("| not measured |" in line for line in rows)
