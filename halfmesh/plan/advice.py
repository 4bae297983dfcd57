"""If a rank has not enough memory: the smallest change by which it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compat import check, get_layout
from ..config.schema import ParallelConfig
from ..key_checks import recipe_of
from .dry_run import DryRun, dry_run, find_model_problems, needed
from .estimates import Elements, Held, hold
from .model_facts import ModelFacts, find_facts
from .rehearsal import with_microbatches

if TYPE_CHECKING:
    from ..config import Config

_FACTORS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Change:
    """A change of the config (or of the batch), and what the largest rank would need by it, in bytes.

    Attributes:
        is_estimate: whether the bytes are about right, by rule; else a dry run has found them.
    """

    what: str
    config: Config
    bytes: float
    is_estimate: bool = True


@dataclass(frozen=True)
class Asked:
    """A run that does not fit: on so many ranks, with devices of this kind and `limit` bytes each; see `dry_run`."""

    run: DryRun
    world_size: int
    device: str
    limit: int
    model: str
    batch: tuple[str, ...] = ()


def find_change(config: Config, asked: Asked) -> Change | None:
    """The first of the changes that would fit; they are ordered by how little they change.

    Whether computing activations again is enough is tried in a dry run: how much that saves depends on the model.
    """
    facts = find_facts(asked.model, asked.batch, (1,), (1,))
    alone = list(_changes(config, asked))
    zero1 = [(what, changed) for what, changed in alone if what.startswith("zero1")]
    joined = [(f"zero1 and {what}", changed) for _, base in zero1 for what, changed in _changes(base, asked)]
    for what, changed in [*alone, *joined]:
        if check(changed, asked.world_size, asked.device):
            continue
        change = _measure(what, config, changed, asked, facts)
        fits = change is not None and change.bytes <= asked.limit
        if fits and not find_model_problems(changed, asked.world_size, asked.model):
            return change
    return None


def _measure(what: str, config: Config, changed: Config, asked: Asked, facts: ModelFacts) -> Change | None:
    if changed.activation_checkpoint == config.activation_checkpoint:
        return Change(what, changed, _about(config, changed, asked, facts))
    run = dry_run(changed, asked.world_size, asked.model, asked.batch)
    return None if run.problems else Change(what, changed, needed(run.largest[1]), is_estimate=False)


def _changes(config: Config, asked: Asked) -> Iterator[tuple[str, Config]]:
    """Each in words and as a config."""
    run, parallel = asked.run, config.parallel
    layout, activations = get_layout(config, asked.world_size), run.largest[1].parts.get("activations", 0)
    if layout.data > 1 and parallel.data.strategy == "replicate":
        yield "zero1 (parallel = dict(data='zero1'))", _with_strategy(config, "zero1")
    if activations and not config.activation_checkpoint.enabled:
        for kind in ("selective", "full"):
            yield f"activation_checkpoint = {kind!r}", config.replace(activation_checkpoint=kind)
    wanted = parallel.pipeline.microbatches
    for factor in _FACTORS if activations and run.rows else ():
        if parallel.pipeline.size > 1 and wanted and run.rows % (wanted * factor) == 0:
            if parallel.pipeline.schedule != "gpipe":  # which keeps all of the batch, however it is split
                what = f"parallel.pipeline.microbatches={wanted * factor} in place of {wanted}"
                yield what, with_microbatches(config, wanted * factor)
        elif parallel.pipeline.size == 1 and run.rows % factor == 0:
            cycle = config.gradient_accumulation * factor
            what = f"batches of {run.rows // factor} rows in place of {run.rows}, with gradient_accumulation={cycle}"
            yield what, config.model_copy(update={"gradient_accumulation": cycle})
    if layout.data > 1 and parallel.data.strategy in ("replicate", "zero1"):
        yield "fsdp (parallel = dict(data='fsdp'))", _with_strategy(config, "fsdp")
    for factor in _FACTORS if parallel.data.size is None else ():
        size = layout.tensor * factor
        if asked.world_size % (size * layout.pipeline) == 0:
            yield f"parallel.tensor={size} in place of {layout.tensor}", _with(config, "tensor", size=size)
        size = layout.pipeline * factor
        if asked.world_size % (size * layout.tensor) == 0 and layout.pipeline > 1:
            what = f"parallel.pipeline.size={size} in place of {layout.pipeline}"
            yield what, _with(config, "pipeline", size=size)


def _about(config: Config, changed: Config, asked: Asked, facts: ModelFacts) -> float:
    """Bytes, by rule: what is known of the run, and what the rules say of both configs."""
    figures = asked.run.largest[1]
    before, after = get_layout(config, asked.world_size), get_layout(changed, asked.world_size)
    batches, more = _passes(config), _passes(changed)
    part = before.tensor * before.pipeline / (after.tensor * after.pipeline)
    activations = figures.parts.get("activations", 0)
    # Between divided layers activations are whole: of about half of them nothing is saved, and nothing of those that
    # are kept where the others are computed again.
    divided = 0.0 if config.activation_checkpoint.enabled else 0.5
    smaller = activations * batches / more * (1 - divided + divided * before.tensor / after.tensor)
    had = _held(config, before.data, figures.numel, facts).peak(activations, batches)
    has = _held(changed, after.data, figures.numel * part, facts).peak(smaller, more)
    return needed(figures) + has - had


def _held(config: Config, data: int, numel: float, facts: ModelFacts) -> Held:
    share = numel / facts.numel
    elements = Elements(numel, *(share * size for size in (facts.largest, facts.block, facts.root)))
    return hold(elements, recipe_of(config), config.parallel.data.strategy, data)


def _passes(config: Config) -> int:
    """Into how many parts the rows of an update are split."""
    pipeline = config.parallel.pipeline
    return config.gradient_accumulation * (pipeline.microbatches or 1 if pipeline.size > 1 else 1)


def _with_strategy(config: Config, strategy: str) -> Config:
    return _with(config, "data", strategy=strategy)


def _with(config: Config, axis: str, **keys: Any) -> Config:
    parallel: ParallelConfig = config.parallel
    changed = getattr(parallel, axis).model_copy(update=keys)
    return config.model_copy(update={"parallel": parallel.model_copy(update={axis: changed})})
