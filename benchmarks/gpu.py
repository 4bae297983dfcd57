"""The same on one CUDA device: steps, updates, waits, memory, and how much of the device is used.

python -m benchmarks.gpu --out benchmarks/results/gpu.md          # `make bench-gpu`: over an hour
python -m benchmarks.gpu --only "124 M" --no-compile --out FILE   # minutes
python -m benchmarks.gpu --device cpu                             # a rehearsal with tiny models: all of the code runs

The page is written after each case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfmesh.trainer.throughput import peak_flops

from .contenders import Setup, make_halfmesh, make_loop
from .harness import AGAIN, FUSED, HALFMESH, LOOP, Contender, Makers, Row, ratio, settle, take_turns, time_step
from .machine import describe, publish, table
from .works import Work, class_loss, make_transformer, token_loss, tokens

CLIP = 1.0
TOLERANCE = 0.02
"""Of the first loss, relative: NAIVE rounds more than autocast does, but does not compute another model."""
STEPS = 4
"""Of each contender in a round."""
BYTES_A_PARAMETER = 24
"""About what a contender keeps: weights, gradients and two moments in fp32, half-precision copies, activations."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


class Mode(NamedTuple):
    """`precision` is that of the loop beside it; `masters`: the model is in half precision, with fp32 masters."""

    name: str
    precision: str
    config: dict[str, Any]
    masters: bool = False


MODES = [
    Mode("fp32", "fp32", {}),
    Mode("TORCH fp16", "fp16", {"fp16": {"mode": "torch"}}),
    Mode("TORCH bf16", "bf16", {"bf16": {"mode": "torch"}}),
    Mode("NAIVE fp16", "fp16", {"fp16": {"mode": "naive"}}, True),
    Mode("NAIVE bf16", "bf16", {"bf16": {"mode": "naive"}}, True),
    Mode("APEX O2", "fp16", {"fp16": {"mode": "apex", "opt_level": "O2"}}, True),
]


def gpt(
    title: str, depth: int, width: int, batch: int, length: int = 1024, vocabulary: int = 50304, head_size: int = 64
) -> Work:
    """GPT-2's vocabulary, rounded up to a multiple of 64; as there the head's weight is the embedding's."""

    def build() -> nn.Module:
        model = make_transformer(depth, width, length, head_size, vocabulary)
        model[-1].weight = model[0].tokens.weight  # type: ignore[union-attr]
        return model

    return Work(title, build, lambda: tokens(batch, length, vocabulary), token_loss)


def vit(title: str, name: str, batch: int, image: int = 224, **sizes: Any) -> Work:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, img_size=image, **sizes)
        return model

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, image, image), torch.randint(0, 1000, (batch,))

    return Work(title, build, draw, class_loss)


WORKS = [  # the largest last
    vit("ViT-B/16, batch 32", "vit_base_patch16_224", 32),
    gpt("GPT of 124 M, batch 8 x 1024", 12, 768, 8),
    gpt("GPT of 355 M, batch 4 x 1024", 24, 1024, 4),
    gpt("GPT of 774 M, batch 2 x 1024", 36, 1280, 2),
    gpt("GPT of 1.5 B, batch 1 x 1024", 48, 1600, 1),
]
TINY = [
    vit("tiny ViT", "vit_tiny_patch16_224", 2, 32, embed_dim=32, depth=1, num_heads=2),
    gpt("tiny GPT", 1, 64, 2, length=16, vocabulary=128, head_size=32),
]


def update_bytes(parameters: int, masters: bool) -> float:
    """Bytes that a clipped AdamW has to move at least, with each number read and written once.

    fp32: read weight, gradient and two moments, write weight and moments. With masters: a half-precision gradient is
    read, masters and moments are read and written, the half-precision weight is written. The norm reads each gradient
    once more: nothing can be updated before it is known.
    """
    state = 3 * 4 * 2  # weight or master, and two moments, in fp32: read and written
    return float(parameters * (2 * (2 if masters else 4) + state + (2 if masters else 0)))


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy on the device, read and written ones together; the best of a few."""
    size = 1 << (30 if device.type == "cuda" else 24)
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        settle()
        begin = time.perf_counter()
        target.copy_(source)
        settle()
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best


def measure_peak(make: Callable[[], Contender], device: torch.device) -> str:
    """Bytes a parameter at the peak of a step, above what there was before."""
    if device.type != "cuda":
        make().close()
        return "-"
    free()
    base = torch.cuda.memory_allocated()
    contender = make()
    contender.run(3)
    settle()
    torch.cuda.reset_peak_memory_stats()
    contender.run(1)
    peak = torch.cuda.max_memory_allocated() - base
    contender.close()
    return f"{peak / sum(param.numel() for param in contender.model.parameters()):.3g}"


def count_waits(contender: Contender, device: torch.device) -> str:
    """How often each of `WAITS` is in a step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        contender.run(1)
    counts = {event.key: event.count for event in seen.key_averages()}
    if not any(name.startswith("cudaLaunchKernel") for name in counts):  # it sees nothing of the device
        return "-"
    return ", ".join(f"{counts.get(name, 0)}" for name in WAITS)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    work: Work, mode: Mode, compiled: bool | dict[str, Any], device: torch.device, rounds: int, bandwidth: float
) -> list[Any]:
    """The rows of a case, one for each contender.

    Raises:
        RuntimeError: a contender computes something else; the device has not enough memory.
    """
    setup = Setup.of(work, mode.precision, CLIP, str(device), compiled=compiled)
    making: Makers = [
        (LOOP, lambda: make_loop(setup)),
        (AGAIN, lambda: make_loop(setup, AGAIN)),
        (FUSED, lambda: make_loop(setup, FUSED, fused=True)),
        (HALFMESH, lambda: make_halfmesh(setup, **mode.config)),
    ]
    plain = make_loop(dataclasses.replace(setup, compiled=False))
    parameters = sum(param.numel() for param in plain.model.parameters())
    plain.before()  # cuBLAS takes memory at its first product and keeps it: not on the first contender's account
    with FlopCounterMode(display=False) as counter:
        plain.before()
    flops, rate = counter.get_total_flops(), peak_flops(device, setup.dtype or torch.float32)
    del plain
    peaks = [measure_peak(make, device) for _, make in making]
    together = BYTES_A_PARAMETER * parameters * len(making) < memory_of(device)
    turns = [making] if together else [[one] for one in making]
    measured = [row for some in turns for row in measure_together(some, work.warm, rounds, device)]
    losses, waits, steps, updates = zip(*measured, strict=True)
    if not all(abs(loss - losses[0]) <= TOLERANCE * abs(losses[0]) for loss in losses):
        raise RuntimeError(f"the losses of the first step differ: {losses}")
    rows = []
    for peak, wait, step, update in zip(peaks, waits, steps, updates, strict=True):
        seconds, tail = statistics.median(step.seconds), statistics.median(update.seconds)
        bound = update_bytes(parameters, mode.masters and step.name == HALFMESH) / bandwidth
        ratios = [str(ratio(steps, step.name, base)) for base in (LOOP, FUSED)]
        used = "-" if rate is None else f"{flops / rate / seconds:.1%}"
        times = [f"{1000 * seconds:.3g}", f"{1000 * tail:.3g}", f"{tail / bound:.3g}"]
        rows.append([step.name, *ratios, *times, wait, peak, used])
    return rows


def measure_together(makers: Makers, warm: int, rounds: int, device: torch.device) -> list[tuple[float, str, Row, Row]]:
    """For each contender its first loss, its waits in a step, and the seconds of its steps and updates. They take
    turns, so all of them are on the device."""
    contenders, losses = [], []
    for _, make in makers:
        contenders.append(make())
        loss = contenders[-1].run(1)
        losses.append(float("nan") if loss is None else float(loss.detach()))
        contenders[-1].run(warm)
    steps = take_turns(contenders, rounds, STEPS)
    updates = take_turns(contenders, rounds, 1, time_step)
    waits = [count_waits(contender, device) for contender in contenders]
    for contender in contenders:
        contender.close()
    del contenders
    free()
    return list(zip(losses, waits, steps, updates, strict=True))


def memory_of(device: torch.device) -> float:
    """Bytes; of a CPU, where models are tiny, as many as they like."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


COLUMNS = ["model", "mode", "compile", "", "against the default loop", "against fused=True", "ms a step"]
COLUMNS += ["ms an update", "over its bound", "waits a step", "peak bytes a parameter", "MFU"]
DEFINITIONS = f"""# One GPU

Written by `make bench-gpu`. Ratios and loops: see [the CPU's table](../RESULTS.md). All clip at {CLIP:g}. NAIVE
and APEX stand beside the autocast loop of the same dtype. With compile, the loops are compiled, too.

- **An update** goes from gradients to new weights. **Its bound** is the least number of bytes that it has to move
  (`gpu.update_bytes`), over the bandwidth of a copy on the same device. 1 is the best.
- **Waits**: {", ".join(WAITS)}, as torch.profiler counts them.
- **Peak bytes** are torch.cuda.max_memory_allocated within a step, less what was there before the model was.
- Models of which the contenders do not fit on the device together are measured one contender after the other: their
  ratios have no A/A to be held against.
- **MFU** is the least time that the products of a step take on the device in the mode's dtype
  (`halfmesh.trainer.throughput`), over the time of the step."""


def run(
    works: Sequence[Work],
    modes: Sequence[Mode],
    compiled: Sequence[bool | dict[str, Any]],
    device: torch.device,
    rounds: int,
    out: Path | None = None,
    only: str = "",
    seconds: float = math.inf,
    done: Callable[[list[list[Any]]], None] = lambda rows: None,
) -> None:
    """Measure all cases, and write the page after each.

    Args:
        compiled: values of the key `compile`; the loops have it or have it not.
        only: cases with this in their name.
        seconds: no case begins later than this.
        done: called with the rows of each case.
    """
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU: a rehearsal"
    until = time.monotonic() + seconds
    bandwidth = measure_bandwidth(device)
    machine = {"device": name, "bandwidth of a copy": f"{bandwidth / 1e9:.0f} GB/s"} | describe()
    about = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    rows: list[list[Any]] = []
    for work, mode, how in itertools.product(works, modes, compiled):
        shown = ", ".join(map(str, how.values())) if isinstance(how, dict) else "yes" if how else "no"
        case = [work.title, mode.name, shown]
        if only not in ", ".join(case):
            continue
        try:
            if time.monotonic() > until:
                raise TimeoutError(f"the {seconds:g} s are over")
            measured = measure(work, mode, how, device, rounds, bandwidth)
        except Exception as error:  # the next case may do better: nothing of an hour is thrown away
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            measured = [[f"not measured: {reason}", *[""] * (len(COLUMNS) - 4)]]
        found = [[*case, *row] for row in measured]
        rows += found
        free()
        torch.compiler.reset()
        print(f"{', '.join(case)}: done", flush=True)
        if out is not None:
            publish(out, DEFINITIONS, about, table(COLUMNS, rows))
        done(found)
    if out is None:
        publish(None, DEFINITIONS, about, table(COLUMNS, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page (default: print)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name: '124 M', 'NAIVE'")
    parser.add_argument("--no-compile", action="store_true", help="leave out the rows with compile=True")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than this")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    works, compiled = WORKS if chosen.device == "cuda" else TINY, (False,) if chosen.no_compile else (False, True)
    device = torch.device(chosen.device)
    run(works, MODES, compiled, device, chosen.rounds, chosen.out, chosen.only, chosen.seconds)


if __name__ == "__main__":
    main()
