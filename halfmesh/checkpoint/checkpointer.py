"""Saves and loads for one engine: checkpoints for any layout, state dicts, and weights for other programs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..config.text import as_json
from ..distributed.env import list_ranks
from ..errors import HalfmeshError, InputError, bullet_list, refuse_below
from ..parallel.mesh import ParallelContext
from ..parallel.rank_checks import gather_results, run_on_all_ranks, run_on_rank_zero
from ..parallel.rng import CPU, SharedRNG, random_state, set_random_state
from ..utils.log import get_logger
from . import folder, rank_state, storage, validate
from .background import BackgroundWriter, wait_for_writers
from .rank_state import AttachedState
from .settings import GivenSettings
from .state import AVERAGE, MODEL, ShardedState, describe, find_tensors, join_groups, place_of, without_empty
from .storage import Snapshot, Stored

if TYPE_CHECKING:
    from ..engine.parts import EngineParts

# .dcp and .export import torch.distributed.checkpoint and more: only when there is something to save.

_log = get_logger(__name__)

_SEED_STEP = 1_000_003  # more than there are data ranks and stages, whose seeds follow each other


class AutomaticSaves(Protocol):
    """The automatic checkpoints of the config."""

    def ask(self) -> bool:
        """Save at the next boundary, and end the loop."""

    def forget(self) -> None:
        """A checkpoint was loaded: forget saves that were requested before."""


class Checkpointer:
    """Saves and loads for one engine.

    Attributes:
        preemption: the automatic checkpoints, if the config has them.
        locks: of the folders that were saved into, until `close`.
        attached: the state of objects that the loop attached.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.preemption: AutomaticSaves | None = None
        self.locks: dict[Path, IO[str]] = {}
        self.attached = AttachedState()
        self._parts = parts
        self._settings = GivenSettings(parts)
        self._writer = BackgroundWriter(parts.context.device)

    @property
    def sharded_state(self) -> ShardedState:
        """This rank's tensors under the full model's names."""
        parts = self._parts
        return ShardedState(parts.model, parts.update, parts.division, parts.average)

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, directory: Path, keep: int | None, in_background: bool) -> Path:
        """`Engine.save`."""
        refuse_below(1, keep=keep)  # 0 would remove an older checkpoint with each save
        parts, context = self._parts, self._parts.context
        self.wait()
        step = parts.global_step
        what = f"saving step {step} to {directory} failed; earlier checkpoints are unchanged"

        def begin() -> Path:
            wait_for_writers(directory)
            folder.lock(directory, self.locks)
            return folder.begin(directory, step)

        with parts.guard.own_call():
            snapshot = self._snapshot()
            if in_background:
                copies = run_on_all_ranks(context, what, lambda: self._writer.copy(snapshot.boxes))
                snapshot = replace(snapshot, boxes=copies)
            place = run_on_rank_zero(context, what, begin)
            group = context.saving_group if in_background else None
            write = partial(_write, place, snapshot, keep, context, what, group)
            if in_background:
                self._writer.start(write, directory)
            else:
                write()
        return folder.final_place(place)

    def refuse_unsavable(self) -> None:
        """Raise the error with which `save` would refuse the state, on all ranks."""
        with self._parts.guard.own_call():
            self._snapshot()

    def wait(self) -> None:
        """Wait for a save in the background; raises CheckpointError if it failed."""
        self._writer.wait()

    def _snapshot(self) -> Snapshot:
        """All that is saved; the tensors are not copied. All ranks together.

        Raises:
            InputError: some rank has state that cannot be saved; raised on all.
        """
        parts, context, state = self._parts, self._parts.context, self.sharded_state
        parts.lr.settle()

        def collect() -> Any:
            state.update.follow_groups()  # groups added since the last step
            shards, plain = state.optimizer_state()
            shards |= {MODEL + name: shard for name, shard in state.weights().items()} | state.averages()
            return without_empty(shards), plain, state.groups(), state.extras()

        shards, plain, groups, extras = run_on_all_ranks(context, "engine.save", collect)
        averages = parts.average.decay is not None
        mine = describe(shards), [group["params"] for group in groups], plain, extras, averages
        shapes, names, all_plain, all_extras, all_averages = zip(*context.everyone(mine), strict=True)
        if len(set(all_averages)) > 1:  # each rank has its shards of the average
            ranks = list_ranks(rank for rank, has in enumerate(all_averages) if has)
            raise InputError(f"engine.averaged_model was called on {ranks} only; call it on every rank")
        tensors = find_tensors(shapes, spread=True)
        model = sorted((name, tensor.shape) for name, tensor in tensors.items() if name.startswith(MODEL))
        scheduler = parts.lr.scheduler
        common = {
            "global_step": parts.global_step,
            "scalers": parts.update.loss_scales.state_dict(),
            "skips": parts.update.skip_counter.state_dict(),
            "lr_scheduler": parts.lr.state_dict(),
            "lr_class": None if scheduler is None else validate.class_name(scheduler),
            "optimizer": validate.class_name(parts.update.optimizer),
            "groups": [group | {"params": p} for group, p in zip(groups, join_groups(names), strict=True)],
            "given": self._settings.in_force,
            "plain_state": _merge(all_plain),
            "extras": _merge(all_extras),
        }

        def small_files() -> tuple[bytes, bytes]:
            dataloader = None if parts.dataloader is None else parts.dataloader.state_dict()
            random = rank_state.rank_random(context, parts.division)
            own = {"random": random, "dataloader": dataloader, "attached": self.attached.state_dict()}
            return storage.as_bytes(common), storage.as_bytes(own)

        from .. import __version__

        about = {
            "step": parts.global_step,
            "layout": self._layout,
            "device": context.device.type,
            "model": hashlib.sha256(json.dumps(model).encode()).hexdigest(),
            "config": as_json(parts.config.model_dump(exclude=set(parts.config.user)) | parts.config.user),
            "versions": {"halfmesh": __version__, "torch": torch.__version__},
        }
        written = [(name, box) for name, tensor in tensors.items() for box in tensor.boxes if box.rank == context.rank]
        boxes = {(name, box.at): shards[name].box(box.at) for name, box in written}
        return Snapshot(tensors, boxes, *run_on_all_ranks(context, "engine.save", small_files), about)

    @property
    def _layout(self) -> dict[str, int]:
        return self._parts.config.parallel.sizes | {"data": self._parts.context.dp_size}

    # -- loading -----------------------------------------------------------------------------------------------

    def load(self, directory: Path) -> Path:
        """`Engine.load`. Nothing changes before all of it is known to fit."""
        self.wait()
        parts, context = self._parts, self._parts.context
        with parts.guard.own_call():
            stored = storage.open_stored(*folder.find(directory, context), context)
            self._refuse_other(stored)
            parts.accumulation.clear()
            self._load_tensors(stored)
            shared = SharedRNG(context.from_first(random_state(CPU)))
            notes = run_on_all_ranks(context, stored.too_late, lambda: list(self._load_rest(stored, shared)))
        self._compare_settings(stored)
        parts.global_step = stored.common["global_step"]
        title = f"loaded step {parts.global_step} from {stored.folder}"
        _log.info("%s", bullet_list(f"{title}:", notes) if notes else title)
        self._after_load()
        return stored.folder

    def _refuse_other(self, stored: Stored) -> None:
        """Raise InputError, on all ranks, if the checkpoint is of another engine, model, optimizer or scheduler."""
        parts, state, common = self._parts, self.sharded_state, stored.common

        def describe_own() -> tuple[dict[str, Any], list[list[str]]]:
            state.update.follow_groups()
            shapes = {name: shard.placement.shape for name, shard in without_empty(state.weight_targets()).items()}
            return shapes | dict.fromkeys(state.extras()), [group["params"] for group in state.groups()]

        everyone = gather_results(parts.context, f"loading {stored.folder} failed", describe_own)
        model, groups = _merge([shapes for shapes, _ in everyone]), join_groups([names for _, names in everyone])
        saved = {n.removeprefix(MODEL): tuple(t.size) for n, t in stored.tensors.items() if n.startswith(MODEL)}
        saved |= dict.fromkeys(common["extras"])
        saved_name, name = folder.engine_name(stored.manifest), parts.config.name
        problems = [
            *validate.model_problems(model, saved, "the checkpoint"),
            *validate.optimizer_problems(parts.update.optimizer, parts.lr.scheduler, groups, common),
        ]
        if None not in (saved_name, name) and saved_name != name:
            problems.append(
                f"it was saved by the engine named {saved_name!r}, and this is {name!r}; give each engine a folder of "
                "its own, or load the checkpoint that is meant by its own folder"
            )
        if problems:
            raise InputError(
                bullet_list(f"{stored.folder} does not fit the model and optimizer of this engine:", problems)
            )

    def _load_tensors(self, stored: Stored) -> None:
        """Load the weights into masters and model, the optimizer's state, and the average of the weights."""
        from . import dcp

        state, context, average = self.sharded_state, self._parts.context, self._parts.average
        targets = {MODEL + name: shard for name, shard in state.weight_targets().items()}
        of_optimizer, values = state.state_targets(stored.tensors, stored.common["plain_state"])
        averages = state.average_targets(stored.tensors)
        shards = without_empty(targets | of_optimizer | averages)

        def read() -> None:
            dcp.read(shards, stored.metadata, stored.folder)
            state.load_optimizer(values, stored.common["groups"])

        run_on_all_ranks(context, stored.too_late, read)
        state.publish()
        if average.values:
            average.restart(besides={shard for shard, name in state.trained() if AVERAGE + name in averages})

    def _load_rest(self, stored: Stored, shared: SharedRNG) -> Iterator[str]:
        """Load everything but the tensors of model and optimizer. Yields a line for all state that starts fresh.

        Args:
            shared: rank 0's current random numbers. In another layout, ranks with the same continue with rank 0's saved
                ones, from which the order of the next epochs is drawn; others keep theirs.
        """
        parts, context, common, about = self._parts, self._parts.context, stored.common, stored.manifest
        self.sharded_state.set_extras(common["extras"])
        parts.update.skip_counter.load_state_dict(common["skips"])
        losses, scalers = parts.update.loss_scales, common["scalers"]
        if len(scalers) == len(losses.scalers):
            losses.load_state_dict(scalers)
        elif losses.scalers:
            yield f"it has {len(scalers)} loss scale(s), and this run {len(losses.scalers)}: they start from the config"
        if parts.lr.scheduler is not None and common["lr_scheduler"] is None:
            yield "it has no learning-rate scheduler: this run's keeps its state"
        parts.lr.load_state_dict(common["lr_scheduler"])
        same_layout = about["layout"] == self._layout and stored.own is not None
        same = same_layout and about["device"] == context.device.type
        own = stored.own or stored.first
        if not same:
            rank_state.seed_anew(parts.config.seed + _SEED_STEP * common["global_step"], context, parts.division)
            with shared:
                set_random_state(stored.first["random"], CPU)
            where = "on another kind of device" if same_layout else "in another layout"
            yield f"it was saved {where}: random numbers (dropout) are reseeded"
        if parts.dataloader is not None:
            note: str | None = "it has no position in the data: the data start from the beginning"
            if own["dataloader"] is not None:
                note = parts.dataloader.load_state_dict(own["dataloader"], own=same)
            yield from [] if note is None else [note]
        if same:
            rank_state.set_rank_random(own["random"], context, parts.division)
        if parts.average.decay is not None and not any(name.startswith(AVERAGE) for name in stored.tensors):
            yield "it has no average of the weights (engine.averaged_model): the average restarts from these weights"
        yield from self.attached.load_state_dict((own if same_layout else stored.first).get("attached", {}))

    def _compare_settings(self, stored: Stored) -> None:
        given = dict(enumerate(stored.common.get("given", ())))  # missing in older checkpoints
        names = [group["params"] for group in self.sharded_state.groups()]
        places = [place_of(own, index, stored.common["groups"]) for index, own in enumerate(names)]
        self._settings.loaded(stored.folder, [given.get(place, {}) for place in (0, *(1 + p for p in places))])

    def _after_load(self) -> None:
        self._parts.results.clear()
        if self.preemption is not None:
            self.preemption.forget()

    # -- state dicts -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`Engine.state_dict`."""
        parts = self._parts
        parts.lr.settle()
        with parts.guard.own_call():
            update, model = parts.update.state_dict(), parts.model.state_dict()  # first copies the user's writes
        return {
            "model": model,
            "update": update,
            "lr_scheduler": parts.lr.state_dict(),
            "given": self._settings.in_force,
            "global_step": parts.global_step,
            "dataloader": None if parts.dataloader is None else parts.dataloader.state_dict(),
            "random": rank_state.rank_random(parts.context, parts.division),
            "layout": self._part(),
            "attached": self.attached.state_dict(),
            "average": parts.average.state_dict(),
        }

    def _part(self) -> dict[str, int]:
        division = self._parts.division
        sharding = {axis.dim for axis in division.axes.values() if axis.splits}
        return validate.layout(self._parts.context, sharding | ({"dp"} if division.data.shards_state else set()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Engine.load_state_dict`."""
        parts = self._parts
        validate.refuse_unfit(state.get("update", {}), len(parts.update.loss_scales.scalers), "engine")
        validate.refuse_other_part(state["layout"], self._part())
        parts.update.master_weights.refuse_unfit(state["update"]["masters"])
        parts.accumulation.clear()
        parts.model.load_state_dict(state["model"])
        parts.update.load_state_dict(state["update"])
        parts.average.load_state_dict(state.get("average", {}))
        parts.lr.load_state_dict(state["lr_scheduler"])
        self._settings.loaded("the state", state.get("given", []))
        parts.global_step = state["global_step"]
        if parts.dataloader is not None and state["dataloader"] is not None:
            same_rank = state["random"]["rank"] == parts.context.rank
            note = parts.dataloader.load_state_dict(state["dataloader"], same_rank)
            if note is not None:
                _log.warning("%s", note)
        rank_state.set_rank_random(state["random"], parts.context, parts.division)
        for note in self.attached.load_state_dict(state.get("attached", {})):
            _log.info("%s", note)
        self._after_load()

    # -- weights -----------------------------------------------------------------------------------------------

    def save_weights(self, path: str | Path, format: Literal["safetensors", "torch"], max_file_gb: float) -> None:
        """`Engine.save_weights`."""
        from .export import save_weights

        parts = self._parts
        with parts.guard.own_call():
            save_weights(self.sharded_state, parts.context, Path(path), format, max_file_gb)

    def full_state_dict(self, optimizer: bool, rank0_only: bool) -> dict[str, Any]:
        """`Engine.full_state_dict`."""
        from .export import full_state_dict

        parts = self._parts
        with parts.guard.own_call():
            return full_state_dict(self.sharded_state, parts.context, optimizer, rank0_only)

    def load_weights(self, path: Path) -> None:
        """`Engine.load_weights`."""
        from .export import load_weights

        parts = self._parts
        with parts.guard.own_call():
            load_weights(self.sharded_state, parts.context, path)
        if parts.average.values:
            parts.average.restart()
            _log.info("the average of the weights restarts from those of %s", path)

    # -- the end -----------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """`Engine.preempt`."""
        if self.preemption is None:
            raise InputError(
                "engine.preempt(): the config does not say where to save; set checkpoint='checkpoints', or call "
                "engine.save and end the loop yourself"
            )
        self.preemption.ask()

    def close(self) -> None:
        """Unlock the folders for other jobs."""
        for directory, file in self.locks.items():
            wait_for_writers(directory)  # those of other engines too: closing the file ends the lock of this process
            file.close()
        self.locks.clear()


def _write(
    place: Path,
    snapshot: Snapshot,
    keep: int | None,
    context: ParallelContext,
    what: str,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint into `place`, then rename it. All ranks together, perhaps each in a thread."""

    def finish() -> None:
        folder.finish(place, keep)
        _log.info("saved step %d to %s: %.1f MB", snapshot.about["step"], folder.final_place(place), size / 2**20)

    try:
        size = storage.write(place, snapshot, context, what, group)
        run_on_rank_zero(context, what, finish, group)
    except HalfmeshError:
        if context.rank == 0:  # the disk may be full
            shutil.rmtree(place, ignore_errors=True)
        raise


def _merge(by_rank: Any) -> dict[str, Any]:
    """The ranks' values merged; where several have one, the first rank's."""
    return {key: value for mine in reversed(by_rank) for key, value in mine.items()}
