"""The same on one CUDA device: steps, updates, waits, memory, and how much of the device is used.

python -m benchmarks.gpu [--out benchmarks/results/gpu.md]       # without a GPU it says that nothing was measured
python -m benchmarks.gpu --device cpu --tiny                      # runs all of the code with tiny models, anywhere
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halfmesh

from .contenders import Setup, adamw, update_of
from .gpu_figures import NOT_MEASURED, GpuRow, mfu, render, update_bytes, waits
from .gpu_works import MODES, GpuWork, Mode, tiny_works, works
from .harness import AGAIN, FUSED, HALFMESH, LOOP, Contender, Quartiles, take_turns
from .machine import describe

CLIP = 1.0
TOLERANCE = 0.02
"""Of the first loss, relative: NAIVE rounds more than autocast does, but does not compute another model."""
STEPS = 4
"""Of each contender in a round."""
COPIED = 1 << 30


def make_loop(setup: Setup, name: str, compiled: bool, fused: bool = False) -> Contender:
    """The loop in two parts: `before` has forward and backward, `step` the update."""
    model = setup.model()
    optimizer = adamw(model, **({"fused": True} if fused else {}))
    scaler = torch.amp.GradScaler(setup.device.type, enabled=setup.precision == "fp16")
    called: Any = torch.compile(model) if compiled else model

    def before() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(setup.device.type, setup.dtype or torch.bfloat16, enabled=setup.dtype is not None):
            loss = setup.work.criterion(called(setup.x), setup.y)
        scaler.scale(loss).backward()
        return loss

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()

    return Contender(name, step, model, optimizer, before)


def make_halfmesh(setup: Setup, mode: Mode, compiled: bool) -> Contender:
    """The engine in this mode.

    Raises:
        NotImplementedError: this version of halfmesh has not what the config asks for.
    """
    model = setup.model()
    config = mode.config | {"clip_grad_norm": CLIP} | ({"compile": True} if compiled else {})
    engine = halfmesh.initialize(model, adamw(model), setup.work.criterion, config=config, device=setup.device)
    return update_of(engine, setup)


Makers = list[tuple[str, Callable[[], Contender]]]


def makers(setup: Setup, mode: Mode, compiled: bool) -> Makers:
    return [
        (LOOP, lambda: make_loop(setup, LOOP, compiled)),
        (AGAIN, lambda: make_loop(setup, AGAIN, compiled)),
        (FUSED, lambda: make_loop(setup, FUSED, compiled, fused=True)),
        (HALFMESH, lambda: make_halfmesh(setup, mode, compiled)),
    ]


def measure(work: GpuWork, mode: Mode, compiled: bool, device: str, rounds: int, bandwidth: float) -> list[GpuRow]:
    """One case: a row for each contender, whatever becomes of it."""
    setup = Setup.of(work.work, mode.precision, CLIP, device)
    each = makers(setup, mode, compiled)
    rows = {name: GpuRow(work.work.title, mode.name, compiled, name) for name, _ in each}
    try:
        _warm_libraries(setup)
        for name, make in each:  # alone first, for the memory of each
            _peak_alone(rows[name], make, setup.device)
        _side_by_side(rows, [(name, make) for name, make in each if not rows[name].missing], work, setup, rounds)
    except torch.OutOfMemoryError:
        for row in rows.values():
            row.missing = row.missing or "not enough memory for all contenders side by side"
    except Exception as error:  # the next case may do better: nothing of an hour is thrown away
        for row in rows.values():
            row.missing = row.missing or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    _free()
    if compiled:  # what was compiled for this model is of no use for the next
        torch.compiler.reset()
    name = torch.cuda.get_device_name() if setup.device.type == "cuda" else "cpu"
    for row in rows.values():
        if row.seconds is not None:
            masters = mode.halved and row.name == HALFMESH
            row.tail_bound = update_bytes(row.parameters, masters) / bandwidth
            row.mfu = mfu(work.shape, row.seconds, name, setup.dtype is not None)
    return list(rows.values())


def _warm_libraries(setup: Setup) -> None:
    """cuBLAS takes memory at its first product of each kind and keeps it: not on the first contender's account."""
    for dtype in {torch.float32, setup.dtype or torch.float32}:
        square = torch.ones(64, 64, device=setup.device, dtype=dtype, requires_grad=True)
        nn.functional.linear(square, square, torch.ones(64, device=setup.device, dtype=dtype)).sum().backward()


def _peak_alone(row: GpuRow, make: Callable[[], Contender], device: torch.device) -> None:
    """Bytes a parameter at the peak of a step, or why there is no such contender, into `row`."""
    _free()
    cuda = device.type == "cuda"
    base = torch.cuda.memory_allocated() if cuda else 0
    try:
        contender = make()
        contender.run(3)
    except NotImplementedError as error:
        row.missing = str(error).strip().splitlines()[-1].strip(" -")
        return
    except torch.OutOfMemoryError:
        row.missing = "not enough memory"
        return
    row.parameters = sum(param.numel() for param in contender.model.parameters())
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        contender.run(1)
        torch.cuda.synchronize()
        row.bytes_per_parameter = (torch.cuda.max_memory_allocated() - base) / row.parameters
    contender.close()


def _side_by_side(rows: dict[str, GpuRow], each: Makers, work: GpuWork, setup: Setup, rounds: int) -> None:
    contenders: list[Contender] = []
    first = float("nan")
    for name, make in each:
        contender = make()
        # Of the first step: later ones depend on how many updates were skipped until the loss scale fits.
        loss = contender.run(1)
        value = float(loss.detach()) if loss is not None else float("nan")
        first = first if contenders else value
        if abs(value - first) <= TOLERANCE * abs(first):
            contender.run(work.work.warm)
            contenders.append(contender)
        else:
            rows[name].missing = f"a loss of {value:.4g} in the first step, and {first:.4g} by the first row"
            contender.close()
    whole, tails = _timers(setup.device)
    timed = {row.name: row.wall for row in take_turns(contenders, rounds, STEPS, whole)}
    updates = {row.name: row.wall for row in take_turns(contenders, rounds, 1, tails)}
    for contender in contenders:
        row, seconds = rows[contender.name], timed[contender.name]
        if LOOP in timed:
            row.ratio = str(_ratios(seconds, timed[LOOP]))
        if FUSED in timed:
            row.over_fused = f"{_ratios(seconds, timed[FUSED]).median:.3f}"
        row.seconds, row.tail = statistics.median(seconds), statistics.median(updates[contender.name])
        row.syncs = count_syncs(contender, setup.device)
        contender.close()


def _ratios(seconds: Sequence[float], base: Sequence[float]) -> Quartiles:
    return Quartiles.of([mine / other for mine, other in zip(seconds, base, strict=True)])


def _timers(device: torch.device) -> tuple[Callable[..., float], Callable[..., float]]:
    """Of whole steps, and of updates alone. The device has nothing to do at either end of what is timed."""

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def whole(contender: Contender, steps: int) -> float:
        settle()
        begin = time.perf_counter()
        contender.run(steps)
        settle()
        return (time.perf_counter() - begin) / steps

    def update(contender: Contender, _: int) -> float:
        assert contender.before is not None
        contender.before()
        settle()
        begin = time.perf_counter()
        contender.step()
        settle()
        return time.perf_counter() - begin

    return whole, update


def count_syncs(contender: Contender, device: torch.device, steps: int = 3) -> dict[str, float]:
    """As `waits`."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        contender.run(steps)
    return waits({event.key: event.count for event in seen.key_averages()}, steps)


def measure_bandwidth(device: str, size: int = COPIED) -> float:
    """Bytes per second of a copy on the device, read and written ones together; the best of a few."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def nothing_measured(reason: str) -> str:
    """The page without a GPU."""
    modes = ", ".join(mode.name for mode in MODES)
    lines = [f"| {work.work.title} | {modes}; with and without compile | {NOT_MEASURED} |" for work in works()]
    table = ["| model | modes | |", "|---|---|---|", *lines]
    return "\n".join(["# One GPU", "", f"Written by `make bench-gpu`: {reason}.", "", *table, ""])


def measure_all(
    device: str, chosen: Sequence[GpuWork], rounds: int, compile_too: bool
) -> tuple[list[GpuRow], list[str]]:
    """All cases of these works, and the lines about the machine."""
    bandwidth = measure_bandwidth(device, COPIED if device == "cuda" else 1 << 24)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, with tiny models: to see that the code runs"
    rows = []
    for work in chosen:
        for mode in MODES:
            for compiled in (False, True) if compile_too else (False,):
                rows += measure(work, mode, compiled, device, rounds, bandwidth)
                print(f"{work.work.title}, {mode.name}{', compiled' if compiled else ''}: done", flush=True)
    machine = [f"{key}: {value}" for key, value in describe().items()]
    return rows, [f"device: {name}", f"bandwidth of a copy: {bandwidth / 1e9:.0f} GB/s", *machine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.md")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="models with this in their name, such as 'ViT' or '124 M'"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows with compile=True")
    chosen = parser.parse_args()
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        reason = "no CUDA device here: nothing was measured"
        print(reason)
        chosen.out.write_text(nothing_measured(reason))
        return
    models = [work for work in (tiny_works() if chosen.tiny else works()) if chosen.only in work.work.title]
    rows, heading = measure_all(chosen.device, models, chosen.rounds, not chosen.no_compile)
    chosen.out.write_text(render(rows, heading))
    kept = {"heading": heading, "rows": [dataclasses.asdict(row) for row in rows]}
    chosen.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"written: {chosen.out}")


if __name__ == "__main__":
    main()
