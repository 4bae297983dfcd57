"""All of a running engine, into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..config import Config
from ..data.loader import EngineDataLoader
from ..division import Division
from ..engine.accumulation import Accumulation
from ..engine.average import WeightAverage
from ..engine.scheduling import LRAdvance
from ..errors import InputError, bullet_list
from ..log import get_logger
from ..parallel.context import ParallelContext
from ..parallel.random import CPU, SharedRandomness, random_state, set_random_state
from . import finding, loading, progress, rng, saving
from . import folder as folders
from .attached import Attached
from .background import Background
from .contents import AVERAGE, Holding
from .lock import FolderLocks
from .together import together

_log = get_logger(__name__)

_SEED_STEP = 1_000_003  # more than there are data ranks and stages, whose seeds follow each other


@dataclass(frozen=True)
class Run:
    """The parts of an engine that have state."""

    model: nn.Module
    update: MixedPrecisionOptimizer
    division: Division
    context: ParallelContext
    config: Config
    accumulation: Accumulation
    lr: LRAdvance
    dataloader: EngineDataLoader | None
    attached: Attached
    locks: FolderLocks
    average: WeightAverage

    @property
    def holding(self) -> Holding:
        return Holding(self.model, self.update, self.division, self.average)

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the axes."""
        return dict(zip(("pipeline", "data", "tensor"), self.context.shape, strict=True))


def save(run: Run, directory: Path, step: int, keep: int | None, background: Background | None) -> Path:
    """`Engine.save`: in `background`, where there is one."""
    saving.refuse_arguments(directory, keep, background is not None, run.context)
    snapshot = _snapshot(run, step)
    if background is None:
        place = saving.begin(directory, step, run.context, run.locks)
        return saving.write(place, snapshot, run.context, keep)
    copied = together(run.context, "engine.save", lambda: background.buffers.copy(snapshot.pieces))
    snapshot = replace(snapshot, pieces=copied)
    place = saving.begin(directory, step, run.context, run.locks)
    background.start(lambda ranks: saving.write(place, snapshot, ranks, keep))
    return folders.final_place(place)


def _snapshot(run: Run, step: int) -> saving.Snapshot:
    """All that is saved; the tensors of model and optimizer are not copied."""
    run.lr.settle()
    scheduler = run.lr.scheduler
    pieces, common = saving.collect(
        run.holding,
        run.context,
        {
            "global_step": step,
            "scalers": run.update.loss_scales.state_dict(),
            "skips": run.update.skip_counter.state_dict(),
            "lr_scheduler": run.lr.state_dict(),
            "lr_class": None if scheduler is None else saving.class_name(scheduler),
        },
    )
    own = {
        "random": rng.rank_random(run.context, run.division),
        "dataloader": None if run.dataloader is None else run.dataloader.state_dict(),
    }

    def plain_values() -> tuple[bytes, bytes]:
        attached = run.attached.state_dict()
        for name, state in attached.items():
            progress.refuse_objects(f"{name!r} (engine.attach)", state)
        return progress.as_bytes(common), progress.as_bytes({**own, "attached": attached})

    about = {
        "step": step,
        "layout": run.layout,
        "device": run.context.device.type,
        "model": common["model"],
        "config": run.config.model_dump(mode="json"),
        "versions": saving.versions(),
    }
    plain = together(run.context, "engine.save", plain_values)
    return saving.Snapshot(pieces, *plain, about)


def load(run: Run, directory: Path) -> tuple[Path, int]:
    """`Engine.load`. Returns the checkpoint's folder, and its global step."""
    found = finding.find(directory, run.context)
    stored = loading.look_into(found, run.context)
    _refuse_other_name(run, stored)
    _refuse_other_scheduler(run, stored)
    scheduled = run.lr.scheduler is not None and stored.common["lr_scheduler"] is not None
    loading.refuse_other(stored, run.holding, scheduled, run.context)
    run.accumulation.clear()
    loading.read_tensors(stored, run.holding, run.context)
    common = stored.common
    shared = SharedRandomness(run.context.from_first(random_state(CPU)))
    notes = together(run.context, loading.too_late(stored), lambda: _take_rest(run, stored, shared))
    if run.accumulation.reducer is not None:
        run.accumulation.reducer.note_buffers()
    if run.context.rank == 0:
        title = f"loaded step {common['global_step']} from {found.folder}"
        _log.info("%s", bullet_list(f"{title}:", notes) if notes else title)
    return found.folder, common["global_step"]


def _take_rest(run: Run, stored: loading.Stored, shared: SharedRandomness) -> list[str]:
    """All but the tensors of model and optimizer. Returns what begins anew."""
    common = stored.common
    run.holding.set_extras(common["extras"])
    run.update.skip_counter.load_state_dict(common["skips"])
    notes = [*_take_scales(run, common["scalers"]), *_take_schedule(run, common)]
    notes += _take_position(run, stored, shared)
    if run.average.decay is not None and not stored.shapes(AVERAGE):
        notes.append("it has no average of the weights (engine.averaged_model): that begins anew, with these weights")
    return [*notes, *_take_attached(run, stored)]


def _take_scales(run: Run, saved: list[dict[str, Any]]) -> Iterator[str]:
    losses = run.update.loss_scales
    if len(saved) == len(losses.scalers):
        losses.load_state_dict(saved)
    elif losses.scalers:
        yield f"it has {len(saved)} loss scale(s), and this run {len(losses.scalers)}: they begin anew"


def _take_schedule(run: Run, common: Any) -> Iterator[str]:
    if run.lr.scheduler is not None and common["lr_scheduler"] is None:
        yield "it has no learning-rate scheduler: this run's stays where it is"
    run.lr.load_state_dict(common["lr_scheduler"])


def _take_position(run: Run, stored: loading.Stored, shared: SharedRandomness) -> Iterator[str]:
    """Random numbers and the place in the data.

    Args:
        shared: rank 0's random numbers as they are now. In another layout, ranks that have the same go on with those
            that rank 0 had, from which the order of the next epochs is drawn; others keep their own.
    """
    step, own = stored.common["global_step"], stored.own or stored.first
    about = stored.found.manifest.about
    same = (about["layout"], about["device"]) == (run.layout, run.context.device.type) and stored.own is not None
    if not same:
        rng.seed_anew(run.config.seed + _SEED_STEP * step, run.context, run.division)
        with shared:
            set_random_state(stored.first["random"], CPU)
        where = "on another kind of device" if about["layout"] == run.layout else "in another layout"
        yield f"it was saved {where}: random numbers (dropout) are seeded anew"
    place = own["dataloader"]
    if run.dataloader is not None and place is None:
        yield "it has no place in the data: they begin anew"
    elif run.dataloader is not None:
        note = run.dataloader.load_state_dict(place, own=same)
        yield from [] if note is None else [note]
    if same:
        rng.set_rank_random(own["random"], run.context, run.division)


def _take_attached(run: Run, stored: loading.Stored) -> Iterator[str]:
    """State of the loop's own; a checkpoint that is older has none."""
    same = stored.found.manifest.about["layout"] == run.layout
    own = stored.own if same and stored.own is not None else stored.first
    yield from run.attached.load_state_dict(own.get("attached", {}))


def _refuse_other_name(run: Run, stored: loading.Stored) -> None:
    """Raise InputError if the checkpoint is of an engine of another name."""
    saved, name = folders.engine_name(stored.found.manifest.about), run.config.name
    if None not in (saved, name) and saved != name:
        raise InputError(
            f"{stored.found.folder} was saved by the engine named {saved!r}, and this is {name!r}; give each engine a "
            "folder of its own, or load the checkpoint that is meant by its own folder"
        )


def _refuse_other_scheduler(run: Run, stored: loading.Stored) -> None:
    """Raise InputError if the checkpoint's learning-rate scheduler is of another class."""
    saved, scheduler = stored.common["lr_class"], run.lr.scheduler
    if saved is not None and scheduler is not None and saved != saving.class_name(scheduler):
        raise InputError(
            f"{stored.found.folder} was saved with the lr_scheduler {saved}, and this is "
            f"{saving.class_name(scheduler)}; use the same class, or give initialize none"
        )
