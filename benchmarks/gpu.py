"""The same on one CUDA device: steps, updates, waits, memory, and how much of the device is used.

python -m benchmarks.gpu --out benchmarks/results/gpu.md          # `make bench-gpu`: over an hour
python -m benchmarks.gpu --only "124 M" --no-compile --out FILE   # minutes
python -m benchmarks.gpu --device cpu                             # a rehearsal with tiny models: all of the code runs
python -m benchmarks.gpu --predict 790 4.3                        # measures nothing: TFLOP/s and TB/s of a device

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfmesh.trainer.throughput import peak_flops

from .contenders import HALF, Setup, make_halfmesh, make_loop, make_masters_loop
from .harness import FUSED, HALFMESH, Contender, Makers, Row, ratio, settle, take_turns, time_step
from .machine import describe, publish, table
from .prediction import SHARE, Limits, Transformer, measure_bandwidth, measure_products, predict
from .works import Work, class_loss, make_transformer, token_loss, tokens

CLIP = 1.0
TOLERANCE = 0.02
"""Of the first loss, relative: NAIVE rounds more than autocast does, but does not compute another model."""
STEPS = 4
"""Of each contender in a round."""
BYTES_A_PARAMETER = 24
"""About what a contender keeps: weights, gradients and two moments in fp32, half-precision copies, activations."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
AGAIN, MASTERS = f"{FUSED} again (A/A)", "masters by hand, fused=True"
FORMS = {FUSED: "autocast", AGAIN: "autocast", MASTERS: "masters"}


class Mode(NamedTuple):
    """
    Attributes:
        precision: of the loop beside it.
        masters: the model is in half precision, with fp32 masters.
        compiles: torch.compile can be used with it.
        predicted: `predict` knows what it costs.
    """

    name: str
    precision: str
    config: dict[str, Any]
    masters: bool = False
    compiles: bool = True
    predicted: bool = True


MODES = [  # what is worth most first
    Mode("NAIVE fp16", "fp16", {"fp16": {"mode": "naive"}}, True),
    Mode("TORCH bf16", "bf16", {"bf16": {"mode": "torch"}}),
    Mode("NAIVE bf16", "bf16", {"bf16": {"mode": "naive"}}, True),
    Mode("TORCH fp16", "fp16", {"fp16": {"mode": "torch"}}),
    Mode("APEX O2", "fp16", {"fp16": {"mode": "apex", "opt_level": "O2"}}, True),
    Mode("APEX O1", "fp16", {"fp16": {"mode": "apex", "opt_level": "O1"}}, compiles=False, predicted=False),
    Mode("fp32", "fp32", {}),
    *(
        Mode(f"fp8, {recipe}", "bf16", {"bf16": None, "fp8": {"mode": "torch", "recipe": recipe}}, predicted=False)
        for recipe in ("tensorwise", "rowwise")
    ),
]
Case = tuple[Work, Mode, "bool | dict[str, Any]"]
"""With the value of the key `compile`; the loops have it or have it not."""


def gpt(
    title: str, depth: int, width: int, batch: int, length: int = 1024, vocabulary: int = 50304, head_size: int = 64
) -> Transformer:
    """GPT-2's vocabulary, rounded up to a multiple of 64; as there the head's weight is the embedding's."""

    def build() -> nn.Module:
        model = make_transformer(depth, width, length, head_size, vocabulary)
        model[-1].weight = model[0].tokens.weight  # type: ignore[union-attr]
        return model

    sizes = {"blocks": depth, "width": width, "tokens": batch * length, "vocabulary": vocabulary}
    return Transformer(title, build, lambda: tokens(batch, length, vocabulary), token_loss, **sizes)


def vit(title: str, name: str, batch: int, image: int = 224, **sizes: Any) -> Transformer:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, img_size=image, **sizes)
        return model

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, 3, image, image), torch.randint(0, 1000, (batch,))

    blocks, width, patches = sizes.get("depth", 12), sizes.get("embed_dim", 768), (image // 16) ** 2
    counts = {"blocks": blocks, "width": width, "tokens": batch * (1 + patches)}
    return Transformer(title, build, draw, class_loss, **counts)


WORKS = [  # the largest last
    vit("ViT-B/16, batch 32", "vit_base_patch16_224", 32),
    vit("ViT-B/16, batch 128", "vit_base_patch16_224", 128),
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


def allocated(device: torch.device) -> int:
    """Bytes."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def measure_peak(contender: Contender, device: torch.device, base: int) -> str:
    """Bytes a parameter at the peak of a step, above the `base` that was there before the contender."""
    if device.type != "cuda":
        contender.run(1)
        return "-"
    settle()
    torch.cuda.reset_peak_memory_stats()
    contender.run(1)
    peak = torch.cuda.max_memory_allocated() - base
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


def measure(case: Case, device: torch.device, rounds: int, limits: Limits) -> list[Any]:
    """The rows of a case, one for each contender.

    Raises:
        RuntimeError: a contender computes something else; the device has not enough memory.
    """
    work, mode, compiled = case
    setup = Setup.of(work, mode.precision, CLIP, str(device), compiled=compiled)
    making: dict[str, Callable[[], Contender]] = {
        FUSED: lambda: make_loop(setup, FUSED, fused=True),
        HALFMESH: lambda: make_halfmesh(setup, **mode.config),
    }
    if not compiled:
        making[AGAIN] = lambda: make_loop(setup, AGAIN, fused=True)
        if mode.masters:
            making[MASTERS] = lambda: make_masters_loop(setup, MASTERS, fused=True)
    plain = make_loop(dataclasses.replace(setup, compiled=False))
    parameters = sum(param.numel() for param in plain.model.parameters())
    plain.before()  # cuBLAS takes memory at its first product and keeps it: not on the first contender's account
    with FlopCounterMode(display=False) as counter:
        plain.before()
    flops, rate = counter.get_total_flops(), peak_flops(device, setup.dtype or torch.float32)
    del plain
    together = BYTES_A_PARAMETER * parameters * len(making) < 0.9 * memory_of(device)
    turns: list[Makers] = [[*making.items()]] if together else [[one] for one in making.items()]
    measured = [one for some in turns for one in measure_together(some, work.warm, rounds, device)]
    losses = [one.loss for one in measured]
    if not all(abs(loss - losses[0]) <= TOLERANCE * abs(losses[0]) for loss in losses):
        raise RuntimeError(f"the losses of the first step differ: {losses}")
    steps, rows = [one.step for one in measured], []

    for one in measured:
        name, seconds, tail = one.step.name, statistics.median(one.step.seconds), statistics.median(one.update.seconds)
        bound = update_bytes(parameters, mode.masters and name in (HALFMESH, MASTERS)) / limits.bandwidth
        mine, base = (predicted(case, contender, parameters, flops, limits) for contender in (name, FUSED))
        expected = ["-", "-"] if mine is None or base is None else [f"{mine / base:.2f}", f"{1000 * mine:.3g}"]
        by_hand = ratio(steps, name, MASTERS) if MASTERS in making else "-"
        used = "-" if rate is None else f"{flops / rate / seconds:.1%}"
        times = [f"{1000 * seconds:.3g}", expected[1], f"{1000 * tail:.3g}", f"{tail / bound:.3g}"]
        rows.append([name, ratio(steps, name, FUSED), expected[0], by_hand, *times, one.waits, one.peak, used])
    return rows


def predicted(case: Case, contender: str, parameters: int, flops: int, limits: Limits) -> float | None:
    """Seconds of a step; None if nothing is predicted of such a case."""
    work, mode, compiled = case
    if not isinstance(work, Transformer) or not mode.predicted:
        return None
    form = FORMS.get(contender, "masters" if mode.masters else "autocast")
    form = "fp32" if mode.precision == "fp32" else form
    scales = mode.precision == "fp16" and contender in (FUSED, AGAIN)
    return predict(work, form, contender != HALFMESH, scales, bool(compiled), parameters, flops, limits)


def predict_all(works: Sequence[Work], limits: Limits) -> list[list[Any]]:
    """Rows of `PREDICTED`; nothing is computed, but FLOPs are counted."""
    rows = []
    for work in works:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            model, (x, y) = work.build(), work.draw()
            work.criterion(model(x), y).backward()
        counts = sum(param.numel() for param in model.parameters()), counter.get_total_flops()
        for case in all_cases([work], MODES, (False,)):
            mine, base = (predicted(case, contender, *counts, limits) for contender in (HALFMESH, FUSED))
            if mine is not None and base is not None and case[1].precision != "fp32":
                rows.append([*name_of(case)[:2], f"{1000 * base:.3g}", f"{1000 * mine:.3g}", f"{mine / base:.2f}"])
    return rows


class Measured(NamedTuple):
    """Of a contender: the first loss, waits and peak of a step, and the seconds of steps and updates."""

    loss: float
    waits: str
    peak: str
    step: Row
    update: Row


def measure_together(makers: Makers, warm: int, rounds: int, device: torch.device) -> list[Measured]:
    """They take turns, so all of them are on the device."""
    contenders, losses, peaks = [], [], []
    for _, make in makers:
        free()
        base = allocated(device)
        contenders.append(make())
        loss = contenders[-1].run(1)
        losses.append(float("nan") if loss is None else float(loss.detach()))
        contenders[-1].run(warm)
        peaks.append(measure_peak(contenders[-1], device, base))
    steps = take_turns(contenders, rounds, STEPS)
    updates = take_turns(contenders, rounds, 1, time_step)
    waits = [count_waits(contender, device) for contender in contenders]
    for contender in contenders:
        contender.close()
    del contenders
    free()
    return [Measured(*one) for one in zip(losses, waits, peaks, steps, updates, strict=True)]


def memory_of(device: torch.device) -> float:
    """Bytes; of a CPU, where models are tiny, as many as they like."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


COLUMNS = ["model", "mode", "compile", "", "against fused=True", "predicted", "against masters by hand", "ms a step"]
COLUMNS += ["predicted ms", "ms an update", "over its bound", "waits a step", "peak bytes a parameter", "MFU"]
PREDICTED = ["model", "mode", "ms of the loop with fused=True", "ms of halfmesh", "ratio"]
DEFINITIONS = f"""# One GPU

Written by `make bench-gpu`. Ratios and the loop with fused=True: see [the CPU's table](../RESULTS.md). All clip at
{CLIP:g}. NAIVE and APEX stand beside the autocast loop of the same dtype, fp8 beside that of bf16. With compile, the
loop is compiled, too.

- **Masters by hand**: a half-precision model with fp32 masters, a foreach call for each of its copies, and fused=True:
  NAIVE's computation, without a loss scale.
- **Predicted**: the FLOPs of a step over {SHARE:g} of the rate of one large product, and the bytes that all else moves
  over the bandwidth of a copy, both measured on this device (`benchmarks/prediction.py` counts the bytes by kernels). A
  ratio that is off by more than 10 % is a finding: the bytes are counted wrongly, or the time goes elsewhere, as it
  does where the host cannot launch fast enough.
- **An update** goes from gradients to new weights. **Its bound** is the least number of bytes that it has to move
  (`gpu.update_bytes`), over the bandwidth of a copy on the same device. 1 is the best.
- **Waits**: {", ".join(WAITS)}, as torch.profiler counts them.
- **Peak bytes** are torch.cuda.max_memory_allocated within a step, less what was there before the contender was.
- Models of which the contenders do not fit on the device together are measured one contender after the other: their
  ratios have no A/A to be held against.
- **MFU** is the least time that the products of a step take on the device in the mode's dtype
  (`halfmesh.trainer.throughput`), over the time of the step."""


def all_cases(works: Sequence[Work], modes: Sequence[Mode], compiled: Sequence[bool | dict[str, Any]]) -> list[Case]:
    """Each with each, but for modes that cannot be compiled."""
    return [case for case in itertools.product(works, modes, compiled) if case[1].compiles or not case[2]]


def name_of(case: Case) -> list[str]:
    """The first three cells of its rows."""
    work, mode, how = case
    shown = ", ".join(map(str, how.values())) if isinstance(how, dict) else "yes" if how else "no"
    return [work.title, mode.name, shown]


def run(
    cases: Iterable[Case],
    device: torch.device,
    rounds: int,
    out: Path | None = None,
    seconds: float = math.inf,
    done: Callable[[list[list[Any]]], None] = lambda rows: None,
) -> None:
    """Measure all cases, and write the page after each.

    Args:
        seconds: no case begins later than this.
        done: called with the rows of each case.
    """
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU: a rehearsal"
    until = time.monotonic() + seconds
    bandwidth = measure_bandwidth(device)
    dtypes = [*HALF.values(), torch.float32] if device.type == "cuda" else [torch.float32]
    products = {dtype: measure_products(device, dtype) for dtype in dtypes}
    rates = ", ".join(f"{str(dtype).removeprefix('torch.')} {rate / 1e12:.3g}" for dtype, rate in products.items())
    machine = {"device": name, "bandwidth of a copy": f"{bandwidth / 1e9:.0f} GB/s"}
    machine |= {"large products, TFLOP/s": rates} | describe()
    about = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    rows: list[list[Any]] = []
    for case in cases:
        rate = products.get(HALF.get(case[1].precision, torch.float32), products[torch.float32])
        try:
            if time.monotonic() > until:
                raise TimeoutError(f"the {seconds:g} s are over")
            measured = measure(case, device, rounds, Limits(rate, bandwidth))
        except Exception as error:  # the next case may do better: nothing of an hour is thrown away
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            measured = [[f"not measured: {reason}", *[""] * (len(COLUMNS) - 4)]]
        found = [[*name_of(case), *row] for row in measured]
        rows += found
        free()
        torch.compiler.reset()
        print(f"{', '.join(name_of(case))}: done", flush=True)
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
    parser.add_argument("--predict", type=float, nargs=2, metavar=("TFLOP/S", "TB/S"), help="measure nothing")
    chosen = parser.parse_args()
    if chosen.predict:
        products, bandwidth = chosen.predict
        rows = predict_all(WORKS, Limits(products * 1e12, bandwidth * 1e12))
        said = f"Nothing was measured. Predicted with {products:g} TFLOP/s and {bandwidth:g} TB/s, without compile:"
        publish(chosen.out, DEFINITIONS, said, table(PREDICTED, rows))
        return
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    works, compiled = WORKS if chosen.device == "cuda" else TINY, (False,) if chosen.no_compile else (False, True)
    device = torch.device(chosen.device)
    cases = [case for case in all_cases(works, MODES, compiled) if chosen.only in ", ".join(name_of(case))]
    run(cases, device, chosen.rounds, chosen.out, chosen.seconds)


if __name__ == "__main__":
    main()
