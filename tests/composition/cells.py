"""The cells of the suite: which combinations there are, which of them are allowed, and which few stand for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from halfmesh.compat import Row, check, get_rows
from halfmesh.config.composition import Finding
from halfmesh.config.load import load_config
from halfmesh.parallel.registries import DATA_STRATEGIES
from tests.support.versions import SPLIT_SCHEDULES

from .workloads import SAMPLES, WORKLOADS, find_workload

INITIAL_SCALE = 256.0
MOST_RANKS = 8
# So that the scale grows by each update. apex has no key for how often it grows.
SCALES: dict[str | None, dict[str, Any]] = {
    "torch": {"init_scale": INITIAL_SCALE, "growth_interval": 1},
    "naive": {"initial_scale": INITIAL_SCALE, "growth_interval": 1, "hysteresis": 1},
    "apex": {"max_loss_scale": INITIAL_SCALE},
}
# Scales that are powers of 2 round alike, whichever rows are in a microbatch.
FLOAT8: dict[str | None, dict[str, Any]] = {"torch": {"recipe": "rowwise"}}
# O0 is fp32, and O3 makes no promise about its weights.
APEX_LEVELS = {"apex_o1": {"opt_level": "O1"}, "apex_o2": {"opt_level": "O2"}}


@dataclass(frozen=True)
class Mode:
    """A row of the composition table, with options of its mode."""

    row: Row
    options: dict[str, Any]

    def config(self, **more: Any) -> dict[str, Any]:
        return {self.row.key: {"mode": self.row.mode, **self.options, **more}} if self.row.key else {}


def _modes() -> Iterator[tuple[str, Mode]]:
    for row in get_rows():
        variants = APEX_LEVELS if (row.mode, row.key) == ("apex", "fp16") else {str(row).replace(" ", "_"): {}}
        for name, options in variants.items():
            more = {"fp16": SCALES.get(row.mode, {}), "fp8": FLOAT8.get(row.mode, {})}
            yield name, Mode(row, options | more.get(row.key, {}))


MODES = dict(_modes())


@dataclass(frozen=True)
class Pipe:
    """A value of the axis `pipeline`."""

    size: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.size * self.chunks

    def config(self, partition: Any) -> dict[str, Any]:
        return {"pipeline": asdict(self) | {"partition": partition}} if self.size > 1 else {}

    def __str__(self) -> str:
        chunks = f"v{self.chunks}" if self.chunks > 1 else ""
        return f"pp{self.size}_{self.schedule}_m{self.microbatches}{chunks}"


NO_PIPE = Pipe()
PIPES = (
    NO_PIPE,
    Pipe(2, "gpipe", 1),
    Pipe(2, "gpipe", 4),
    Pipe(2, "1f1b", 2),
    Pipe(2, "1f1b", 4),
    Pipe(2, "interleaved", 2, 2),
    Pipe(2, "interleaved", 4, 2),
    Pipe(4, "gpipe", 2),
    Pipe(4, "1f1b", 4),
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

    def config(self, **options: Any) -> dict[str, Any]:
        """What a user would write; with more `options` of the mode."""
        workload = find_workload(self.model)
        return MODES[self.mode].config(**options) | {
            "parallel": {
                "tensor": {"size": self.tensor, "plan": workload.plan, "sequence_parallel": self.sequence_parallel},
                "data": {"strategy": self.strategy, "size": self.data, "reduce_dtype": self.reduce_dtype},
                **self.pipeline.config(workload.partition(self.pipeline.stages)),
                **({"context": self.context} if self.context > 1 else {}),
                **({"expert": self.expert} if self.expert > 1 else {}),
            },
            "gradient_accumulation": self.gradient_accumulation,
            "clip_grad_norm": workload.max_norm if self.clip_grad_norm else 0.0,
        }

    def findings(self) -> list[Finding]:
        """What halfmesh has against the config."""
        # Which does not depend on these, and takes a millisecond.
        return _findings(
            replace(self, model="mlp", sequence_parallel=False, gradient_accumulation=1, clip_grad_norm=False)
        )

    @property
    def divides_unknown_sequence(self) -> bool:
        """Whether it asks for sequence parallelism of a model whose plan does not say where, or for sequences of a
        model that has none."""
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


@cache
def _findings(cell: Cell) -> list[Finding]:
    return check(load_config(cell.config()), cell.world_size, "cpu")


def is_possible(cell: Cell) -> bool:
    """Whether the samples can be divided so, the ranks are not too many for a small machine, and each axis that has no
    effect in it has its default."""
    parts = cell.data * cell.gradient_accumulation * cell.pipeline.microbatches
    is_idle = (cell.tensor == 1 and cell.sequence_parallel) or (
        cell.data == 1 and (cell.reduce_dtype, cell.strategy) != ("float32", "replicate")
    )
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


def is_plain(cell: Cell) -> bool:
    """Whether no pipeline cuts the model, ranks have whole sequences, and data ranks whole copies."""
    return cell.pipeline == NO_PIPE and cell.context == 1 and cell.strategy == "replicate"


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
    strategy over data ranks. On 8 ranks each mode where all three kinds of parallelism meet, and any two axes once of
    which some values need so many."""

    def wanted(cell: Cell) -> set[tuple[Any, ...]]:
        found = groups(cell, 2) | {
            (kind, cell.mode, cell.model) for kind in ("tensor", "pipeline") if kind in cell.kinds
        }
        return found | ({("data", cell.mode, cell.strategy)} if cell.data > 1 else set())

    small = tuple(cell for cell in product() if cell.world_size <= 4)
    known = {pair for cell in small for pair in groups(cell, 2)}

    def large(cell: Cell) -> set[tuple[Any, ...]]:
        found: set[tuple[Any, ...]] = {(one, other) for (one, _), (other, _) in groups(cell, 2) - known}
        return found | ({("3d", cell.mode)} if cell.data > 1 and {"tensor", "pipeline"} <= {*cell.kinds} else set())

    done = {each for cell in few() if cell not in EXPERTS for each in wanted(cell)}
    chosen = (*few(), *_choose(small, lambda cell: wanted(cell) - done), *_choose(product(), large), *EXPERTS)
    return tuple(sorted(dict.fromkeys(chosen), key=lambda cell: cell.world_size))


@cache
def thorough() -> tuple[Cell, ...]:
    """All allowed combinations without a pipeline and with replicated weights; and of the others so many that every
    possible three values of three axes occur."""
    others = tuple(cell for cell in product() if not is_plain(cell))
    chosen = [*filter(is_plain, product()), *_choose(others, lambda cell: groups(cell, 3))]
    return tuple(sorted((*chosen, *EXPERTS), key=lambda cell: cell.world_size))


def _choose(cells: Sequence[Cell], wanted: Callable[[Cell], set[tuple[Any, ...]]]) -> tuple[Cell, ...]:
    """Some of `cells` in which everything occurs that is `wanted` of any.

    Greedy: the one with the most that is still missing, then the next. Of equals one that uses several kinds of
    parallelism, and then the smallest world.
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
