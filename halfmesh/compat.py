"""The composition table: one source for the check before a run, the docs and the tests.

Everything here is decided from the config, the number of ranks and the kind of device. It starts
nothing and needs no GPU and no process group. Limits of the model are checked when the model is parallelized.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .amp.plugin import AMP_PLUGINS, PRECISIONS, AMPPlugin
from .amp.recipe import FP32
from .config.composition import Finding, Setup, find_key_problems
from .config.config import Config
from .errors import IncompatibleConfigError, RegistryError, counted, did_you_mean, show
from .parallel.registries import AXES, DATA_STRATEGIES

Cell = Literal["yes", "rejected"]

DEVICES = ("cpu", "cuda")
_OTHER_NAMES = {"gpu": "cuda", "tpu": "", "npu": "", "xpu": ""}  # no typing mistakes of "cpu"


@dataclass(frozen=True)
class Row:
    """A row of the composition table: a mode with its precision, or no mode."""

    mode: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.mode} {self.key}" if self.mode else "none"

    @property
    def plugin(self) -> type[AMPPlugin] | None:
        return AMP_PLUGINS.get(self.mode) if self.mode else None


def check(config: Config, world_size: int, device: str = "cuda") -> list[Finding]:
    """Everything that prevents `config` from running on `world_size` ranks with devices of kind `device`.

    `device` may carry an index ("cuda:1"). An empty list: the combination is supported.
    """
    return check_setup(Setup.of(config, world_size), device)


def check_setup(setup: Setup, device: str) -> list[Finding]:
    """The same of a config with its mesh and recipe."""
    findings, kind = list(_check_world(setup.config, setup.dims.world_size)), device.partition(":")[0]
    if kind not in DEVICES:
        near = did_you_mean(kind, DEVICES, _OTHER_NAMES)
        message = f"{show(device)} is not supported; allowed: {', '.join(DEVICES)}{near}"
        findings.append(Finding("device", message))
    findings += _check_mode(_row_of(setup), _active_columns(setup), kind)
    return [*findings, *find_key_problems(setup)]


def raise_for(findings: Sequence[Finding], source: str = "the config") -> None:
    """Raise IncompatibleConfigError, with all of `findings`, if there are any."""
    if findings:
        raise IncompatibleConfigError([str(finding) for finding in findings], source)


def mesh_sizes(config: Config, world_size: int) -> dict[str, int]:
    """The axes of the mesh that `config` makes of `world_size` ranks and their sizes, outermost first, as
    `ParallelContext.sizes` will have them. dp is at least 1 if the other axes do not fit."""
    return dict(config.parallel.dims(world_size).sizes)


def composition_table() -> dict[str, dict[str, Cell]]:
    """Row -> column -> cell, for all registered modes, axes and strategies, including third parties'."""
    return {str(row): {column: _cell(row, column) for column in get_columns()} for row in get_rows()}


def render_table() -> str:
    """The composition table in Markdown, without modes in a format that they do not have."""
    lines = ["| | " + " | ".join(get_columns()) + " |", "|---" * (len(get_columns()) + 1) + "|"]
    for row, cells in composition_table().items():
        if "yes" not in cells.values():
            continue
        words = " | ".join(cells.values())
        lines.append(f"| {row} | {words.replace('rejected', '**rejected**')} |")
    return "\n".join(lines) + "\n"


def get_rows() -> list[Row]:
    """No mode, then each registered mode in each precision."""
    return [Row(), *(Row(mode, key) for mode in AMP_PLUGINS.names() for key in PRECISIONS)]


def get_columns() -> list[str]:
    """Each registered axis, then each data strategy."""
    return [*AXES.names(), *DATA_STRATEGIES.names()]


def _cell(row: Row, column: str) -> Cell:
    try:
        return "rejected" if any(_check_mode(row, [column])) else "yes"
    except RegistryError:  # a package's mode that cannot be loaded; a config that names it gets the error
        return "rejected"


def _row_of(setup: Setup) -> Row:
    """The row of the mode; a mode with `enabled=False` that then does nothing composes like no mode."""
    precision = setup.config.precision
    is_off = getattr(precision and precision.options, "enabled", True) is False
    if precision is None or (is_off and replace(setup.recipe, num_losses=1) == FP32):
        return Row()
    return Row(precision.mode, setup.config.precision_key)


def _active_columns(setup: Setup) -> Iterator[str]:
    """The columns that the config uses: axes larger than 1, and the strategy if it was set or has several ranks."""
    parallel = setup.config.parallel
    yield from (name for name, size in parallel.sizes.items() if size > 1)
    strategy = parallel.data.strategy
    if setup.dims.grad_ranks > 1 or strategy != "replicate":
        yield strategy


def _check_mode(row: Row, columns: Iterable[str], device: str | None = None) -> Iterator[Finding]:
    """Conflicts of the mode: with its precision, the kind of device, and columns of the table."""
    if row.plugin is None or row.key is None:
        return
    mode, composes, dtype = f"mode {row.mode!r}", row.plugin.composes, PRECISIONS[row.key]
    if dtype not in composes.dtypes:
        allowed = ", ".join(key for key, name in PRECISIONS.items() if name in composes.dtypes) or "none of them"
        yield Finding(str(row), composes.why_not.get(dtype, f"{mode} has no {row.key}; it has {allowed}"))
    if device in DEVICES and device not in composes.devices:
        default = f"{mode} does not run on {device}; it runs on {', '.join(sorted(composes.devices))}"
        yield Finding(f"{row} on {device}", composes.why_not.get(device, default))
    for column in columns:
        kind = (AXES if column in AXES else DATA_STRATEGIES).get(column)
        if column not in composes.parallel and row.mode not in getattr(
            kind, "modes", ()
        ):  # a third party's lists modes
            default = f"{mode} does not work with {column}; choose another mode, or leave {column} out"
            yield Finding(f"{row} x {column}", composes.why_not.get(column, default))


def _check_world(config: Config, world_size: int) -> Iterator[Finding]:
    """Yields a finding unless the degrees multiply to the number of ranks."""
    data, product, all_sizes = config.parallel.data, config.parallel.ranks_of_batch, config.parallel.sizes
    views = {name: size for name, size in all_sizes.items() if size > 1 and AXES.get(name).replica_dim}
    sizes = {name: size for name, size in all_sizes.items() if not AXES.get(name).replica_dim}
    given = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if world_size < 1:
        yield Finding("world_size", f"{world_size} is not a number of ranks; it must be at least 1")
    elif world_size % product:
        below = world_size // product * product
        start = f"torchrun --standalone --nproc-per-node {product} train.py"
        ranks = " or ".join(str(n) for n in (below, below + product) if n)
        advice = f"choose sizes whose product does, or start {ranks} ranks"
        if world_size == 1:
            words = f"{given} = {product} ranks, but there is 1; start them with `{start}`, or with `halfmesh run`"
        else:
            words = f"{given} = {product} does not divide the {world_size} ranks; {advice}"
        yield Finding("parallel", words)
    else:
        data_ranks = world_size // product
        averaged = data_ranks * math.prod(size for name, size in sizes.items() if AXES.get(name).splits_loss)
        for key, message in DATA_STRATEGIES.get(data.strategy).find_size_problems(data, averaged):
            yield Finding(key, message)
        of_data = " ".join(f"(data.size includes the {name} ranks)" for name in views)
        if data.size not in (None, data_ranks):
            total = data.size * product
            message = f"{data.size} x {given} = {total}, but there are {world_size} ranks; remove it, or start {total}"
            yield Finding("parallel.data.size", f"{message} {of_data}".rstrip())
        for name, size in views.items():
            if data_ranks % size:
                fits = ", ".join(str(n) for n in range(1, data_ranks + 1) if data_ranks % n == 0)
                message = (
                    f"{size} does not divide the {counted(data_ranks, 'data rank')}, which the {name} ranks are part of"
                )
                yield Finding(f"parallel.{name}", f"{message}; use one of {fits}")
