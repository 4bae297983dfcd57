"""The steps of `day.py` that measure something of their own."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from benchmarks import gpu
from benchmarks.contenders import Setup, adamw, make_halfmesh
from benchmarks.harness import settle, time_step
from benchmarks.prediction import measure_bandwidth
from benchmarks.works import Work
from halfmesh.amp.stepper import bucket_bytes
from halfmesh.utils.tensors import by_bytes

if TYPE_CHECKING:
    from .day import Page

MIB = 2**20
TINY = gpu.gpt("tiny GPT", 2, 32, 2, length=16, vocabulary=128, head_size=16)
NAIVE_FP16, TORCH_BF16 = {"fp16": {"mode": "naive"}}, {"bf16": {"mode": "torch"}}


def work_of(page: Page, words: str) -> Work:
    return TINY if page.rehearses else next(work for work in gpu.WORKS if words in work.title)


def judge_peak(page: Page, case: str, peak: int, plain: float, most: float) -> None:
    if peak > most * plain:
        page.fail(f"{case}: a peak of {peak / MIB:.0f} MiB, and {plain / MIB:.0f} without")


# -- 3: parts of an update ---------------------------------------------------------------------------------------------

SWEEP_FAILURE = "a limit with which the update takes less than 0.9 of the time that it takes with the default."


def sweep_buckets(page: Page) -> None:
    page.columns = ["model", "limit in MiB", "parts", "ms an update", "over its bound", "peak bytes a parameter"]
    limits: dict[str, tuple[float | None, ...]] = {"1.5 B": (None, 25, 128, 512, math.inf)}
    if not page.rehearses:
        limits |= dict.fromkeys(("124 M", "batch 32"), (None, 25, math.inf))
    bandwidth = measure_bandwidth(page.device)

    def sweep(work: Work, limit: float | None, seconds: dict[float | None, float]) -> Sequence[Any]:
        """With the default where `limit` is None."""

        def limited(device: torch.device, published: int) -> float:
            return bucket_bytes(device, published) if limit is None else limit * MIB

        setup = Setup.of(work, "fp16", gpu.CLIP, str(page.device))
        with mock.patch("halfmesh.amp.stepper.bucket_bytes", limited):
            base = gpu.allocated(page.device)
            contender = make_halfmesh(setup, **NAIVE_FP16)
            contender.run(3)
            peak = gpu.measure_peak(contender, page.device, base)
            seconds[limit] = statistics.median(time_step(contender) for _ in range(3 if page.rehearses else 9))
        params = list(contender.model.parameters())
        parts = by_bytes(params, limited(page.device, 0), lambda param: 4 * param.numel())
        contender.close()
        bound = gpu.update_bytes(sum(param.numel() for param in params), masters=True) / bandwidth
        shown = "default" if limit is None else f"{limit:g}"
        return shown, len(parts), f"{1000 * seconds[limit]:.3g}", f"{seconds[limit] / bound:.3g}", peak

    for words, some in limits.items():
        work, seconds = work_of(page, words), dict[float | None, float]()
        for limit in some:
            page.case(work.title, partial(sweep, work, limit, seconds))
        for limit, found in seconds.items():
            if found < 0.9 * seconds.get(None, 0) and not page.rehearses:
                times = f"{1000 * found:.3g} ms, and {1000 * seconds[None]:.3g} by default"
                page.fail(f"{work.title}, {limit:g} MiB: {times}")


# -- 4: waits of a training loop ---------------------------------------------------------------------------------------

PROFILE_FAILURE = "a loop that waits for a stream (cudaStreamSynchronize), or, where the loader has workers, for an "
PROFILE_FAILURE += "event. The traces are to be read: how many kernels a step launches, and what runs beside what."
WARM, UPDATES, ACCUMULATION = 3, 5, 4


def profile_loops(page: Page) -> None:
    page.columns = ["mode, workers of the loader", "waits for streams", "for events", "trace"]
    for name, config, workers in (("NAIVE fp16", NAIVE_FP16, 4), ("TORCH bf16", TORCH_BF16, 0)):
        workers = min(workers, 1) if page.rehearses else workers
        page.case(f"{name}, {workers}", partial(profile_loop, page, f"{name}, {workers}", config, workers))


def profile_loop(page: Page, case: str, config: dict[str, Any], workers: int) -> Sequence[Any]:
    work, batches = work_of(page, "124 M"), (WARM + UPDATES) * ACCUMULATION
    x, y = work.batch(0)
    data = TensorDataset(x.repeat(batches + workers, 1), y.repeat(batches + workers, 1))
    pinned = workers > 0 and not page.rehearses
    loader: DataLoader[Any] = DataLoader(data, len(x), num_workers=workers, pin_memory=pinned)
    model = work.model().to(page.device)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.99**update)
    config = config | {"gradient_accumulation": ACCUMULATION, "clip_grad_norm": gpu.CLIP, "profile_ranges": True}
    engine = halfmesh.initialize(
        model, optimizer, work.criterion, loader, config, lr_scheduler=scheduler, device=page.device
    )
    seen = profile(activities=[ProfilerActivity.CPU, *([] if page.rehearses else [ProfilerActivity.CUDA])])
    with contextlib.ExitStack() as stack:
        for number, (inputs, targets) in enumerate(engine.dataloader):
            if number == WARM * ACCUMULATION:
                settle()
                stack.enter_context(seen)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(inputs), targets))
            engine.step()
            if number == batches - 1:
                break
    counts = {event.key: event.count for event in seen.key_averages()}
    if not page.rehearses and not any(name.startswith("cudaLaunchKernel") for name in counts):
        raise RuntimeError("the profiler saw nothing of the device")
    trace = page.out.with_suffix(f".{len(page.rows)}.json.gz")
    seen.export_chrome_trace(str(trace))
    engine.close()
    waits, of_events = (counts.get(name, 0) for name in gpu.WAITS)
    if waits or (workers and of_events):
        page.fail(f"{case}: {waits} waits for a stream, and {of_events} for events")
    return waits, of_events, trace.name


# -- 5: races ----------------------------------------------------------------------------------------------------------

RACE_FAILURE = "a weight that differs, in any bit, from the run without copies (a second such run shows whether that "
RACE_FAILURE += "repeats itself), an allocator that had to try again, or a peak with offload that is more than 0.8 of "
RACE_FAILURE += "the peak without: what was fetched for backward is kept too long."
SLEEP = 2_000_000
"""Cycles that each copy is late: about a millisecond."""


@contextlib.contextmanager
def late_copies(device: torch.device) -> Iterator[None]:
    """Copies of offloaded activations begin late. On the CPU there is no stream to be late on."""
    from halfmesh.engine.offload import Copies

    def sleeping(copy: Callable[..., Any]) -> Callable[..., Any]:
        def late(self: Copies, tensor: torch.Tensor) -> Any:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(SLEEP)
            return copy(self, tensor)

        return copy if device.type == "cpu" else late

    late_ones = {"to_host": sleeping(Copies.to_host), "to_device": sleeping(Copies.to_device)}
    with mock.patch.multiple(Copies, **late_ones):
        yield


def find_races(page: Page) -> None:
    page.columns = ["case", "steps", "weights that differ", "ms a step", "peak MiB", "retries", "pinned MiB"]
    work = gpu.gpt("GPT", 6, 1024, 8, vocabulary=1024) if not page.rehearses else TINY  # activations: 2/3 of its peak
    steps, often = (4, 2) if page.rehearses else (100, 50)
    expected: dict[str, torch.Tensor] = {}
    peaks: dict[str, int] = {}
    off, recompute = {"activation_offload": True}, {"activation_checkpoint": "full"}
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "plain": ({}, 0),
        "plain again": ({}, 0),
        "offload": (off, 0),
        "recompute": (recompute, 0),
        "recompute and offload": (off | recompute, 0),
        f"a save in the background every {often}": ({}, often),
        "all of these": (off | recompute, often),
    }

    def train(config: dict[str, Any], every: int) -> tuple[dict[str, torch.Tensor], float]:
        """The weights, and seconds."""
        setup = Setup.of(work, "bf16", gpu.CLIP, str(page.device))
        if not page.rehearses:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
        model, config = setup.model(), setup.config | config
        engine = halfmesh.initialize(model, adamw(model), work.criterion, config=config, device=page.device)
        with tempfile.TemporaryDirectory() as folder, late_copies(page.device):
            settle()
            begin = time.perf_counter()
            for step in range(steps):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(setup.x), setup.y))
                engine.step()
                if every and (step + 1) % every == 0:
                    engine.save(folder, keep=2, in_background=True)
            settle()
            seconds = time.perf_counter() - begin
            found = {name: value.detach().cpu().clone() for name, value in engine.model.state_dict().items()}
            engine.close()
        return found, seconds

    def run(name: str, config: dict[str, Any], every: int) -> Sequence[Any]:
        found, seconds = train(config, every)
        expected.update({} if expected else found)
        different = [key for key, value in found.items() if not torch.equal(value, expected[key])]
        if different:
            page.fail(f"{name}: {len(different)} weights differ, such as {different[0]}")
        figures = steps, len(different), f"{1000 * seconds / steps:.3g}"
        if page.rehearses:
            return *figures, "-", "-", "-"
        peaks[name] = torch.cuda.max_memory_allocated()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", math.nan)
        if retries:
            page.fail(f"{name}: the allocator tried again {retries} times")
        if name == "offload":
            judge_peak(page, name, peaks[name], peaks.get("plain", math.inf), 0.8)
        return *figures, f"{peaks[name] / MIB:.0f}", retries, f"{pinned / MIB:.0f}"

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, (config, every) in cases.items():
            page.case(name, partial(run, name, config, every))
    finally:
        torch.use_deterministic_algorithms(False)


# -- 9: the loss of a language model's head ----------------------------------------------------------------------------

LOSS_FAILURE = "another loss or gradient in chunks than with all logits, by more than rounding, or a peak of more than "
LOSS_FAILURE += "half. A finding is a time of more than 1.5: the logits' products are computed 4 times for 3."


def losses_of_a_head(page: Page) -> None:
    page.columns = ["loss", "ms forward and backward", "peak MiB above what there was", "difference"]
    tokens, width, words = (64, 32, 128) if page.rehearses else (8192, 2048, 50304)
    on_gpu = page.device.type == "cuda"
    torch.manual_seed(0)
    with page.device:
        head = nn.Linear(width, words, bias=False, dtype=torch.bfloat16)
        x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(words, (tokens,))
    found: list[tuple[float, int, list[Any]]] = []

    def measure(name: str, loss: Callable[..., torch.Tensor]) -> Sequence[Any]:
        seconds, peak = [], 0
        for _ in range(3 if page.rehearses else 8):
            x.grad = head.weight.grad = None
            gpu.free()
            base = gpu.allocated(page.device)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            settle()
            begin = time.perf_counter()
            value = loss(x, head, targets)
            value.backward()
            settle()
            seconds.append(time.perf_counter() - begin)
            peak = torch.cuda.max_memory_allocated() - base if on_gpu else 0
        found.append((statistics.median(seconds[2:]), peak, [value.detach(), x.grad, head.weight.grad]))
        first, last = found[0], found[-1]
        pairs = [(mine.double(), other.double()) for mine, other in zip(last[2], first[2], strict=True)]
        difference = max(((mine - other).norm() / other.norm()).item() for mine, other in pairs)
        if not difference <= 0.02:
            page.fail(f"{name}: a relative difference of {difference:.2g}")
        if len(found) == 2 and not page.rehearses:
            judge_peak(page, name, peak, first[1], 0.5)
            if last[0] > 1.5 * first[0]:
                page.find(f"{name}: {last[0] / first[0]:.2f} of the time, and 1.33 was predicted")
        return f"{1000 * last[0]:.3g}", f"{peak / MIB:.0f}", f"{difference:.1e}"

    page.case("all logits", partial(measure, "all logits", lambda *given: F.cross_entropy(head(x).float(), targets)))
    page.case("in chunks", partial(measure, "in chunks", halfmesh.nn.linear_cross_entropy))
