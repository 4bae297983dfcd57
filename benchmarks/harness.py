"""Contenders that take turns in one process, the ratios of their times, and processes to measure in.

Each round runs every contender once, in an order that is rotated from round to round. A contender's time is divided by
that of another one *in the same round*: whatever slows the machine down for longer than a round slows both.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOOP = "default loop"
AGAIN = "default loop again (A/A)"
FUSED = "loop with fused=True"
HALFMESH = "halfmesh"
REQUIRED = (LOOP, AGAIN, FUSED, HALFMESH)
"""A benchmark without one of these fails; a peer may be missing."""

MIN_ROUNDS, MAX_ROUNDS = 7, 101


@dataclass(frozen=True)
class Contender:
    """One way to do a step.

    Attributes:
        step: returns the loss, if it computes one.
        model: its Linear layers tell in which precision it computes.
        optimizer: its step counters are not counted as host reads.
        before: what comes before each `step` and is not part of it where `time_step` measures.
    """

    name: str
    step: Callable[[], torch.Tensor | None]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    before: Callable[[], torch.Tensor | None] = lambda: None
    close: Callable[[], None] = lambda: None

    def run(self, steps: int) -> torch.Tensor | None:
        """Take `steps` whole steps, and return the last loss."""
        loss = None
        for _ in range(steps):
            prepared = self.before()
            done = self.step()
            loss = prepared if done is None else done
        return loss


class Quartiles(NamedTuple):
    """The median of some ratios, and their quartiles."""

    median: float
    q25: float
    q75: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.q25:.3f}, {self.q75:.3f}]"


@dataclass
class Row:
    """Seconds a step of a contender, one for each round; or why it was not measured."""

    name: str
    seconds: list[float] = field(default_factory=list)
    missing: str = ""


def ratio(rows: Sequence[Row], name: str, base: str) -> Quartiles:
    """The times of `name` over those of `base` in the same rounds."""
    times = {row.name: row.seconds for row in rows}
    ratios = [mine / other for mine, other in zip(times[name], times[base], strict=True)]
    q25, median, q75 = statistics.quantiles(ratios, n=4, method="inclusive")
    return Quartiles(median, q25, q75)


def settle() -> None:
    """Wait until a GPU has nothing left to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def time_steps(contender: Contender, steps: int) -> float:
    """Seconds a whole step. Ranks begin together."""
    settle()
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    contender.run(steps)
    settle()
    return (time.perf_counter() - begin) / steps


def time_step(contender: Contender, _: int = 1) -> float:
    """Seconds of one `step`, without what comes before it."""
    contender.before()
    settle()
    begin = time.perf_counter()
    contender.step()
    settle()
    return time.perf_counter() - begin


def take_turns(
    contenders: Sequence[Contender],
    rounds: int,
    steps: int = 1,
    time_one: Callable[[Contender, int], float] = time_steps,
) -> list[Row]:
    """`rounds` rounds of `steps` steps each. Garbage is collected between the rounds, not within."""
    rows = [Row(contender.name) for contender in contenders]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for place in range(len(contenders)):
                turn = (place + number) % len(contenders)  # each comes first equally often
                rows[turn].seconds.append(time_one(contenders[turn], steps))
            gc.collect()
    finally:
        gc.enable()
    return rows


def rounds_within(seconds: float, one_round: float) -> int:
    """How many rounds fit into `seconds`, if each takes `one_round`. Odd, so that the median was measured."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / one_round))) | 1


# -- who takes part --------------------------------------------------------------------------------------------------

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 2e-3}
"""Relative, of the loss after warm-up: sums in another order, but the same computation."""
Makers = Sequence[tuple[str, Callable[[], Contender]]]


def warm_up(contender: Contender, steps: int) -> tuple[float, str]:
    """Take `steps` steps. Returns the last loss, and the dtypes in which the model's Linear layers computed."""
    seen: set[torch.dtype] = set()
    linears = [module for module in contender.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [linear.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype)) for linear in linears]
    loss = contender.run(steps)
    for hook in hooks:
        hook.remove()
    names = sorted(str(dtype).removeprefix("torch.") for dtype in seen)
    return float("nan") if loss is None else float(loss.detach()), ", ".join(names)


def find_difference(expected: float, loss: float, dtype: str, precision: str) -> str:
    """Why a contender is not comparable: another loss than the default loop's, or another precision; "" if it is."""
    if not abs(loss - expected) <= TOLERANCES[precision] * abs(expected):
        return f"it computes something else: a loss of {loss:.6g} after warm-up, and {expected:.6g} by the default loop"
    if dtype != DTYPES[precision]:
        return f"it computes in {dtype or 'no Linear layer at all'}, not in {DTYPES[precision]}"
    return ""


def make_comparable(makers: Makers, precision: str, warm: int) -> tuple[list[Contender], list[Row]]:
    """The contenders that can be made and that compute what the first one computes, after `warm` steps of each; and
    rows that say why the others are missing.

    Raises:
        RuntimeError: one of `REQUIRED` computes something else.
    """
    contenders, missing, expected = [], [], None
    for name, make in makers:
        try:
            contender = make()
            loss, dtype = warm_up(contender, warm)
        except Exception as error:  # another version of a peer may fail in any way
            if name in REQUIRED:
                raise
            missing.append(Row(name, missing=str(error).partition("\n")[0] or type(error).__name__))
            continue
        expected = loss if expected is None else expected
        difference = find_difference(expected, loss, dtype, precision)
        if not difference:
            contenders.append(contender)
        elif name in REQUIRED:
            raise RuntimeError(f"{name}: {difference}")
        else:
            contender.close()
            missing.append(Row(name, missing=difference))
    return contenders, missing


# -- processes -------------------------------------------------------------------------------------------------------


def on_ranks(ranks: int, measure: Callable[..., Any], *args: Any) -> list[Any]:
    """What `measure(*args)` returns on each rank, in fresh processes: what one measurement leaves in a process would
    change the next. Several ranks are a process group over gloo."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        mp.spawn(_run_rank, (ranks, folder, measure, args), nprocs=ranks)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def _run_rank(rank: int, ranks: int, folder: str, measure: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        # accelerate knows a run of several processes by these.
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    torch.save(measure(*args), f"{folder}/{rank}")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def slowest(seconds: list[float]) -> list[float]:
    """The largest of all ranks, number by number."""
    if not dist.is_initialized():
        return seconds
    everyone = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return everyone.tolist()
