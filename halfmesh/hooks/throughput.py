"""How fast training is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from ..trainer.hook import Hook

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer

# Dense half-precision matrix products of tensor cores, FLOP/s, from NVIDIA's data sheets; by the device's name.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "T4": 65e12,
    "V100": 125e12,
}


class ThroughputHook(Hook):
    """Adds to records, over all data ranks and the time since the last record: "samples_per_s"; with `tokens`,
    "tokens_per_s"; with `flops_per_sample`, "model_flops_per_s" and, on devices of `PEAK_FLOPS`, "mfu", the share of
    what all ranks' devices could do. Evaluations and saves are not counted.

    Args:
        tokens: how many tokens a batch has, from the Outcome.
        flops_per_sample: floating point operations of forward and backward of one sample, a multiplication and an
            addition being two (a transformer without embeddings: 6 x parameters x tokens, Kaplan et al. 2020,
            https://arxiv.org/abs/2001.08361); recomputed ones do not count.
    """

    def __init__(self, tokens: Callable[[Outcome], int] | None = None, flops_per_sample: float | None = None) -> None:
        if flops_per_sample is not None and not flops_per_sample > 0:
            raise InputError(f"flops_per_sample={flops_per_sample!r}: expected a number greater than 0")
        self._tokens, self._flops = tokens, flops_per_sample
        self._reset()

    def _reset(self) -> None:
        self._count = [0, 0]
        self._elsewhere = 0.0
        self._begin = time.perf_counter()
        self._left = 0.0

    def before_fit(self, trainer: Trainer) -> None:
        self._reset()

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        self._count[0] += outcome.rows
        if self._tokens is not None:
            self._count[1] += self._tokens(outcome)

    def before_eval(self, trainer: Trainer) -> None:
        self._left = time.perf_counter()

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        self._come_back()

    def before_save(self, trainer: Trainer) -> None:
        self._left = time.perf_counter()

    def after_save(self, trainer: Trainer, path: Any) -> None:
        self._come_back()

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        context = trainer.engine.context
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        seconds = time.perf_counter() - self._begin - self._elsewhere
        counts = torch.tensor([*self._count, seconds], dtype=torch.float64, device=context.device)
        context.all_reduce(counts, "dp")
        rows, tokens, total = counts.tolist()
        seconds = total / context.dp_size
        self._reset()
        measured = {"samples_per_s": rows / seconds}
        if self._tokens is not None:
            measured["tokens_per_s"] = tokens / seconds
        if self._flops is not None:
            measured["model_flops_per_s"] = flops = rows * self._flops / seconds
            peak = _peak_flops(context.device)
            if peak is not None:
                measured["mfu"] = flops / (peak * context.size)
        return measured

    def _come_back(self) -> None:
        self._elsewhere += time.perf_counter() - self._left


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in PEAK_FLOPS.items() if known in name), None)
