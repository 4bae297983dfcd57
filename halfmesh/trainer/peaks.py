"""Peak throughput of devices."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """FLOP/s of dense matrix products: half precision and TF32 on tensor cores, and fp32."""

    half: float
    tf32: float
    fp32: float


# By the device's name, from NVIDIA's data sheets; half of the values "with sparsity". V100 and T4 have no TF32.
PEAK_FLOPS = {
    "B200": Peak(2250e12, 1125e12, 75e12),
    "H200": Peak(989e12, 494e12, 67e12),
    "H100 PCIe": Peak(756e12, 378e12, 51e12),
    "H100 NVL": Peak(835e12, 417e12, 60e12),
    "H100": Peak(989e12, 494e12, 67e12),
    "A100": Peak(312e12, 156e12, 19.5e12),
    "L40S": Peak(362e12, 183e12, 91.6e12),
    "L40": Peak(181e12, 90.5e12, 90.5e12),
    "L4": Peak(121e12, 60e12, 30.3e12),
    "A10G": Peak(70e12, 35e12, 35e12),
    "A10": Peak(125e12, 62.5e12, 31.2e12),
    "T4": Peak(65e12, 8.1e12, 8.1e12),
    "V100": Peak(125e12, 15.7e12, 15.7e12),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of `device` in `dtype`; None if unknown.

    fp32 counts as TF32 if torch may use it: `torch.backends.cuda.matmul.fp32_precision`.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)
    if peak is None:
        return None
    single = peak.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else peak.fp32
    return {torch.float16: peak.half, torch.bfloat16: peak.half, torch.float32: single}.get(dtype)
