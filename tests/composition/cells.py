"""The cells of the suite: which combinations there are, which of them are allowed, and which few stand for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from halfmesh.compat import Row, check, get_rows
from halfmesh.config.composition import Finding
from halfmesh.config.load import load_config
from halfmesh.parallel.registries import DATA_STRATEGIES
from tests.support.versions import SPLIT_SCHEDULES

from .workloads import SAMPLES, WORKLOADS, find_workload

MOST_RANKS = 8
# So that the scale grows by each update. apex has no key for how often it grows.
SCALES: dict[str | None, dict[str, Any]] = {
    "torch": {"init_scale": 256.0, "growth_interval": 1},
    "naive": {"initial_scale": 256.0, "growth_interval": 1, "hysteresis": 1},
    "apex": {"max_loss_scale": 256.0},
}
# Scales that are powers of 2 round alike, whichever rows are in a microbatch.
FLOAT8: dict[str | None, dict[str, Any]] = {"torch": {"recipe": "rowwise"}}
# O0 is fp32, and O3 makes no promise about its weights.
APEX_LEVELS = {"apex_o1": {"opt_level": "O1"}, "apex_o2": {"opt_level": "O2"}}


class Mode(NamedTuple):
    """A row of the composition table, and the config of its mode."""

    row: Row
    config: dict[str, Any]


def _modes() -> Iterator[tuple[str, Mode]]:
    for row in get_rows():
        variants = APEX_LEVELS if (row.mode, row.key) == ("apex", "fp16") else {str(row).replace(" ", "_"): {}}
        for name, options in variants.items():
            more = {"fp16": SCALES.get(row.mode, {}), "fp8": FLOAT8.get(row.mode, {})}
            yield name, Mode(row, {row.key: {"mode": row.mode} | options | more.get(row.key, {})} if row.key else {})


MODES = dict(_modes())


@dataclass(frozen=True)
class Pipe:
    """A value of the axis `pipeline`."""

    size: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        return f"pp{self.size}_{self.schedule}_m{self.microbatches}{chunks}"


NO_PIPE = Pipe()
PIPES = (
    NO_PIPE,
    *(Pipe(2, "gpipe", 1), Pipe(4, "gpipe", 2)),
    *(Pipe(2, "1f1b", 4), Pipe(4, "1f1b", 4)),
    Pipe(2, "interleaved", 4, 2),
    *(Pipe(2, name, 4, 2) for name in SPLIT_SCHEDULES),
)


@dataclass(frozen=True)
class Cell:
    """One combination. The names of the fields are the axes of the suite."""

    mode: str = "none"
    model: str = "mlp"
    tensor: int = 1
    data: int = 1
    sequence_parallel: bool = False
    gradient_accumulation: int = 1
    clip_grad_norm: bool = False
    reduce_dtype: str = "float32"
    pipeline: Pipe = NO_PIPE
    strategy: str = "replicate"
    context: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline.size * self.data * self.context * self.tensor

    @property
    def kinds(self) -> tuple[str, ...]:
        """The columns of the composition table that it shows."""
        axes = {"tensor": self.tensor, "pipeline": self.pipeline.size, "context": self.context, "expert": self.expert}
        return tuple(kind for kind, size in (axes | {self.strategy: self.data}).items() if size > 1)

    def config(self) -> dict[str, Any]:
        """What a user would write."""
        workload, pipe = find_workload(self.model), self.pipeline
        partition = {"partition": workload.points.get(pipe.size * pipe.chunks, "auto")}
        return MODES[self.mode].config | {
            "parallel": {
                "tensor": {"size": self.tensor, "plan": workload.plan, "sequence_parallel": self.sequence_parallel},
                "data": {"strategy": self.strategy, "size": self.data, "reduce_dtype": self.reduce_dtype},
                **({"pipeline": asdict(pipe) | partition} if pipe.size > 1 else {}),
                "context": self.context,
                "expert": self.expert,
            },
            "gradient_accumulation": self.gradient_accumulation,
            "clip_grad_norm": workload.max_norm if self.clip_grad_norm else 0.0,
        }

    def findings(self) -> list[Finding]:
        """What halfmesh has against the config, which does not depend on these."""
        plain = {"model": "mlp", "sequence_parallel": False, "gradient_accumulation": 1, "clip_grad_norm": False}
        return _findings(replace(self, **plain))

    @property
    def divides_unknown_sequence(self) -> bool:
        """Whether the plan does not say where the sequence is that is to be divided, or there is none."""
        workload = find_workload(self.model)
        return (self.sequence_parallel and not workload.sequence) or (self.context > 1 and not workload.tokens)

    def __str__(self) -> str:
        words = [self.mode, self.model, f"tp{self.tensor}", f"dp{self.data}"]
        words += [str(self.pipeline)] * (self.pipeline.size > 1)
        words += [f"cp{self.context}"] * (self.context > 1)
        words += [f"ep{self.expert}"] * (self.expert > 1)
        words += ["sp"] * self.sequence_parallel + [f"x{self.gradient_accumulation}"] + ["clip"] * self.clip_grad_norm
        words += [f"reduce_{self.reduce_dtype}"] * (self.reduce_dtype != "float32")
        return "-".join(words + [self.strategy] * (self.strategy != "replicate"))


AXES: dict[str, tuple[Any, ...]] = {
    "mode": tuple(MODES),
    "model": tuple(WORKLOADS),
    "tensor": (1, 2, 4),
    "data": (1, 2),
    "sequence_parallel": (False, True),
    "gradient_accumulation": (1, 2),
    "clip_grad_norm": (False, True),
    "reduce_dtype": ("float32", "bfloat16", "float16"),
    "pipeline": PIPES,
    "strategy": tuple(DATA_STRATEGIES.names()),
    "context": (1, 2, 4),
    "expert": (1,),  # of one model only: `EXPERTS`
}
assert list(AXES) == [field.name for field in fields(Cell)]


EXPERTS = (
    Cell("none", "mixtral", data=4, clip_grad_norm=True, strategy="fsdp", expert=2),
    Cell("none", "mixtral", data=2, clip_grad_norm=True, context=2, strategy="zero1", expert=2),
    Cell("torch_fp16", "mixtral", tensor=2, data=2, gradient_accumulation=2, expert=2),
    Cell("torch_bf16", "mixtral", data=4, strategy="zero1", expert=4),
    Cell("torch_fp8", "mixtral", data=2, clip_grad_norm=True, expert=2),
    Cell("naive_fp16", "mixtral", tensor=2, data=4, strategy="fsdp", expert=2),
    Cell("naive_bf16", "mixtral", data=4, reduce_dtype="bfloat16", gradient_accumulation=2, expert=2),
)
"""The cells with experts, which are data ranks; all are among those that stand for the others."""
LARGE = (
    Cell("torch_fp16", "gpt", 2, 2, pipeline=Pipe(2, "1f1b", 4), strategy="zero1"),
    Cell("naive_fp16", "llama", 2, 2, True, 1, True, pipeline=Pipe(2, "interleaved", 4, 2)),
)


@cache
def _findings(cell: Cell) -> list[Finding]:
    return check(load_config(cell.config()), cell.world_size, "cpu")


def is_possible(cell: Cell) -> bool:
    """Whether the samples can be divided so, the ranks are not too many for a small machine, and each axis that has no
    effect in it has its default."""
    parts = cell.data * cell.gradient_accumulation * cell.pipeline.microbatches
    is_plain = cell.reduce_dtype == "float32" and cell.strategy == "replicate"
    is_idle = (cell.tensor == 1 and cell.sequence_parallel) or (cell.data == 1 and not is_plain)
    return SAMPLES % parts == 0 and cell.world_size <= MOST_RANKS and not is_idle


@cache
def every() -> tuple[Cell, ...]:
    """All combinations, allowed or not."""
    plain = {"mode": ("none",), "model": ("mlp",), "clip_grad_norm": (False,)}
    layouts = [Cell(*values) for values in itertools.product(*(AXES | plain).values())]
    others = [dict(zip(plain, values, strict=True)) for values in itertools.product(*(AXES[axis] for axis in plain))]
    return tuple(replace(cell, **other) for cell in layouts if is_possible(cell) for other in others)


@cache
def product() -> tuple[Cell, ...]:
    """All allowed combinations, small worlds first."""
    allowed = (cell for cell in every() if not cell.divides_unknown_sequence and not cell.findings())
    return tuple(sorted(allowed, key=lambda cell: cell.world_size))


def groups(cell: Cell, size: int) -> set[tuple[Any, ...]]:
    """The values of each `size` axes."""
    values = [(axis, getattr(cell, axis)) for axis in AXES]
    return set(itertools.combinations(values, size))


@cache
def few() -> tuple[Cell, ...]:
    """Few allowed combinations on at most 4 ranks in which every possible value of each axis occurs, each mode and each
    model with each kind of layout, and any two kinds of layout together; and three with experts."""

    def wanted(cell: Cell) -> set[tuple[Any, ...]]:
        found = groups(cell, 1) | {(which, kind) for which in (cell.mode, cell.model) for kind in cell.kinds}
        return found | set(itertools.combinations(cell.kinds, 2))

    chosen = _choose([cell for cell in product() if cell.world_size <= 4], wanted)
    return tuple(sorted((*chosen, *EXPERTS[:3]), key=lambda cell: cell.world_size))


@cache
def covering() -> tuple[Cell, ...]:
    """Few allowed combinations in which every pair of values of two axes occurs that is possible on 4 ranks; and each
    mode with each model where a tensor group divides it, each with each where a pipeline cuts it, each mode with each
    strategy over data ranks. On 8 ranks both loss scales where all three kinds of parallelism meet."""

    def wanted(cell: Cell) -> set[tuple[Any, ...]]:
        found = groups(cell, 2) | {
            (kind, cell.mode, cell.model) for kind in ("tensor", "pipeline") if kind in cell.kinds
        }
        return found | ({("data", cell.mode, cell.strategy)} if cell.data > 1 else set())

    done = {each for cell in few() if cell not in EXPERTS for each in wanted(cell)}
    others = _choose([cell for cell in product() if cell.world_size <= 4], lambda cell: wanted(cell) - done)
    return tuple(sorted(dict.fromkeys((*few(), *others, *LARGE, *EXPERTS)), key=lambda cell: cell.world_size))


@cache
def thorough() -> tuple[Cell, ...]:
    """All allowed combinations without a pipeline and with replicated weights; and of the others so many that every
    possible three values of three axes occur."""
    plain = [cell for cell in product() if (cell.pipeline, cell.context, cell.strategy) == (NO_PIPE, 1, "replicate")]
    known = {*plain}
    others = [cell for cell in product() if cell not in known]
    chosen = (*plain, *_choose(others, lambda cell: groups(cell, 3)), *EXPERTS)
    return tuple(sorted(chosen, key=lambda cell: cell.world_size))


def _choose(cells: Sequence[Cell], wanted: Callable[[Cell], set[tuple[Any, ...]]]) -> tuple[Cell, ...]:
    """Some of `cells` in which everything occurs that is `wanted` of any.

    Greedy: the one with the most that is missing; of equals one with several kinds of parallelism, then the smallest.
    """
    kinds = {cell: (cell.tensor > 1) + (cell.data > 1) + (cell.pipeline.size > 1) for cell in cells}
    numbers: dict[tuple[Any, ...], int] = {}
    masks: dict[Cell, int] = {}
    for cell in sorted(cells, key=lambda cell: (-min(kinds[cell], 2), cell.world_size)):
        masks[cell] = sum(1 << numbers.setdefault(each, len(numbers)) for each in wanted(cell))
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        gains = {cell: gain for cell, mask in masks.items() if (gain := (mask & missing).bit_count())}
        chosen.append(max(gains, key=gains.__getitem__))
        masks = {cell: masks[cell] for cell in gains}  # what adds nothing now will not later
        missing &= ~masks[chosen[-1]]
    return tuple(sorted(chosen, key=lambda cell: cell.world_size))
