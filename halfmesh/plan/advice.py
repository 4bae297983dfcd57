"""If a rank has not enough memory: the smallest change by which it would, by estimates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..compat import check, get_layout
from .dry_run import DryRun, find_model_problems, needed
from .rehearsal import with_microbatches

if TYPE_CHECKING:
    from ..config import Config

_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Change:
    """A change of the config (or of the batch), and what the largest rank would need by it, in bytes, about."""

    what: str
    config: Config
    bytes: float


def find_change(config: Config, run: DryRun, world_size: int, device: str, limit: int, model: str) -> Change | None:
    """The first of the changes that would fit into `limit`; they are ordered by how little they change."""
    alone = list(_changes(config, run, world_size))
    zero1 = [change for change in alone if change.what.startswith("zero1")]
    saved = needed(run.largest[1]) - zero1[0].bytes if zero1 else 0.0
    joined = [
        replace(change, what=f"zero1 and {change.what}", bytes=change.bytes - saved / _share(change, config))
        for change in alone
        if zero1 and change is not zero1[0]
    ]
    for change in [*alone, *joined]:
        fits = change.bytes <= limit and not check(change.config, world_size, device)
        if fits and not find_model_problems(change.config, world_size, model):
            return change
    return None


def _share(change: Change, config: Config) -> float:
    """By how much `change` divides the weights, of which zero1 saves a part."""
    before, after = config.parallel, change.config.parallel
    return after.tensor.size * after.pipeline.size / (before.tensor.size * before.pipeline.size)


def _changes(config: Config, run: DryRun, world_size: int) -> Iterator[Change]:
    figures = run.largest[1]
    total, parts = needed(figures), figures.parts
    states = sum(parts.get(part, 0) for part in ("parameters", "masters", "optimizer", "gradients"))
    activations = parts.get("activations", 0)
    layout, parallel = get_layout(config, world_size), config.parallel
    if layout.data > 1 and parallel.data.strategy == "replicate":
        saved = (parts["masters"] + parts["optimizer"]) * (1 - 1 / layout.data)
        data = parallel.data.model_copy(update={"strategy": "zero1"})
        yield Change("zero1 (parallel = dict(data='zero1'))", _with(config, data=data), total - saved)
    wanted = parallel.pipeline.microbatches
    for factor in _FACTORS if activations and run.rows else ():
        less = activations * (1 - 1 / factor)
        if parallel.pipeline.size > 1 and wanted and run.rows % (wanted * factor) == 0:
            if parallel.pipeline.schedule != "gpipe":  # which keeps all of the batch, however it is split
                what = f"parallel.pipeline.microbatches={wanted * factor} in place of {wanted}"
                yield Change(what, with_microbatches(config, wanted * factor), total - less)
        elif parallel.pipeline.size == 1 and run.rows % factor == 0:
            cycle = config.gradient_accumulation * factor
            what = f"batches of {run.rows // factor} rows in place of {run.rows}, with gradient_accumulation={cycle}"
            yield Change(what, config.model_copy(update={"gradient_accumulation": cycle}), total - less)
    for factor in _FACTORS:
        less = states * (1 - 1 / factor)
        size = layout.tensor * factor
        if world_size % (size * layout.pipeline) == 0 and parallel.data.size is None:
            # Between divided layers activations are whole: of about half of them nothing is saved.
            tensor = parallel.tensor.model_copy(update={"size": size})
            half = activations / 2 * (1 - 1 / factor)
            yield Change(
                f"parallel.tensor={size} in place of {layout.tensor}", _with(config, tensor=tensor), total - less - half
            )
        size = layout.pipeline * factor
        if world_size % (size * layout.tensor) == 0 and parallel.data.size is None and layout.pipeline > 1:
            pipeline = parallel.pipeline.model_copy(update={"size": size})
            what = f"parallel.pipeline.size={size} in place of {layout.pipeline}"
            yield Change(what, _with(config, pipeline=pipeline), total - less)


def _with(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=changes)})
