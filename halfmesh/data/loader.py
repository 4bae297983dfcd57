"""The engine's dataloader: shards over the data ranks, moves batches to the device, and detects the end of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import NO_BATCH, InputError
from ..parallel.mesh import ParallelContext
from ..utils.tensors import map_tensors
from .resume import EpochState, epoch_batches, set_generators
from .sharding import DataOrder, ShardedLoader

_END = object()


@dataclass(eq=False, repr=False)
class EngineDataLoader:
    """Iterates over a loader, moves each batch to the device, and detects the last batch of an epoch.

    With workers, the next batch is fetched, and its copy to the device starts, before the current one is yielded.
    Without workers, a batch is fetched when the loop asks for it, as in a plain loop, because the dataset may depend on
    the training so far. One exception: if `_needs_end` is set and the length of the loader may be missing or wrong, one
    batch is fetched ahead.

    An epoch ends when the loop asks for a batch after the last one, or drops the iterator after training on the last.

    All other attributes (`dataset`, `batch_size`, `sampler`, `num_workers`) come from the user's loader.

    Attributes:
        loader: this rank's shard of the user's loader.
        _seed: on several ranks, the random numbers of a dataset without workers depend on it, the data rank, epoch and
            batch.
        _needs_end: `at_end` must be exact, because gradient accumulation uses it.
        _before_fetch: called when the loop asks for a batch, before anything is drawn for it.
        next_epoch: the number of the epoch that the next iteration runs. After a load: of the interrupted epoch.
        at_end: True if the last yielded batch is the last of its epoch. Without look-ahead, the loader's length
            decides; False if it has none.
        even: wraps the batches of an epoch without padding, where all data ranks must call the engine equally often.
            After this rank's last batch it makes the calls that other ranks make for their remaining batches.
        waited_s: the seconds that the loop has waited for the loader so far. On a GPU, only while the GPU was idle.
    """

    loader: ShardedLoader
    _context: ParallelContext
    _seed: int
    _on_epoch_end: Callable[[], None] | None = None
    _needs_end: bool = False
    _before_fetch: Callable[[], None] = lambda: None
    next_epoch: int = 0
    at_end: bool = False
    even: Callable[[Iterator[Any], ShardedLoader], Iterator[Any]] | None = None
    waited_s: float = 0.0
    _loaded: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._to_device = ToDevice(self._context.device)
        self._state = EpochState()
        self.loader.compare_lengths(self._context)

    @property
    def epoch(self) -> int:
        """The number of the current or last epoch, counted from 0. -1 before the first epoch."""
        return self._state.epoch

    @property
    def runs(self) -> bool:
        """True while a loop iterates over it."""
        return self._state.running

    @property
    def is_untouched(self) -> bool:
        """True if no backward has run since the last batch was yielded."""
        return self._state.handed > self._state.trained

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of its batches that were trained on."""
        return self._state.epoch, self._state.trained

    @property
    def next_batch(self) -> int:
        """The number of batches that the next iteration skips, because they were trained on before the checkpoint."""
        state = self._pending()
        return 0 if state is None or state["finished"] else state["trained"]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. halfmesh passes it to a sampler or dataset that has `set_epoch`. Without a
        call, epochs count up."""
        self.next_epoch = epoch

    def note_training(self) -> None:
        """Note that a backward ran: the last yielded batch was trained on."""
        self._state.trained = self._state.handed

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its batches that were trained on, and the states of its random generators."""
        pending = self._pending()
        if pending is not None:
            return dict(pending)
        return {
            "share": tuple(self.loader.order),
            "generators": [generator.get_state() for generator in self.loader.generators()],
            "next_epoch": self.next_epoch,
            **self._state.state_dict(self.loader.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any], own: bool = True) -> str | None:
        """Resume after the last batch that was trained on, or in the next epoch if that epoch was complete.

        Args:
            own: True if this rank saved the state in this layout. Otherwise only the order of the samples is the same.

        Returns:
            A message if the next epoch begins because the position in this epoch cannot be found, else None.
        """
        self._state, self._loaded = EpochState(self.epoch), None
        set_generators(self.loader, state["generators"])
        if not own:
            state = {key: value for key, value in state.items() if key != "loader"} | {"fetches": {}}
        if state["finished"]:
            self.next_epoch, self._loaded = state["next_epoch"], state
            return None
        self.next_epoch = state["epoch"]
        order = self.loader.order
        trained = order.convert(DataOrder(*state["share"]), state["trained"])
        # Persistent workers draw their seed in the first epoch only, from the generator of the order.
        persists = self.loader.given.persistent_workers and state["epoch"] > 0
        if trained is None or persists:
            self.next_epoch += 1
            why = f"{state['trained']} batches of epoch {state['epoch']} are not a position in this run's order"
            if trained is not None:
                why = f"the order of epoch {state['epoch']} cannot be drawn again with persistent_workers=True"
            return f"{why}: training continues with epoch {self.next_epoch}"
        self._loaded = {**state, "trained": trained, "share": tuple(order)}
        return None

    def _pending(self) -> Mapping[str, Any] | None:
        """The loaded state, until it is iterated or another epoch is set."""
        state = self._loaded
        if state is None or self.next_epoch != state["next_epoch" if state["finished"] else "epoch"]:
            return None
        return state

    def __len__(self) -> int:
        """The number of batches of an epoch on this rank."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet
            raise AttributeError(name)
        return getattr(self.loader.given, name)

    def __bool__(self) -> bool:
        """Return True. Python would otherwise ask for the length, and an IterableDataset has none."""
        return True

    def __iter__(self) -> Iterator[Any]:
        outside = self._state
        if outside.trained and not outside.running:
            outside.finished = True  # the loop stopped early, and begins the next epoch
        self._before_fetch()
        saved, self._loaded = self._pending(), None
        state = self._state = EpochState(self.next_epoch, running=True)
        self.next_epoch += 1
        at_end_outside, self.at_end = self.at_end, False  # this may be a loop inside another over the same loader
        batches = self._on_device(state, epoch_batches(state, self.loader, self._context, self._seed, saved))
        try:
            for batch, last in batches if self.even is None else self.even(batches, self.loader):
                state.handed += 1
                self.at_end = last
                try:
                    yield batch
                except GeneratorExit:  # a loop that counts its batches does not ask for one more
                    if last and state.trained == state.handed:
                        self._end(state)
                    raise
                del batch  # freed before the next one is fetched
                self._before_fetch()
            if not state.handed and self.loader.training:
                raise InputError(f"epoch {state.epoch}: {NO_BATCH}")
            self._end(state)
        finally:
            state.running = False
            self.at_end = at_end_outside and outside.running
            if outside.running:
                self._state = outside

    def _on_device(self, state: EpochState, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches on the device, each with True if it is the last."""
        workers, to_device = self.loader.loader.num_workers, self._to_device
        looks_ahead = bool(workers) or (self._needs_end and not self.loader.is_counted)
        # Without workers the next batch may be written into the memory of this one.
        copies = looks_ahead and not workers and to_device.device.type != "cuda"

        def fetch() -> Any:
            if not workers:
                to_device.wait()
            asked = time.perf_counter()
            batch = next(batches, _END)
            if to_device.device.type != "cuda" or torch.cuda.current_stream(to_device.device).query():  # it is idle
                self.waited_s += time.perf_counter() - asked
            if batch is _END:
                return _END
            return to_device.start(self.loader.prepared(map_tensors(torch.clone, batch) if copies else batch))

        length = None if looks_ahead else self.loader.length
        started = fetch()
        while started is not _END:
            following = fetch() if looks_ahead else None
            batch, started = to_device.finish(started), following
            yield batch, following is _END if looks_ahead else state.handed + 1 == length
            del batch
            if not looks_ahead:
                started = fetch()

    def _end(self, state: EpochState) -> None:
        state.finished = True
        is_training = torch.is_grad_enabled() or state.trained == state.handed  # else it was a pass to evaluate
        if self._on_epoch_end is not None and is_training:
            self._on_epoch_end()


class _HasTo(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return hasattr(value, "to") and not isinstance(value, Mapping)


class _Movable(metaclass=_HasTo):
    """A tensor, or an object with a method `to`: a `PackedSequence`, a graph of torch_geometric, a class of a user.

    Not a mapping, such as the `BatchEncoding` of transformers: its `to` works in place and skips nested tensors.
    """


class ToDevice:
    """Copies batches to `device`: their tensors, and objects that have a method `to`.

    To a GPU tensors are copied on a separate stream, with an event for each batch, so that no batch waits for the copy
    of the next one. Look-ahead takes the memory of one more batch there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._last_copied: torch.cuda.Event | None = None

    def start(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Start to copy the batch. Pass the result to `finish`."""
        if self.device.type != "cuda":
            return map_tensors(self._move, batch, _Movable), None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            batch = map_tensors(self._copy, batch, _Movable)
            copied.record(self._stream)
        self._last_copied = copied
        return batch, copied

    def finish(self, started: tuple[Any, torch.cuda.Event | None]) -> Any:
        """Return the batch, for use on the current stream."""
        batch, copied = started
        if copied is None:
            return batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)

        def use(value: Any) -> Any:
            value = self._move(value)
            if isinstance(value, torch.Tensor):
                value.record_stream(stream)  # else its memory could be reused while this stream reads it
            return value

        return map_tensors(use, batch, _Movable)

    def wait(self) -> None:
        """Return when the last batch has been copied. The copy does not wait for computation, so this is fast."""
        if self._last_copied is not None:
            self._last_copied.synchronize()
            self._last_copied = None

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":  # copied in `finish`, after its computation
            return value
        pinned = value.pin_memory() if hasattr(value, "pin_memory") else value  # it is already by a loader with workers
        return pinned.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else pinned

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        try:
            moved = value.to(self.device, non_blocking=True)
        except TypeError:  # it takes a device only
            moved = value.to(self.device)
        return value if moved is None else moved


def get_dataloader(
    dataset: Dataset[Any],
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """Return a `torch.utils.data.DataLoader` whose order of samples depends only on `seed`.

    The order is the same in every layout, even if other code draws random numbers. Pass the loader to `initialize`,
    which shards it over the data ranks.

    Args:
        dataset: the samples: any torch `Dataset` with a length.
        batch_size: the number of samples per batch and data rank.
        shuffle: draw a new order in each epoch. Two runs with the same seed draw the same orders.
        seed: the seed of the order. In a run of one process it is also the seed of the workers; on several ranks these
            use the config's `seed`. The default, 1024, is Colossal-AI's.
        add_sampler: accepted for scripts written for Colossal-AI. Only True is supported.
        options: further arguments of `DataLoader`. `pin_memory` is True by default if CUDA is available.

    Raises:
        InputError: `add_sampler` is False, which would give every data rank the same samples.
    """
    if not add_sampler:
        raise InputError("add_sampler=False would give every data rank the same samples; remove it")
    options.setdefault("pin_memory", torch.cuda.is_available())
    options.setdefault("generator", torch.Generator().manual_seed(seed))
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, **options)
