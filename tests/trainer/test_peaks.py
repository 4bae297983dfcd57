"""Peak throughput of known devices."""

import pytest
import torch

from halfmesh.trainer.throughput import PEAK_FLOPS, peak_flops


@pytest.fixture
def precision():
    """torch's settings; given back."""
    yield torch.backends
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "none"


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda backends: None, "fp32"),
        (lambda backends: setattr(backends, "fp32_precision", "ieee"), "fp32"),
        (lambda backends: setattr(backends, "fp32_precision", "tf32"), "tf32"),
        (lambda backends: setattr(backends.cuda.matmul, "fp32_precision", "tf32"), "tf32"),
        (lambda backends: setattr(backends.cuda.matmul, "allow_tf32", True), "tf32"),
        (lambda backends: torch.set_float32_matmul_precision("high"), "tf32"),
    ],
    ids=["default", "ieee", "tf32", "tf32 of matmul", "allow_tf32", "high"],
)
def test_fp32_counts_as_tf32_where_torch_may_use_it(use, kind, precision, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    use(precision)
    peak = PEAK_FLOPS["A100"]
    device = torch.device("cuda")
    assert peak_flops(device, torch.float32) == getattr(peak, kind)
    assert peak_flops(device, torch.bfloat16) == peak.half
    assert peak_flops(device, torch.float64) is None
