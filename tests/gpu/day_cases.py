"""The steps of `day.py` that measure something of their own."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from benchmarks import gpu
from benchmarks.contenders import Setup, adamw, make_halfmesh
from benchmarks.harness import Contender, settle, time_step
from benchmarks.prediction import measure_bandwidth
from benchmarks.works import Work, class_loss, token_loss, tokens
from halfmesh.amp.stepper import bucket_bytes
from halfmesh.utils.tensors import by_bytes

if TYPE_CHECKING:
    from .day import Page

MIB = 2**20
TINY = gpu.gpt("tiny GPT", 2, 32, 2, length=16, vocabulary=128, head_size=16)
NAIVE_FP16, TORCH_BF16 = {"fp16": {"mode": "naive"}}, {"bf16": {"mode": "torch"}}


def work_of(page: Page, words: str) -> Work:
    return TINY if page.rehearses else next(work for work in gpu.WORKS if words in work.title)


# -- 3: parts of an update ---------------------------------------------------------------------------------------------

SWEEP_FAILURE = "a limit with which the update takes less than 0.9 of the time that it takes with the default."


def sweep_buckets(page: Page) -> None:
    page.columns = ["model", "limit in MiB", "parts", "ms an update", "over its bound", "peak bytes a parameter"]
    limits: dict[str, tuple[float | None, ...]] = {"124 M": (None, 25, math.inf), "batch 32": (None, 25, math.inf)}
    limits = {"1.5 B": (None, 25, 128, 512, math.inf)} | ({} if page.rehearses else limits)
    bandwidth = measure_bandwidth(page.device)
    for words, some in limits.items():
        seconds: dict[float | None, float] = {}
        work = work_of(page, words)
        for limit in some:
            page.case(work.title, partial(sweep_bucket, page, work, limit, bandwidth, seconds))
        for limit, found in seconds.items():
            if found < 0.9 * seconds.get(None, 0) and not page.rehearses:
                times = f"{1000 * found:.3g} ms, and {1000 * seconds[None]:.3g} by default"
                page.fail(f"{work.title}, {limit:g} MiB: {times}")


def sweep_bucket(
    page: Page, work: Work, limit: float | None, bandwidth: float, seconds: dict[float | None, float]
) -> Sequence[Any]:
    """Adds to `seconds`, by limit; None is the default."""

    def limited(device: torch.device, published: int) -> float:
        return bucket_bytes(device, published) if limit is None else limit * MIB

    setup = Setup.of(work, "fp16", gpu.CLIP, str(page.device))
    with mock.patch("halfmesh.amp.stepper.bucket_bytes", limited):
        gpu.free()
        base = gpu.allocated(page.device)
        contender = make_halfmesh(setup, **NAIVE_FP16)
        contender.run(3)
        peak = gpu.measure_peak(contender, page.device, base)
        found = statistics.median(time_step(contender) for _ in range(3 if page.rehearses else 9))
    params = list(contender.model.parameters())
    numel = sum(param.numel() for param in params)
    parts = by_bytes(params, limited(page.device, 0), lambda param: 4 * param.numel())
    contender.close()
    seconds[limit] = found
    bound = gpu.update_bytes(numel, masters=True) / bandwidth
    shown = "default" if limit is None else f"{limit:g}"
    return shown, len(parts), f"{1000 * found:.3g}", f"{found / bound:.3g}", peak


# -- 4: waits of a training loop ---------------------------------------------------------------------------------------

PROFILE_FAILURE = "a loop that waits for a stream (cudaStreamSynchronize), or, where the loader has workers, for an "
PROFILE_FAILURE += "event. Launches are to be read: a kernel takes a few dozen tensors at a time."
UPDATES, ACCUMULATION = 5, 4
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")


def profile_loops(page: Page) -> None:
    page.columns = ["mode, workers of the loader", "ms an update", "waits for streams", "for events"]
    page.columns = [*page.columns, "launches in engine.step", "trace"]
    for name, config, workers in (("NAIVE fp16", NAIVE_FP16, 4), ("TORCH bf16", TORCH_BF16, 0)):
        workers = min(workers, 1) if page.rehearses else workers
        page.case(f"{name}, {workers}", partial(profile_loop, page, f"{name}, {workers}", config, workers))


def profile_loop(page: Page, case: str, config: dict[str, Any], workers: int) -> Sequence[Any]:
    work = work_of(page, "124 M")
    batches = [work.batch(seed) for seed in range(2 if page.rehearses else 4)]
    x, y = (torch.cat(parts).repeat(8 if page.rehearses else 12, 1) for parts in zip(*batches, strict=True))
    size = len(batches[0][0])
    options = {"num_workers": workers, "pin_memory": workers > 0 and not page.rehearses}
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), size, **options)
    model = work.model().to(page.device)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.99**update)
    config = config | {"gradient_accumulation": ACCUMULATION, "clip_grad_norm": gpu.CLIP, "profile_ranges": True}
    engine = halfmesh.initialize(
        model, optimizer, work.criterion, loader, config, lr_scheduler=scheduler, device=page.device
    )
    warm, last = 2 if page.rehearses else 3, UPDATES if not page.rehearses else 1
    activities = [ProfilerActivity.CPU, *([] if page.rehearses else [ProfilerActivity.CUDA])]
    seen = profile(activities=activities)
    with contextlib.ExitStack() as stack:
        for inputs, targets in engine.dataloader:
            if engine.global_step == warm and not seen.profiler:
                settle()
                stack.enter_context(seen)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(inputs), targets))
            with torch.profiler.record_function("engine.step"):
                engine.step()
            if engine.global_step == warm + last:
                break
    updates = engine.global_step - warm
    events = list(seen.events() or ())
    steps = [event.time_range for event in events if event.name == "engine.step" and event.device_type.name == "CPU"]
    if len(steps) != updates * ACCUMULATION:
        raise RuntimeError(f"the profiler saw {len(steps)} calls of engine.step in {updates} updates")
    took = (max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1000 / updates
    waits, of_events = (sum(event.name == name for event in events) for name in gpu.WAITS)
    launched = sum(
        event.name in LAUNCHES and any(s.start <= event.time_range.start <= s.end for s in steps) for event in events
    )
    trace = page.out.with_suffix(f".{len(page.rows)}.json.gz")
    seen.export_chrome_trace(str(trace))
    engine.close()
    if waits or (workers and of_events):
        page.fail(f"{case}: {waits} waits for a stream, and {of_events} for events")
    return f"{took:.3g}", waits, of_events, f"{launched / updates:.0f}", trace.name


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

    if device.type == "cpu":
        yield
        return

    def sleeping(copy: Callable[..., Any]) -> Callable[..., Any]:
        def late(self: Copies, tensor: torch.Tensor) -> Any:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(SLEEP)
            return copy(self, tensor)

        return late

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

    def run(name: str, config: dict[str, Any], every: int) -> Sequence[Any]:
        with tempfile.TemporaryDirectory() as folder, late_copies(page.device):
            found, seconds = train_for_races(page, work, config, every, steps, Path(folder))
        if not expected:
            expected.update(found)
        different = [key for key, value in found.items() if not torch.equal(value, expected[key])]
        figures = ["-", "-", "-"]
        if not page.rehearses:
            peaks[name] = peak = torch.cuda.max_memory_allocated()
            stats = torch.cuda.memory_stats()
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", math.nan)
            figures = [f"{peak / MIB:.0f}", f"{stats['num_alloc_retries']}", f"{pinned / MIB:.0f}"]
            if stats["num_alloc_retries"]:
                page.fail(f"{name}: the allocator tried again {stats['num_alloc_retries']} times")
        if different:
            page.fail(f"{name}: {len(different)} weights differ, such as {different[0]}")
        return steps, len(different), f"{1000 * seconds / steps:.3g}", *figures

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, (config, every) in cases.items():
            page.case(name, partial(run, name, config, every))
    finally:
        torch.use_deterministic_algorithms(False)
    judge_peaks(page, peaks)


def judge_peaks(page: Page, peaks: dict[str, int]) -> None:
    """Find a peak with offload that is hardly below the one without, by name of the case, in bytes."""
    plain = peaks.get("plain", math.inf)
    if peaks.get("offload", 0) > 0.8 * plain:
        page.fail(f"offload: a peak of {peaks['offload'] / MIB:.0f} MiB, and {plain / MIB:.0f} without")


def train_for_races(
    page: Page, work: Work, config: dict[str, Any], every: int, steps: int, folder: Path
) -> tuple[dict[str, torch.Tensor], float]:
    setup = Setup.of(work, "bf16", gpu.CLIP, str(page.device))
    gpu.free()
    if not page.rehearses:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    model = setup.model()
    engine = halfmesh.initialize(model, adamw(model), work.criterion, config=setup.config | config, device=page.device)
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


# -- 9: memory layouts -------------------------------------------------------------------------------------------------

LAYOUT_FAILURE = "a last loss that differs by more than 5 % from fp32's, weights of convolutions that are not in "
LAYOUT_FAILURE += "channels_last any more, or a warning of torch that an RNN's weights are not in one piece (but with "
LAYOUT_FAILURE += "O1, which casts them one by one)."


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            inner = torch.relu(norm(conv(inner)))
        return x + inner


class ResNet(nn.Sequential):
    """A small one, in channels_last."""

    def __init__(self, width: int, depth: int) -> None:
        blocks = [Residual(width) for _ in range(depth)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        super().__init__(nn.Conv2d(4, width, 3, 2), *blocks, *head)
        self.to(memory_format=torch.channels_last)


class WordLSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(128, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.words(x))[0])


def memory_layouts(page: Page) -> None:
    page.columns = ["model", "mode", "first loss", "last loss", "last in fp32", "ms a step"]
    width, image, batch = (8, 12, 4) if page.rehearses else (128, 64, 64)
    resnet = Work(
        "ResNet",
        lambda: ResNet(width, 2 if page.rehearses else 6),
        lambda: (torch.randn(batch, 4, image, image), torch.randint(0, 10, (batch,))),
        class_loss,
    )
    lstm = Work("LSTM", lambda: WordLSTM(2 * width), lambda: tokens(batch, image, 128), token_loss)
    apex = {f"APEX {level}": {"fp16": {"mode": "apex", "opt_level": level}} for level in ("O1", "O2")}
    modes = apex | {"NAIVE fp16": NAIVE_FP16, "NAIVE bf16": {"bf16": {"mode": "naive"}}}
    for work, names in ((resnet, ("APEX O2", "NAIVE fp16", "NAIVE bf16")), (lstm, ("APEX O1", "NAIVE fp16"))):
        plain = losses_of(page, work, {})[0]
        for name in names:
            page.case(work.title, partial(one_layout, page, work, name, modes[name], plain))


def one_layout(page: Page, work: Work, name: str, config: dict[str, Any], plain: list[float]) -> Sequence[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, seconds, model = losses_of(page, work, config)
    pieces = [str(warning.message) for warning in caught if "contiguous chunk" in str(warning.message)]
    if pieces and name != "APEX O1":
        page.fail(f"{work.title}, {name}: {pieces[0]}")
    if not abs(losses[-1] - plain[-1]) <= 0.05 * abs(plain[0]):
        page.fail(f"{work.title}, {name}: a loss of {losses[-1]:.4g}, and {plain[-1]:.4g} in fp32")
    convs = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convs):
        page.fail(f"{work.title}, {name}: weights are not in channels_last any more")
    return name, f"{losses[0]:.4g}", f"{losses[-1]:.4g}", f"{plain[-1]:.4g}", f"{1000 * seconds:.3g}"


def losses_of(page: Page, work: Work, config: dict[str, Any]) -> tuple[list[float], float, nn.Module]:
    """The losses of some steps, the seconds of one more, and the model."""
    setup = Setup.of(work, "fp32", gpu.CLIP, str(page.device))
    if work.title == "ResNet":
        setup.x.data = setup.x.to(memory_format=torch.channels_last)
    contender: Contender = make_halfmesh(setup, **config)
    losses = []
    for _ in range(8 if page.rehearses else 30):
        loss = contender.run(1)
        assert loss is not None
        losses.append(loss.item())
    seconds = time_step(contender)
    return losses, seconds, contender.model
