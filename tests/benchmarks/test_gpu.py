"""What is computed for a GPU without one, and the page that says that nothing was measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu
from benchmarks.gpu_figures import SYNC_EVENTS, GpuRow, Shape, mfu, peak_flops, render, update_bytes, waits
from benchmarks.gpu_works import MODES, gpt, tiny_works, vit
from benchmarks.harness import AGAIN, FUSED, HALFMESH, LOOP


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


def test_sizes_are_those_of_their_names():
    work = gpt("GPT of 124 M, batch 8 x 1024", 12, 768, 8)
    with torch.device("meta"):
        numbers = sum(param.numel() for param in work.work.build().parameters())
    assert numbers == pytest.approx(124.5e6, rel=0.005)
    # ViT-B/16 at 224 is known for 17.6 G products and sums an image
    assert vit("", "vit_base_patch16_224", 1).shape.step_flops / 6 == pytest.approx(17.6e9, rel=0.01)


def test_peaks():
    assert peak_flops("NVIDIA H100 80GB HBM3", half=True) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", half=True) == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", half=False) == 19.5e12
    assert peak_flops("NVIDIA A10", half=True) == 125e12
    assert peak_flops("NVIDIA L40S", half=True) == 362e12
    assert peak_flops("Some other device", half=True) is None


def test_mfu():
    shape = Shape(((1000, 10),), layers=2, width=4, length=5, batch=2)
    assert shape.step_flops == 6 * 1000 * 10 + 12 * 2 * 4 * 5 * 10
    assert mfu(shape, shape.step_flops / 989e12, "NVIDIA H200", half=True) == pytest.approx(1.0)
    assert mfu(shape, 1.0, "unknown", half=True) is None


def test_bytes_of_an_update():
    assert update_bytes(10, masters=False) == 10 * (4 + 4 + 12 + 12)  # norm, gradient, read, written
    assert update_bytes(10, masters=False, clip=False) == 10 * 28
    assert update_bytes(10, masters=True) == 10 * (2 + 2 + 12 + 12 + 2)


def test_page_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "results" / "gpu.md")])
    gpu.main()
    assert "nothing was measured" in capsys.readouterr().out
    page = (tmp_path / "results" / "gpu.md").read_text()
    assert "no CUDA device here: nothing was measured" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and "mode" not in line]
    assert len(rows) == 5
    assert all("| not measured |" in line for line in rows)


def test_a_row_of_the_table():
    row = GpuRow("a model", "fp32", False, HALFMESH, "0.9 [0.8, 1.0]", "0.95", 0.5, 0.2, 100, 0.1)
    row.syncs, row.bytes_per_parameter, row.mfu = dict.fromkeys(SYNC_EVENTS, 0.0), 16.25, 0.4
    assert f"| fp32 | no | {HALFMESH} | 0.9 [0.8, 1.0] | 0.95 | 500 | 2 | 0, 0 | 16.2 | 40.0% |" in render([row], [])


def test_measuring_runs_with_a_tiny_model():
    """On the CPU: the same code but for the device's own clocks and memory."""
    rows = gpu.measure(tiny_works()[1], MODES[2], False, "cpu", 2, bandwidth=1e9)
    assert [row.name for row in rows] == [LOOP, AGAIN, FUSED, HALFMESH]
    assert [row.missing for row in rows] == [""] * 4
    assert all(row.seconds and row.tail and row.tail_bound == row.parameters * 32 / 1e9 for row in rows)


def test_what_halfmesh_has_not_is_a_line_of_the_table(monkeypatch):
    def lacking(*_):
        raise NotImplementedError("not built yet:\n  - compile: True is not built yet")

    monkeypatch.setattr(gpu, "make_halfmesh", lacking)
    monkeypatch.setattr(gpu, "_side_by_side", lambda rows, each, *_: measured.extend(name for name, _ in each))
    measured = []
    rows = gpu.measure(tiny_works()[1], MODES[0], False, "cpu", 2, bandwidth=1e9)
    assert [row.missing for row in rows] == ["", "", "", "compile: True is not built yet"]
    assert measured == [LOOP, AGAIN, FUSED]


def test_without_memory_the_case_is_a_line(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu, "_side_by_side", full)
    rows = gpu.measure(tiny_works()[1], MODES[0], False, "cpu", 2, bandwidth=1e9)
    assert {row.missing for row in rows} == {"not enough memory for all contenders side by side"}


def test_waits_are_counted():
    """Not what looks like one: step counters on the host, and copies to it that nobody waits for."""
    seen = {"cudaLaunchKernel": 90, "cudaStreamSynchronize": 6, "aten::_local_scalar_dense": 58, "Memcpy DtoH": 3}
    assert waits(seen, steps=3) == {"cudaStreamSynchronize": 2.0, "cudaEventSynchronize": 0.0}
    assert waits({"aten::mul": 3}, steps=3) == {}


def test_a_device_that_is_not_seen_is_a_dash():
    counts = gpu.count_syncs(gpu.Contender("a", lambda: torch.ones(1), torch.nn.Identity()), torch.device("cpu"), 2)
    assert counts == {}
    row = GpuRow("a model", "fp32", False, HALFMESH, "0.9", "0.95", 0.5, 0.2, 100, 0.1)
    assert "| 2 | - | - | - |" in render([row], [])


@pytest.mark.parametrize("without", [LOOP, FUSED])
def test_a_first_row_without_memory_leaves_the_others(without, monkeypatch):
    """Alone it may have none, and side by side the rest has."""
    makers = gpu.makers

    def full():
        raise torch.OutOfMemoryError("no memory")

    def some(*args):
        return [(name, full if name == without else make) for name, make in makers(*args)]

    monkeypatch.setattr(gpu, "makers", some)
    rows = gpu.measure(tiny_works()[1], MODES[2], False, "cpu", 2, bandwidth=1e9)
    assert {row.name: row.missing for row in rows if row.missing} == {without: "not enough memory"}
    assert all(row.seconds for row in rows if row.name != without)
    assert all(bool(row.ratio) == (without != LOOP) for row in rows if not row.missing)


def test_bandwidth_is_of_reads_and_writes():
    assert gpu.measure_bandwidth("cpu", 1 << 20) > 0
