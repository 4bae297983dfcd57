"""The changes of a config that `halfmesh plan` tries, from the simplest to the most invasive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..compat import check, raise_for
from ..config.load import load_config
from ..config.text import as_python
from ..errors import InputError, counted, readable
from ..parallel.registries import AXES, DATA_STRATEGIES
from .dry_run import DryRun

if TYPE_CHECKING:
    from ..config import Config

ROOM = 0.9
"""The fraction of a device's memory that a config may use: a dry run does not count the CUDA context, NCCL's buffers
and the gaps of the allocator."""
RECOMPUTE = ("selective", "full")
"""Values of activation_checkpoint, by the amount of recomputation."""

Changes = tuple[str, ...]
"""KEY=VALUE each, as `--set` takes them."""
UNCHANGED = "the config as it is"
"""The name of no changes."""


def both_units(size: int) -> str:
    """The memory of a device in words; with the decimal unit if it was given in one: "74.5 GiB (80 GB)"."""
    decimal = f"{size / 1e9:g} GB" if size >= 1e9 else f"{size / 1e6:g} MB"
    return readable(size) + (f" ({decimal})" if size % 10**6 == 0 and size % 2**20 else "")


@dataclass(frozen=True)
class PlanRequest:
    """A config, and the devices that it must fit into.

    Attributes:
        world_size: ranks, one device each.
        limit: bytes of a device.
        model, batch: see `build_model`.
        node: devices of a machine.
        device: cuda or cpu.

    Raises:
        IncompatibleConfigError: the config cannot run on this number of ranks; the message has all reasons.
    """

    config: Config
    world_size: int
    limit: int
    model: str
    batch: tuple[str, ...] = ()
    node: int = 8
    device: str = "cuda"

    def __post_init__(self) -> None:
        findings = check(self.config, self.world_size, self.device)
        raise_for(findings, f"the config on {counted(self.world_size, 'rank')}, regardless of memory")

    @property
    def room(self) -> int:
        """Bytes that a config may use."""
        return int(ROOM * self.limit)


@dataclass(frozen=True)
class Candidate:
    """A changed config.

    Attributes:
        rows: of a data rank's batch.
        passes: forwards and backwards of an update.
        recompute: the new value of `activation_checkpoint`; "" if it was not changed.
        run: its dry run.
        rejected: the reasons why it has none, one per line.
    """

    changes: Changes
    config: Config
    rows: int | None = None
    passes: int = 1
    recompute: str = ""
    run: DryRun | None = None
    rejected: str = ""

    @property
    def needs(self) -> int:
        """Bytes of the largest rank; a lower bound if no update was simulated."""
        return self.run.largest[1].needed if self.run and self.run.ranks else 0

    @property
    def state(self) -> int:
        """Bytes that smaller batches and recomputation do not change."""
        return self.run.largest[1].state if self.run and self.run.ranks else 0


@dataclass(frozen=True)
class Update:
    """The rows of an update, the same for all candidates.

    Attributes:
        rows: over all data ranks.
        at_once: rows that go through the model at once, in the unchanged config.
        cycle: batches of an update, in the unchanged config.
    """

    rows: int
    at_once: int
    cycle: int


def describe_update(config: Config, world_size: int, rows: int) -> Update:
    """The rows of an update of `config`, with `rows` in a data rank's batch."""
    data, key = config.parallel.dims(world_size).dp, _split_key(config)
    cycle = config.gradient_accumulation
    if config.global_batch_size is not None:
        cycle = config.global_batch_size // (rows * data)
    return Update(rows * data * cycle, rows // (_get(config, key) if key else 1), cycle)


def make_candidate(asked: PlanRequest, update: Update, changes: Changes, recompute: str, at_once: int) -> Candidate:
    """The config with `changes`, recomputation, and the same rows in an update, `at_once` of them at once."""
    config = load_config(asked.config, changes)
    own, key = update.rows // config.parallel.dims(asked.world_size).dp, _split_key(config)
    changes += (f"activation_checkpoint={recompute}",) if recompute else ()
    rows = own // update.cycle if key else at_once
    batches, microbatches = own // rows, rows // at_once
    if key and _get(config, key) != microbatches:
        changes += (f"{key}={microbatches}",)
    follows = config.global_batch_size is not None and "gradient_accumulation" not in config.model_fields_set
    if config.gradient_accumulation != batches and not follows:
        changes += (f"gradient_accumulation={batches}",)
    changed = load_config(asked.config, changes)
    rejected = "\n".join(map(str, check(changed, asked.world_size, asked.device)))
    return Candidate(changes, changed, rows, batches * microbatches, recompute, rejected=rejected)


def recomputations(config: Config) -> Iterator[str]:
    """Values of activation_checkpoint that recompute more than the config's."""
    checkpoint = config.activation_checkpoint
    if not checkpoint.enabled:
        yield from RECOMPUTE
    elif checkpoint.selective and checkpoint.every == 1:
        yield RECOMPUTE[-1]


def axis_changes(asked: PlanRequest) -> Iterator[tuple[str, str, int]]:
    """Each axis alone: its name, a change, and its new size. Axes that remove modules from ranks come last."""
    sizes = asked.config.parallel.sizes
    for name, axis in sorted(AXES.each(), key=lambda pair: pair[1].splits_modules):
        now = sizes.get(name, 1)
        for size in axis.sizes_to_try(asked.world_size, asked.node):
            if size > now and size % now == 0:
                yield name, f"parallel.{name}.size={size}", size


def make_layouts(asked: PlanRequest, before: Changes, allowed: Callable[[str], bool]) -> Iterator[Changes]:
    """All layouts, simplest first: by the number of changed axes, the axes, and the number of their ranks; within these
    by the data strategy. Axes and strategy of the config stay.

    Args:
        before: changes that all of them have.
        allowed: returns True if the model allows a change.
    """
    parallel = asked.config.parallel
    options: dict[str, list[tuple[str, int]]] = {}
    for name, change, size in axis_changes(asked):
        if allowed(change):
            options.setdefault(name, [("", parallel.sizes.get(name, 1))]).append((change, size))
    fixed = {name: size for name, size in parallel.sizes.items() if name not in options}
    strategies = [change for change in strategy_changes(asked.config) if allowed(change)]
    found = []
    for chosen in itertools.product(*options.values()):
        sizes = fixed | {name: size for name, (_, size) in zip(options, chosen, strict=True)}
        kinds = [(AXES.get(name), size) for name, size in sizes.items()]
        ranks = math.prod(size for kind, size in kinds if not kind.replica_dim)
        of_data = [size for kind, size in kinds if kind.replica_dim]  # their ranks are data ranks
        shards = asked.world_size // ranks * math.prod(size for kind, size in kinds if kind.splits_loss) > 1
        changed = [index for index, (change, _) in enumerate(chosen) if change]
        if all(asked.world_size % (ranks * size) == 0 for size in (1, *of_data)):
            found.append((len(changed), changed, ranks, tuple(chosen[index][0] for index in changed), shards))
    for *_, changes, shards in sorted(found):
        free = ("parallel.data.size=null",) if changes and parallel.data.size is not None else ()
        yield before + changes + free
        for strategy in strategies if shards else ():
            yield (*before, *changes, *free, strategy)


def strategy_changes(config: Config) -> list[str]:
    """Each data strategy that shards more than the config's: those that shard the optimizer's state, then those that
    also shard the model."""
    sharded = {name: (kind.shards_model, kind.shards_state) for name, kind in DATA_STRATEGIES.each()}
    now = sharded[config.parallel.data.strategy]
    return [
        f"parallel.data.strategy={name}" for name in sorted(sharded, key=sharded.__getitem__) if sharded[name] > now
    ]


def _split_key(config: Config) -> str:
    """The key of microbatches, of an axis in use that has one."""
    for name, size in config.parallel.sizes.items():
        if size > 1 and (key := AXES.get(name).splits_batch):
            return f"parallel.{name}.{key}"
    return ""


def _get(config: Config, key: str) -> int:
    _, axis, name = key.split(".")
    return getattr(getattr(config.parallel, axis), name) or 1


def reject_target(option: str, path: Path | None, suffix: str, may_replace: bool) -> None:
    """Check that a file can be written to `path`, if there is one, before anything is computed for it.

    Raises:
        InputError: another suffix, a directory that does not exist, a file that does and may not be replaced, or one
            that cannot be written.
    """
    if path is None:
        return
    if path.suffix.lower() != suffix:
        raise InputError(f"{option} {path}: give a name that ends in {suffix}")
    if not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path}: there is no directory {path.resolve().parent}")
    if path.exists() and not may_replace:
        raise InputError(f"{option} {path}: the file exists; --force replaces it")
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} {path}: it cannot be written ({error.strerror})") from error


def config_text(candidate: Candidate, asked: PlanRequest, update: Update) -> str:
    """The config of `candidate` as a .py file, with comments on its purpose and its memory."""
    ranks = counted(asked.world_size, "rank")
    lines = [
        f"# Made by halfmesh plan for {asked.model} on {ranks} of {both_units(asked.limit)}, AdamW.",
        f"# Give each data rank's DataLoader batch_size={candidate.rows}. An update takes {update.rows} rows in total.",
        f"# In the simulation, a rank needed {readable(candidate.needs)}.",
        "",
        *(f"{key} = {as_python(value)}" for key, value in candidate.config.to_dict().items()),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str, config: Config) -> None:
    """Write `text`, and read it again.

    Raises:
        InputError: the file does not load as `config`.
    """
    path.write_text(text, encoding="utf-8")
    if load_config(path) != config:
        raise InputError(
            f"--out {path}: the file does not load as the chosen config, because one of your constants has no literal "
            "form; add the changed keys to your own config instead"
        )
