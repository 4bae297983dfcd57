"""What composes with what: one source for the check before a run, the table in the docs, and the tests.

Everything here is decided from the config, the number of ranks and the kind of device. Nothing is started, no GPU is
asked, no process group is needed. What depends on the model is checked where the model is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from .amp.plugin import AMP_PLUGINS, AMPPlugin
from .config.config import Config
from .config.schema import DataConfig
from .errors import IncompatibleConfigError, bullet_list, did_you_mean
from .parallel.registries import DATA_STRATEGIES, SCHEDULES, NotBuilt

Kind = Literal["refused", "unbuilt"]
Cell = Literal["yes", "refused", "not built yet"]

DEVICES = ("cpu", "cuda")
HALF_DTYPES = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})

UNBUILT_AXES = frozenset({"tensor", "pipeline"})
"""Axes whose size must be 1 for now."""
UNBUILT_KEYS = ("activation_checkpoint", "activation_offload", "compile", "debug", "resume")
"""Keys that must have their default for now."""

_FSDP_KEYS = (
    "param_dtype",
    "output_dtype",
    "buffer_dtype",
    "reshard_after_forward",
    "prefetch",
    "cpu_offload",
    "hybrid",
)


@dataclass(frozen=True)
class Finding:
    """One reason why a config cannot run. `where` is a key, or a cell of the composition table."""

    kind: Kind
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Layout:
    """The sizes of the mesh axes."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Row:
    """A row of the composition table: a mode with its half precision, or no mode."""

    mode: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.mode} {self.key}" if self.mode else "none"

    @property
    def plugin(self) -> type[AMPPlugin] | None:
        return AMP_PLUGINS.get(self.mode) if self.mode else None


def check(config: Config, world_size: int, device: str = "cuda") -> list[Finding]:
    """Everything that keeps `config` from running on `world_size` ranks with devices of kind `device`.

    `device` may carry an index ("cuda:1"). An empty list means that nothing is known against it.
    """
    row = _row_of(config)
    layout = get_layout(config, world_size)
    findings = [*_check_world(config, world_size), *_check_row(row), *_check_device(row, device)]
    for column in _active_columns(config, layout):
        findings += _check_cell(row, column)
    findings += [*_check_pipeline(config), *_check_data(config), *_check_keys(config)]
    return findings


def raise_for(findings: Sequence[Finding], source: str = "the config") -> None:
    """Raise what `findings` amount to, if anything.

    Raises:
        IncompatibleConfigError: something is refused; the message lists what is not built yet, too.
        NotImplementedError: nothing is refused, but something is not built yet.
    """
    lines = [str(finding) for finding in findings]
    if any(finding.kind == "refused" for finding in findings):
        raise IncompatibleConfigError(lines, source)
    if lines:
        raise NotImplementedError(bullet_list(f"{len(lines)} thing(s) in {source} are not built yet:", lines))


def get_layout(config: Config, world_size: int) -> Layout:
    """The mesh that `config` makes of `world_size` ranks; data is at least 1 where the degrees do not fit."""
    parallel = config.parallel
    pipeline, tensor = parallel.pipeline.size, parallel.tensor.size
    return Layout(pipeline, parallel.data.size or max(1, world_size // (pipeline * tensor)), tensor)


def composition_table() -> dict[str, dict[str, Cell]]:
    """Row to column to cell, for all registered modes and strategies, third parties' too."""
    return {
        str(row): {column: _verdict([*_check_row(row), *_check_cell(row, column)]) for column in get_columns()}
        for row in get_rows()
    }


def render_table() -> str:
    """The composition table in Markdown."""
    lines = ["| | " + " | ".join(get_columns()) + " |", "|---" * (len(get_columns()) + 1) + "|"]
    for row, cells in composition_table().items():
        words = (f"**{cell}**" if cell == "refused" else cell for cell in cells.values())
        lines.append(f"| {row} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def get_rows() -> list[Row]:
    """No mode, then each registered mode in fp16 and bf16."""
    return [Row(), *(Row(mode, key) for mode in AMP_PLUGINS.names() for key in HALF_DTYPES)]


def get_columns() -> list[str]:
    """tensor, pipeline, and each registered data strategy."""
    return ["tensor", "pipeline", *DATA_STRATEGIES.names()]


def _verdict(findings: Sequence[Finding]) -> Cell:
    if any(finding.kind == "refused" for finding in findings):
        return "refused"
    return "not built yet" if findings else "yes"


def _row_of(config: Config) -> Row:
    if config.precision is None:
        return Row()
    return Row(config.precision.mode, "fp16" if config.fp16 else "bf16")


def _active_columns(config: Config, layout: Layout) -> Iterator[str]:
    """The columns that the config uses: an axis larger than 1, and a strategy that was asked for or has ranks."""
    if layout.tensor > 1:
        yield "tensor"
    if layout.pipeline > 1:
        yield "pipeline"
    strategy = config.parallel.data.strategy
    if layout.data > 1 or strategy != "replicate":
        yield strategy


def _check_row(row: Row) -> Iterator[Finding]:
    """What a mode says of itself."""
    if row.plugin is None or row.key is None:
        return
    dtype, composes = HALF_DTYPES[row.key], row.plugin.composes
    if dtype not in composes.dtypes:
        allowed = ", ".join(key for key, name in HALF_DTYPES.items() if name in composes.dtypes) or "no half precision"
        default = f"mode {row.mode!r} has no {dtype}; it has {allowed}"
        yield Finding("refused", str(row), composes.why_not.get(dtype, default))
    if not row.plugin.built:
        yield Finding("unbuilt", f"{row.key}.mode={row.mode!r}", f"mode {row.mode!r} is not built yet")


def _check_cell(row: Row, column: str) -> Iterator[Finding]:
    """One cell of the table: the mode's refusal of the column, and whether the column exists."""
    where = f"{row} x {column}"
    if row.plugin is not None:
        composes = row.plugin.composes
        allowed = {"tensor": composes.tensor, "pipeline": composes.pipeline}.get(column, column in composes.data)
        if not allowed:
            default = f"mode {row.mode!r} does not work with {column}; choose another mode, or leave {column} out"
            yield Finding("refused", where, composes.why_not.get(column, default))
            return
    if column in UNBUILT_AXES:
        yield Finding("unbuilt", where, f"parallel.{column}.size > 1 is not built yet; use 1")
    elif isinstance(entry := DATA_STRATEGIES.peek(column), NotBuilt):
        yield Finding("unbuilt", where, f"{entry.what} is not built yet; use 'replicate'")


def _check_world(config: Config, world_size: int) -> Iterator[Finding]:
    """Whether the degrees multiply to the number of ranks."""
    if world_size < 1:
        yield Finding("refused", "world_size", f"{world_size} is not a number of ranks; it must be at least 1")
        return
    tensor, pipeline, data = config.parallel.tensor.size, config.parallel.pipeline.size, config.parallel.data.size
    product = tensor * pipeline
    if world_size % product:
        near = " or ".join(f"tensor={t}, pipeline={p}" for t, p in _find_degrees(tensor, pipeline, world_size))
        below, above = world_size // product * product, (world_size // product + 1) * product
        ranks = f"{below} or {above}" if below else str(above)
        yield Finding(
            "refused",
            "parallel",
            f"tensor={tensor} x pipeline={pipeline} = {product} does not divide the {world_size} ranks; "
            f"use {near}, or start {ranks} ranks",
        )
    elif data is not None and data * product != world_size:
        yield Finding(
            "refused",
            "parallel.data.size",
            f"{data} x tensor={tensor} x pipeline={pipeline} = {data * product}, but there are {world_size} ranks; "
            f"remove it (the other axes leave {world_size // product}), or start {data * product} ranks",
        )


def _find_degrees(tensor: int, pipeline: int, world_size: int, most: int = 2) -> list[tuple[int, int]]:
    """The (tensor, pipeline) nearest to those given whose product divides `world_size`."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    pairs = [(t, p) for t in divisors for p in divisors if world_size % (t * p) == 0]
    return sorted(pairs, key=lambda pair: abs(pair[0] - tensor) + abs(pair[1] - pipeline))[:most]


def _check_device(row: Row, device: str) -> Iterator[Finding]:
    kind = str(device).partition(":")[0]
    if kind not in DEVICES:
        near = did_you_mean(kind, DEVICES)
        yield Finding("refused", "device", f"{device!r} is not supported; allowed: {', '.join(DEVICES)}{near}")
    elif row.plugin is not None and kind not in row.plugin.composes.devices:
        allowed = ", ".join(sorted(row.plugin.composes.devices))
        default = f"mode {row.mode!r} does not run on {kind}; it runs on {allowed}"
        yield Finding("refused", f"{row} on {kind}", row.plugin.composes.why_not.get(kind, default))


def _check_pipeline(config: Config) -> Iterator[Finding]:
    """Microbatches and chunks against the schedule; without a pipeline these keys have no effect."""
    pipeline = config.parallel.pipeline
    size, microbatches, schedule = pipeline.size, pipeline.microbatches, pipeline.schedule
    if size == 1:
        return
    if isinstance(SCHEDULES.peek(schedule), NotBuilt):
        yield Finding("unbuilt", "parallel.pipeline.schedule", f"{schedule!r} is not built yet")
    where = "parallel.pipeline.microbatches"
    if microbatches is None:
        yield Finding("refused", where, f"is required when pipeline.size > 1; {2 * size} is a start for size={size}")
    elif schedule == "1f1b" and microbatches < size:
        message = f"{microbatches} is fewer than the {size} stages, which schedule='1f1b' has to fill"
        yield Finding("refused", where, f"{message}; use {size} or more, or schedule='gpipe'")
    elif schedule == "interleaved" and microbatches % size:
        near = _multiples_near(microbatches, size)
        message = f"{microbatches} is not a multiple of the {size} stages, which schedule='interleaved' needs"
        yield Finding("refused", where, f"{message}; use {near}")
    where = "parallel.pipeline.chunks"
    if schedule == "interleaved" and pipeline.chunks < 2:
        message = f"{pipeline.chunks} chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'"
        yield Finding("refused", where, message)
    elif schedule in ("gpipe", "1f1b") and pipeline.chunks > 1:
        message = f"{pipeline.chunks} chunks per rank need schedule='interleaved'; schedule={schedule!r} has one"
        yield Finding("refused", where, message)


def _multiples_near(number: int, step: int) -> str:
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)


def _check_data(config: Config) -> Iterator[Finding]:
    data = config.parallel.data
    if data.reduce_dtype == "float16" and not _scales_loss(config):
        message = "without a loss scale, gradients leave float16's range while they are summed; use 'float32'"
        yield Finding("refused", "parallel.data.reduce_dtype", message)
    if data.strategy != "fsdp":
        for key in _FSDP_KEYS:
            if getattr(data, key) != DataConfig.model_fields[key].default:
                message = f"only strategy='fsdp' has it, and the strategy is {data.strategy!r}; remove it"
                yield Finding("refused", f"parallel.data.{key}", message)
    elif data.param_dtype not in (None, config.precision_dtype or "float32"):
        message = f"{data.param_dtype!r} is not what the mode computes in ({config.precision_dtype or 'float32'})"
        yield Finding("refused", "parallel.data.param_dtype", f"{message}; remove it: the mode decides")


def _scales_loss(config: Config) -> bool:
    plugin = _row_of(config).plugin
    if config.precision is None or config.precision_dtype is None or plugin is None:
        return False
    if not plugin.built:
        return True  # it has no recipe to ask yet
    dtype: torch.dtype = getattr(torch, config.precision_dtype)
    return plugin.recipe(config.precision.options, dtype).loss_scale is not None


def _check_keys(config: Config, keys: Iterable[str] = UNBUILT_KEYS) -> Iterator[Finding]:
    for key in keys:
        value, default = getattr(config, key), type(config).model_fields[key].default
        if value != default:
            yield Finding("unbuilt", key, f"{value!r} is not built yet; leave it at {default!r}")
