"""Samples, tokens and FLOPs per second, and memory; the peak rates of devices."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ..config.composition import Setup
from ..utils.log import get_logger
from .hook import Hook

if TYPE_CHECKING:
    from .batch import Outcome
    from .trainer import Trainer


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
    peak = next((peak for known, peak in PEAK_FLOPS.items() if re.search(rf"{known}(?!\d)", name)), None)
    if peak is None:
        return None
    single = peak.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else peak.fp32
    return {torch.float16: peak.half, torch.bfloat16: peak.half, torch.float32: single}.get(dtype)


_log = get_logger(__name__)

_WINDOW_S, _WINDOW_BATCHES = 10.0, 20
"""The shortest window for the share of waiting, in seconds and batches: the start of workers must not dominate it."""
_WAITING = 0.3
"""The share of time that may be spent waiting for data. With a loader that keeps up it is almost zero."""


class ThroughputHook(Hook):
    """Adds to records, over all data ranks since the last record: "samples_per_s"; "tokens_per_s" (with `tokens`);
    "model_flops_per_s"; and "mfu" on devices of `PEAK_FLOPS`: the share of the peak of all ranks' devices in the
    config's precision. Does not count evaluations and `trainer.save`. Warns once if training waits for data more than
    30 % of the time.

    Args:
        tokens: returns the number of tokens of a batch, given its Outcome.
        flops_per_sample: floating point operations of forward and backward for one sample; a multiply-add is two. (A
            transformer without embeddings: 6 x parameters x tokens, Kaplan et al. 2020,
            https://arxiv.org/abs/2001.08361.) "auto": torch's `FlopCounterMode` counts operations of all ranks in the
            second batch of a fit, which is taken as representative; the first two batches are not timed then. It counts
            recomputation, layers that tensor ranks hold whole (on each), and matrix products of the optimizer (Muon).
            Operators without a formula count nothing: custom ones, cuDNN's LSTM, fused attention on a CPU; give them
            one with `torch.utils.flop_counter.register_flop_formula`. None: not measured.
    """

    def __init__(
        self,
        tokens: Callable[[Outcome], int] | None = None,
        flops_per_sample: float | Literal["auto"] | None = "auto",
    ) -> None:
        self._tokens, self._given = tokens, flops_per_sample
        self.flops: float | None = None
        """Operations of one sample."""
        self._warm_up = 0
        """Batches until the operations are counted; the first one also runs the trials of some models."""
        self._counting = ExitStack()
        self._counter = FlopCounterMode(display=False)
        self._window_s, self._batches, self._waited_before = 0.0, 0, 0.0
        self._has_warned = False
        self._reset()

    def _reset(self) -> None:
        self._count = [0, 0]
        self._begin, self._paused = time.perf_counter(), 0.0

    def before_fit(self, trainer: Trainer) -> None:
        self._warm_up = 2 if self._given == "auto" else 0
        if not isinstance(self._given, str):
            self.flops = self._given
        self._waited_before = _waited_s(trainer)
        self._reset()

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        if self._warm_up:
            self._pause(trainer)
        if self._warm_up == 1:
            self._counting.enter_context(torch.compiler.set_stance("force_eager"))  # else compiled code is not seen
            self._counting.enter_context(self._counter)

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up:
                self._counting.close()
                self.flops = self._per_sample(trainer, outcome.rows)
            self._resume(trainer)
            return
        self._count[0] += outcome.rows
        self._batches += 1
        if self._tokens is not None:
            self._count[1] += self._tokens(outcome)

    def close(self, trainer: Trainer) -> None:
        self._counting.__exit__(*sys.exc_info())

    def _pause(self, trainer: Trainer) -> None:
        self._paused = self._paused or time.perf_counter()  # a hook may save in an evaluation

    def _resume(self, trainer: Trainer, result: Any = None) -> None:
        if self._paused:
            self._begin += time.perf_counter() - self._paused
            self._paused = 0.0

    before_eval = before_save = _pause
    after_eval = after_save = _resume  # type: ignore[assignment]  # the second argument has another name

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        context = trainer.engine.context
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        seconds = time.perf_counter() - self._begin
        self._watch_loader(trainer, seconds)
        counts = torch.tensor([*self._count, seconds], dtype=torch.float64, device=context.device)
        context.all_reduce(counts, "dp")
        rows, tokens, total = counts.tolist()
        seconds = total / context.dp_size
        self._reset()
        if not rows:  # only the batches up to the count
            return {}
        measured = {"samples_per_s": rows / seconds}
        if self._tokens is not None:
            measured["tokens_per_s"] = tokens / seconds
        if self.flops:
            measured["model_flops_per_s"] = rows * self.flops / seconds
            recipe = Setup.of(trainer.engine.config, context.size).recipe
            peak = None if recipe.linear else peak_flops(context.device, recipe.compute_dtype)  # of fp8 none is known
            if peak is not None:
                measured["mfu"] = rows * self.flops / (seconds * context.size * peak)
        return measured

    def _watch_loader(self, trainer: Trainer, seconds: float) -> None:
        """Warn once if the loop waits for data. `seconds` have passed since the last record."""
        self._window_s += seconds
        if self._window_s < _WINDOW_S or self._batches < _WINDOW_BATCHES:
            return
        total, batches, waited = self._window_s, self._batches, _waited_s(trainer) - self._waited_before
        self._window_s, self._batches, self._waited_before = 0.0, 0, _waited_s(trainer)
        if waited > _WAITING * total and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the loop waited for engine.dataloader %.0f %% of its time (%.1f of %.1f s, %d batches); give the "
                "DataLoader more workers (num_workers=%d; this machine has %s cores), or prepare samples beforehand",
                *(100 * waited / total, waited, total, batches),
                *(trainer.engine.dataloader.num_workers, os.cpu_count()),
            )

    def _per_sample(self, trainer: Trainer, rows: int) -> float | None:
        """The mean over all samples of the batch, on all ranks. None if there are none."""
        context = trainer.engine.context
        counts = torch.tensor([self._counter.get_total_flops(), rows if context.counts_outputs else 0])
        flops, rows = context.all_reduce(counts.to(context.device)).tolist()
        return flops / rows if rows else None


def _waited_s(trainer: Trainer) -> float:
    engine = trainer.engine
    return engine.dataloader.waited_s if engine.has_dataloader else 0.0


class MemoryHook(Hook):
    """Adds "memory_mib" to records: the peak memory of the rank that used the most.

    On a GPU it is torch's peak allocation since the last record; on a CPU the largest resident set of the process since
    it started.
    """

    def measure(self, trainer: Trainer) -> Mapping[str, float]:
        context = trainer.engine.context
        if context.device.type == "cuda":
            mine = torch.cuda.max_memory_allocated(context.device)
            torch.cuda.reset_peak_memory_stats(context.device)
        else:
            # Linux counts KiB, macOS bytes.
            mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        most = torch.tensor(mine, device=context.device)
        if context.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return {"memory_mib": most.item() / 2**20}
