"""The dataloader of an engine: sharded over dp, on the device, and it knows where an epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import NO_BATCH, InputError
from ..log import get_logger
from ..parallel.context import ParallelContext
from ..parallel.same_calls import are_same
from .course import Course, draw
from .loader_watch import LoaderWatch
from .lookahead import ahead, in_turn, looks_ahead
from .samplers import Share, generators, set_generators, share
from .transfer import Transfer, reuses_memory

_log = get_logger(__name__)


class EngineDataLoader:
    """Iterates a loader: moves each batch to the device, and knows which batch is the last of an epoch.

    Where the loader has workers, the next batch is fetched, and on its way to the device, before the current one is
    handed out. Else a batch is fetched when it is asked for, as in a plain loop (`looks_ahead` has the exception).

    An epoch ends when the loop asks for a batch after the last one, or lets go of its iterator when it has trained on
    the last one.

    Other attributes are those of the loader: `dataset`, `batch_size`, `sampler`, `num_workers`.

    Args:
        seed: of what batches are fetched with on several ranks, beside the epoch, the batch and the data rank.
        needs_end: whether training depends on `at_end`, so that it has to be exact.

    Attributes:
        loader: the loader that is iterated, as `halfmesh.data.samplers.shard_loader` gives it.
        epoch: number of the epoch that runs or ran last, from 0; -1 before the first.
        next_epoch: that of the next iteration, which after a load goes on with the one that it interrupted.
        at_end: whether the batch handed out last is the last of its epoch. Without look-ahead by the loader's length;
            where it has none, False.
        before_fetch: called when the loop asks for a batch, before anything is drawn for it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        context: ParallelContext,
        seed: int,
        on_epoch_end: Callable[[], None] | None = None,
        may_be_empty: bool = False,
        needs_end: bool = False,
    ) -> None:
        self.loader = loader
        self._context = context
        self._seed = seed
        self._needs_end = needs_end
        self.epoch = -1
        self.at_end = False
        self._transfer = Transfer(context.device)
        self._watch = None if on_epoch_end is None else LoaderWatch(loader, context.device)  # evaluation may wait
        self._on_epoch_end = on_epoch_end
        self._may_be_empty = may_be_empty
        self.next_epoch = 0
        self._course = Course()
        self._has_told = False
        self._rest: tuple[dict[str, Any], bool] | None = None
        self.before_fetch: Callable[[], None] | None = None

    @property
    def runs(self) -> bool:
        """Whether it is being iterated."""
        return self._course.runs

    @property
    def is_untouched(self) -> bool:
        """Whether no backward has run since a batch was handed out last."""
        return self._course.handed > self._course.trained

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`, of which samplers with a `set_epoch` are told. Without a call, epochs
        count up by themselves."""
        self.next_epoch = epoch

    def note_training(self) -> None:
        """A backward ran: the batch that was handed out last was trained on."""
        course = self._course
        course.trained = course.handed
        if course.finished and 0 < course.backwards < course.handed:
            self._tell_of_fetching()
        if self.epoch < 0 and course.backwards == 1:
            self._tell_of_another()
        course.backwards += 1

    def _tell_of_another(self) -> None:
        """Training began with other batches than this loader's."""
        ranks = self._context.dp_size
        if ranks > 1 or self._needs_end:
            _log.warning(
                "training runs, but engine.dataloader was never iterated: iterate it in place of the loader that was "
                "given to initialize. %s If the batches are meant to come from another loader, give initialize none; "
                "shard yours by engine.context.dp_rank of dp_size, and end its last cycle with engine.step(last=True)",
                f"That one is not sharded: {ranks} data ranks train on the same batches."
                if ranks > 1
                else "The engine does not see where that one ends, so the last batches of an epoch go into the first "
                "cycle of the next.",
            )

    def _tell_of_fetching(self) -> None:
        """There were fewer backwards than batches, and after the last batch there is one."""
        if self._needs_end and not self._has_told:
            self._has_told = True
            _log.warning(
                "a backward ran after engine.dataloader had come to its end, and there had been fewer backwards than "
                "batches: it seems that the loop fetches a batch before it trains on the one before. Then accumulated "
                "gradients are stepped one batch too early at the end of an epoch, and the last batch goes into the "
                "next cycle. Fetch a batch when the one before is trained on (a DataLoader's workers are ahead by "
                "themselves), or iterate a loader of your own, and end its cycles with engine.step(last=True)"
            )

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and how many of its batches were trained on."""
        return self._course.epoch, self._course.trained

    @property
    def next_batch(self) -> int:
        """How many batches of its epoch the next iteration passes over: those trained on before what was loaded."""
        return self._rest[0]["trained"] if self._rest is not None and self._rest[0]["epoch"] == self.next_epoch else 0

    def state_dict(self) -> dict[str, Any]:
        """Which epoch it is, how many of its batches were trained on, and the random numbers that it depends on."""
        course, rest = self._course, self._rest
        if rest is not None and self.next_epoch == rest[0]["epoch"]:  # loaded, and not iterated since
            return rest[0]
        own = [generator.get_state() for generator in generators(self.loader)]
        return {
            "share": tuple(share(self.loader)),
            "generators": own,
            "next_epoch": self.next_epoch,
            **course.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], own: bool = True) -> str | None:
        """Go on with the batch after the last one that was trained on when `state_dict` was taken, or with the next
        epoch if it was over.

        Args:
            own: False: it is another rank's, or another layout's, whose batches were others; the order is the same.

        Returns:
            What is otherwise, if what was seen is no whole number of this run's batches.
        """
        self._rest, self._course = None, Course()
        self.set_epoch(state["next_epoch"] if state["finished"] else state["epoch"])
        mine = share(self.loader)
        set_generators(self.loader, state["generators"])
        if state["finished"]:
            return None
        trained = mine.same_place(Share(*state["share"]), state["trained"], own)
        # Workers that stay draw a seed in the first epoch only, from the generator that the order comes from.
        stays = getattr(self.loader, "persistent_workers", False) and state["epoch"] > 0
        if trained is None or stays:
            self.next_epoch += 1
            return (
                f"{state['trained']} batches of epoch {state['epoch']} were trained on, which is not a place in this "
                f"run's order of the data: the data go on with epoch {self.next_epoch}"
            )
        self._rest = {**state, "trained": trained, "share": tuple(mine)}, own
        return None

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet
            raise AttributeError(name)
        return getattr(getattr(self.loader, "loader", self.loader), name)  # one that is read in strides has one inside

    def __bool__(self) -> bool:
        """There is a loader; without this, Python would ask for its length, which an IterableDataset has not."""
        return True

    def __iter__(self) -> Iterator[Any]:
        if self.before_fetch is not None:
            if self._course.trained and not self._course.runs:
                self._course.finished = True  # it was left, and is not gone on with
            self.before_fetch()
        self.epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        outside, course = self._course, Course(self.epoch, runs=True)
        at_end_outside = self.at_end  # this may be a loop inside another over the same loader
        self._course, self.at_end = course, False
        try:
            yield from self._handed(course)
        finally:
            course.runs = False
            self.at_end = at_end_outside and outside.runs
            if outside.runs:
                self._course = outside

    def _handed(self, course: Course) -> Iterator[Any]:
        rest, self._rest = self._rest, None
        if rest is not None and rest[0]["epoch"] != self.epoch:  # another one was set since it was loaded
            rest = None
        for batch, last in self._on_device(course, draw(course, self.loader, self._context, self._seed, rest)):
            course.handed += 1
            self.at_end = last
            try:
                yield batch
            except GeneratorExit:  # a loop that counts its batches does not ask for one more
                if last and course.trained == course.handed:
                    self._end(course)
                raise
            del batch
            if self.before_fetch is not None:
                self.before_fetch()
        if not course.handed and rest is None and not self._may_be_empty:
            raise InputError(f"epoch {self.epoch}: {NO_BATCH}")
        self._end(course)

    def _on_device(self, course: Course, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches on the device, and whether each is the last."""
        if self._watch is not None:
            batches = self._watch.watch(batches)
        transfer, reuses, looks = self._transfer, reuses_memory(self.loader), looks_ahead(self.loader, self._needs_end)

        def fetch(end: Any) -> Any:
            if reuses:
                transfer.wait()
            batch = next(batches, end)
            if batch is not end:
                batch = transfer.start(transfer.keep(batch) if reuses and looks else batch)
            return batch

        if looks:
            return ahead(fetch, transfer)
        return in_turn(fetch, transfer, lambda: course.handed + 1 == self._length)

    @property
    def _length(self) -> int | None:
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def _end(self, course: Course) -> None:
        course.finished = True
        is_training = torch.is_grad_enabled() or course.trained == course.handed  # else it was a pass to evaluate
        if self._on_epoch_end is not None and is_training:
            self._on_epoch_end()


def warn_of_same_inputs(inputs: Any, context: ParallelContext) -> None:
    """Tell if a loader of the user's own gave all data ranks the same `inputs`. All ranks together; it reads them."""
    if are_same(inputs, context.dp_group):
        _log.warning(
            "all %d data ranks were given the same inputs in the first update: they seem to train on the same batches. "
            "Shard the data by engine.context.dp_rank of dp_size (batches[dp_rank::dp_size]), or seed what draws them "
            "by rank (torch.manual_seed(seed + dp_rank)); a DataLoader that is given to initialize is sharded",
            context.dp_size,
        )


def get_dataloader(
    dataset: Dataset[Any],
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """A DataLoader whose order depends on `seed` alone, in every layout, whatever else draws random numbers.
    `initialize` shards it over the data ranks.

    Args:
        dataset: the samples; any torch Dataset with a length.
        batch_size: samples per batch and data rank.
        shuffle: another order in each epoch, the same in every run with this seed.
        seed: seeds the order, and in one process the workers (1024, as Colossal-AI); on several ranks they are seeded
            by the config's `seed`.
        add_sampler: accepted for Colossal-AI's scripts; only True has a meaning here.
        options: further arguments of `torch.utils.data.DataLoader`.
    """
    if not add_sampler:
        raise InputError(
            "add_sampler=False would let every data rank see the same samples; remove it (initialize shards the "
            "data), or iterate a loader of your own instead of engine.dataloader"
        )
    order = None if isinstance(dataset, IterableDataset) else shuffle
    options.setdefault("pin_memory", torch.cuda.is_available())
    options.setdefault("generator", torch.Generator().manual_seed(seed))
    return DataLoader(dataset, batch_size=batch_size, shuffle=order, **options)
