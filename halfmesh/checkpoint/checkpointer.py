"""Saves and loads for one engine: checkpoints for any layout, state dicts, and weights for other programs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from ..config.text import as_json
from ..errors import InputError, bullet_list, counted, reject_below
from ..parallel.mesh import ParallelContext
from ..parallel.rng import CPU, SharedRNG, random_state, set_random_state
from ..utils.engine_hook import Progress
from ..utils.log import get_logger
from . import rank_state, storage, validate
from .agreement import StoreMessages, run_on_all_ranks, run_on_rank_zero
from .rank_state import AttachedState
from .state import AVERAGE, MODEL, Boxes, ShardedState, index_of, without_empty
from .storage import Snapshot, Stored

if TYPE_CHECKING:
    from ..config import Config
    from ..data.loader import EngineDataLoader
    from ..engine.lr_scheduler import LRAdvance

# .dcp imports torch.distributed.checkpoint: only when there is something to save.

_log = get_logger(__name__)

_SEED_STEP = 1_000_003  # more than there are data ranks and stages, whose seeds follow each other


@dataclass(eq=False, repr=False)
class Checkpointer:
    """Saves and loads for one engine.

    Args:
        state: this rank's shards of the model, the optimizer's state, and the average of the weights.
        own_call: a scope in which the engine itself calls the model or the optimizer.

    Attributes:
        locks: the locks of the folders that it saved into, until `close`.
        attached: the state of objects that the loop attached.
        saved: the step of the last save. None before the first.
    """

    state: ShardedState
    context: ParallelContext
    config: Config
    progress: Progress
    lr: LRAdvance
    loader: EngineDataLoader | None
    own_call: AbstractContextManager[None]
    locks: dict[Path, IO[str]] = field(default_factory=dict)
    attached: AttachedState = field(default_factory=AttachedState)
    saved: int | None = None

    def __post_init__(self) -> None:
        self._settings = validate.GivenSettings(self.lr, self.state.update.optimizer)
        self._written: futures.Future[None] | None = None
        self._copies: Boxes = {}
        self._messages: StoreMessages | None = None

    # -- saving ------------------------------------------------------------------------------------------------

    def save(self, directory: Path, keep: int | None, in_background: bool) -> Path:
        """`Engine.save`."""
        reject_below(1, keep=keep)  # 0 would remove an older checkpoint with each save
        context, step = self.context, self.progress.global_step
        self.wait()
        what = f"saving step {step} to {directory} failed; earlier checkpoints are unchanged"

        def begin() -> Path:
            wait_for_writers(directory)
            storage.lock(directory, self.locks)
            return storage.begin(directory, step)

        with self.own_call:
            snapshot = self._snapshot()
            if in_background:
                copies = run_on_all_ranks(context, what, lambda: self._copy(snapshot.boxes))
                snapshot = replace(snapshot, boxes=copies)
            unfinished = run_on_rank_zero(context, what, begin)
            self._messages = self._messages or StoreMessages(context, self.config.timeout)
            write = partial(storage.write, unfinished, snapshot, keep, what, self._messages)
            if in_background:
                thread = futures.ThreadPoolExecutor(1, f"halfmesh save {directory.resolve()}:")
                self._written = thread.submit(self._run, write)  # the process joins it at exit
                thread.shutdown(wait=False)  # it ends after this save
            else:
                write()
        self.saved = step
        return storage.final_path(unfinished)

    def reject_unsavable(self) -> None:
        """Raise the error with which `save` would reject the state, on all ranks."""
        with self.own_call:
            self._snapshot()

    @torch.no_grad()
    def _copy(self, boxes: Boxes) -> Boxes:
        """Copies of `boxes` in host memory, page-locked for a GPU. The memory is kept for the next call, because new
        memory costs more to fill."""
        is_cuda, kept, self._copies = self.context.device.type == "cuda", self._copies, {}
        for key, box in boxes.items():
            copy = kept.pop(key, None)
            if copy is None or (copy.shape, copy.dtype) != (box.shape, box.dtype):
                copy = torch.empty(box.shape, dtype=box.dtype, pin_memory=is_cuda)
            self._copies[key] = copy.copy_(box, non_blocking=box.is_cuda)
        if is_cuda:
            torch.cuda.current_stream(self.context.device).synchronize()
        return self._copies

    def _run(self, write: Callable[[], object]) -> None:
        """Call `write` in a thread."""
        if self.context.device.type == "cuda":
            torch.cuda.set_device(self.context.device)  # each thread has a current device
        try:
            write()
        except Exception as error:  # the same on all ranks, unless they can no longer be reached
            _log.warning("%s", error)  # logged now: the next call that waits may come much later
            raise

    def wait(self) -> None:
        """Wait for a save in the background; raises CheckpointError if it failed."""
        if self._written is not None:
            futures.wait([self._written])  # Ctrl-C ends this line: the next call then waits again
            written, self._written = self._written, None
            written.result()

    def _snapshot(self) -> Snapshot:
        """All that is saved; the tensors are not copied. All ranks together.

        Raises:
            InputError: some rank has state that cannot be saved; raised on all.
        """
        context, update = self.context, self.state.update
        schedule = self.lr.state_dict()  # first: it advances for the last update
        found = self.state.collect(context, "engine.save", optimizer=True, to_save=True)
        model = sorted((name, tensor.shape) for name, tensor in found.tensors.items() if name.startswith(MODEL))
        scheduler, config = self.lr.scheduler, self.config
        common = {
            "global_step": self.progress.global_step,
            "scalers": update.loss_scales.state_dict(),
            "skips": update.skip_counter.state_dict(),
            "lr_scheduler": schedule,
            "lr_class": None if scheduler is None else validate.class_name(scheduler),
            "optimizer": validate.class_name(update.optimizer),
            "groups": found.groups,
            "given": self._settings.in_force,
            "plain_state": found.plain,
            "extras": found.extras,
        }

        from .. import __version__

        about = {
            "step": self.progress.global_step,
            "layout": self._layout,
            "device": context.device.type,
            "model": hashlib.sha256(json.dumps(model).encode()).hexdigest(),
            "config": as_json(config.model_dump(exclude=set(config.user)) | config.user),
            "versions": {"halfmesh": __version__, "torch": torch.__version__},
        }
        boxes = {(name, at): found.shards[name].box(at) for name, at in found.written}

        def small_files() -> tuple[bytes, bytes]:
            return storage.as_bytes(common), storage.as_bytes(self._own_state())

        return Snapshot(found.tensors, boxes, *run_on_all_ranks(context, "engine.save", small_files), about)

    @property
    def _layout(self) -> dict[str, int]:
        return self.config.parallel.sizes | {"data": self.context.dp_size}

    # -- loading -----------------------------------------------------------------------------------------------

    def find(self, directory: Path, keep: Sequence[str]) -> Stored:
        """The checkpoint to load from `directory`, which fits this engine. Nothing has changed yet."""
        self.wait()
        with self.own_call:
            stored = storage.find(directory, self.context)
            self._settings.reject_unkept(keep, stored.common["lr_scheduler"])
            self._reject_other(stored, None if "lr_scheduler" in keep else self.lr.scheduler)
        return stored

    def load(self, stored: Stored, keep: Sequence[str]) -> None:
        """Load the checkpoint that `find` returned, except the parts that `keep` names. The engine has no gradients."""
        context, progress = self.context, self.progress
        with self.own_call:
            with self.state.update.master_weights.joined():
                self._load_tensors(stored)
            shared = SharedRNG(context.from_first(random_state(CPU)))
            notes = run_on_all_ranks(context, stored.too_late, lambda: list(self._load_rest(stored, shared, keep)))
        given = dict(enumerate(stored.common.get("given", ())))  # missing in older checkpoints
        names = [group["params"] for group in self.state.groups()]
        groups = [1 + index_of(own, index, stored.common["groups"]) for index, own in enumerate(names)]
        theirs = [given.get(number, {}) for number in (0, *groups)]
        self._settings.loaded(stored.folder, theirs, keep, stored.common["lr_scheduler"])
        self._warn_of_other_batch(stored)
        progress.global_step = stored.common["global_step"]
        progress.results.clear()
        title = f"loaded step {progress.global_step} from {stored.folder}"
        _log.info("%s", bullet_list(f"{title}:", notes) if notes else title)

    def _reject_other(self, stored: Stored, scheduler: Any) -> None:
        """Raise InputError, on all ranks, if the checkpoint is of another engine, model, optimizer or scheduler."""
        own, common = self.state.collect(self.context, f"loading {stored.folder} failed", to_load=True), stored.common
        model: dict[str, Any] = {n: t.shape for n, t in own.tensors.items() if 0 not in t.shape}
        saved: dict[str, Any] = {n: tuple(t.size) for n, t in stored.tensors.items() if n.startswith(MODEL)}
        model, saved = ({n.removeprefix(MODEL): shape for n, shape in each.items()} for each in (model, saved))
        model, saved = model | dict.fromkeys(own.extras), saved | dict.fromkeys(common["extras"])
        problems = list(validate.model_problems(model, saved, "the checkpoint"))
        problems += validate.optimizer_problems(self.state.update.optimizer, scheduler, own.groups, common)
        saved_name, name = storage.engine_name(stored.manifest), self.config.name
        if saved_name and name and saved_name != name:
            problems.append(f"engine {saved_name!r} saved it, but this is {name!r}; give each a separate folder")
        if problems:
            title = f"{stored.folder} does not fit the model and optimizer of this engine:"
            raise InputError(bullet_list(title, problems))

    def _load_tensors(self, stored: Stored) -> None:
        """Load the weights into masters and model, the optimizer's state, and the average of the weights."""
        from . import dcp

        state, average = self.state, self.state.average
        targets = {MODEL + name: shard for name, shard in state.weight_targets().items()}
        of_optimizer, values = state.state_targets(stored.tensors, stored.common["plain_state"])
        averages = state.average_targets(stored.tensors)
        shards = without_empty(targets | of_optimizer | averages)

        def read() -> None:
            dcp.read(shards, stored.metadata, stored.folder)
            state.load_optimizer(values, stored.common["groups"])

        run_on_all_ranks(self.context, stored.too_late, read)
        state.publish()
        if average.values:
            average.restart(besides={key for name, key in state.average_keys().items() if name in averages})

    def _load_rest(self, stored: Stored, shared: SharedRNG, keep: Sequence[str]) -> Iterator[str]:
        """Load everything but the tensors of model and optimizer. Yields a line for all state that starts fresh.

        Args:
            shared: rank 0's current random numbers. In another layout, ranks with the same continue with rank 0's saved
                ones, from which the order of the next epochs is drawn; others keep theirs.
        """
        context, common, about = self.context, stored.common, stored.manifest
        state, lr = self.state, self.lr
        for key in state.extras().keys() & common["extras"].keys():
            state.model.get_submodule(key.rpartition(".")[0]).set_extra_state(common["extras"][key])
        state.update.skip_counter.load_state_dict(common["skips"])
        losses, scalers = state.update.loss_scales, common["scalers"]
        if len(scalers) == len(losses.scalers):
            losses.load_state_dict(scalers)
        elif losses.scalers:
            saved = counted(len(scalers), "loss scale")
            yield f"it has {saved}, but this run has {len(losses.scalers)}: loss scales start from the config"
        if lr.scheduler is not None and common["lr_scheduler"] is None:
            yield "it has no learning-rate scheduler: this run's scheduler keeps its own state"
        lr.load_state_dict(None if "lr_scheduler" in keep else common["lr_scheduler"])
        same_layout = about["layout"] == self._layout and stored.own is not None
        same = same_layout and about["device"] == context.device.type
        own = stored.own or stored.first
        if not same:
            rank_state.reseed(self.config.seed + _SEED_STEP * common["global_step"], context, state.parallel_model)
            with shared:
                set_random_state(stored.first["random"], CPU)
            where = "on another kind of device" if same_layout else "in another layout"
            yield f"it was saved {where}: random numbers (dropout) start from a new seed"
        if state.average.decay is not None and not any(name.startswith(AVERAGE) for name in stored.tensors):
            yield "it has no average of the weights (engine.averaged_model): the average restarts from these weights"
        yield from self._load_own(own, same, own if same_layout else stored.first)

    def _load_own(self, own: Mapping[str, Any], same: bool, attached: Mapping[str, Any]) -> Iterator[str]:
        """Load `_own_state`. Yields a line for all state that starts fresh.

        Args:
            same: this rank saved `own`, in this layout.
            attached: the `_own_state` with the attached state to load.
        """
        if self.loader is not None:
            note: str | None = "it has no position in the data: the data starts from the beginning"
            if own["dataloader"] is not None:
                note = self.loader.load_state_dict(own["dataloader"], own=same)
            yield from [] if note is None else [note]
        if same:
            rank_state.set_rank_random(own["random"], self.context, self.state.parallel_model)
        yield from self.attached.load_state_dict(attached.get("attached", {}))

    def _warn_of_other_batch(self, stored: Stored) -> None:
        """Warn if updates take another number of samples because there is another number of data ranks."""
        position, about, config = stored.first["dataloader"], stored.manifest, self.config
        if position is None or self.loader is None or config.global_batch_size is not None:
            return
        (unit, step), (own_unit, own_step) = position["share"], self.loader.loader.order
        before, now = step * about["config"]["gradient_accumulation"], own_step * config.gradient_accumulation
        if unit == own_unit == "samples" and before != now and about["layout"]["data"] != self.context.dp_size:
            text = "%s was saved with %d samples per update; now it has %d; to keep these, set global_batch_size = %d"
            _log.warning(text, stored.folder, before, now, before)

    # -- state dicts -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`Engine.state_dict`."""
        state, schedule = self.state, self.lr.state_dict()  # first: it advances for the last update
        with self.own_call, state.update.master_weights.joined(writes=False):
            update, model = state.update.state_dict(), state.model.state_dict()  # first copies the user's writes
        return {
            "model": model,
            "update": update,
            "lr_scheduler": schedule,
            "given": self._settings.in_force,
            "global_step": self.progress.global_step,
            "layout": self._coordinates(),
            "average": state.average.state_dict(),
            **self._own_state(),
        }

    def _own_state(self) -> dict[str, Any]:
        """State that differs between ranks."""
        return {
            "random": rank_state.rank_random(self.context, self.state.parallel_model),
            "dataloader": None if self.loader is None else self.loader.state_dict(),
            "attached": self.attached.state_dict(),
        }

    def _coordinates(self) -> dict[str, int]:
        """This rank's coordinates, which determine its shards of the model and of the update."""
        parallel_model, context = self.state.parallel_model, self.context
        sharding = {axis.dim for axis in parallel_model.axes.values() if axis.splits}
        sharding |= set(context.dims.grad_axes if parallel_model.data.shards_state else ())
        found = dict[str, int]()
        for axis in ("pp", *sorted(sharding - {"pp", "tp"}), "tp"):
            found |= {f"{axis}_size": context.size_of(axis), f"{axis}_rank": context.coordinate(axis)}
        return found

    def reject_unfit(self, state: Mapping[str, Any], keep: Sequence[str]) -> None:
        """Raise InputError if `state` is not of the same rank of the same layout, or `keep` does not fit."""
        update = self.state.update
        validate.reject_unfit(state.get("update", {}), len(update.loss_scales.scalers), "engine")
        validate.reject_other_shards(state["layout"], self._coordinates())
        update.master_weights.reject_unfit(state["update"]["masters"])
        self._settings.reject_unkept(keep, state["lr_scheduler"])

    def load_state_dict(self, state: Mapping[str, Any], keep: Sequence[str]) -> None:
        """`Engine.load_state_dict`, of a state that fits. The engine has no gradients."""
        self.state.model.load_state_dict(state["model"])
        self.state.update.load_state_dict(state["update"])
        self.state.average.load_state_dict(state.get("average", {}))
        self.lr.load_state_dict(None if "lr_scheduler" in keep else state["lr_scheduler"])
        self._settings.loaded("the state", state.get("given", []), keep, state["lr_scheduler"])
        self.progress.global_step = state["global_step"]
        self.progress.results.clear()
        for note in self._load_own(state, state["random"]["rank"] == self.context.rank, state):
            _log.warning("%s", note)

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Unlock the folders for other jobs."""
        for directory, file in self.locks.items():
            wait_for_writers(directory)  # those of other engines too: closing the file ends the lock of this process
            file.close()
        self.locks.clear()


def wait_for_writers(directory: Path) -> None:
    """Wait for saves of all engines of this process into `directory`: the next one removes unfinished saves there."""
    for thread in threading.enumerate():
        if thread.name.startswith(f"halfmesh save {directory.resolve()}:"):
            thread.join()
