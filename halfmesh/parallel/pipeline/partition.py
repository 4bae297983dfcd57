"""The pieces of a model's forward, and their partition into stages, found before the model is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...errors import InputError, counted, page
from ...utils.tensors import map_tensors
from ..registries import PARTITIONERS, SCHEDULES
from ..trial import comes_from, is_within

PLAIN = (bool, int, float, str, NoneType)
"""The classes of values that a trace treats as constants."""


@dataclass
class Call:
    """The arguments of one call of a pipelined model: a microbatch, or a batch to evaluate. All stages have them.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make()` for `key`. The first piece of a stage runs it, later ones reuse the result."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def signature_of(call: Call) -> str:
    """Return a key that is equal for calls with the same shapes, dtypes and plain values."""
    return repr(map_tensors(lambda t: (tuple(t.shape), t.dtype, t.requires_grad), (call.args, dict(call.kwargs))))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The numbers, flags and strings on a module, which a trace treats as constants."""
    return {n: value for n, value in vars(module).items() if isinstance(value, PLAIN)}


def plain_values(modules: Iterable[nn.Module]) -> str:
    """A key of the plain attributes of modules."""
    return repr(list(map(plain_attributes, modules)))


@dataclass(frozen=True)
class Piece:
    """One step of a model's forward. A pipeline stage consists of one or more pieces.

    Attributes:
        name: its name in messages and in the plan. If it is one module, the name of that module.
        uses: the names of the modules, parameters and buffers that it uses, with everything below them.
        run: called as `run(model, call, activations)` with the output of the previous piece (None for the first piece).
            It returns the input of the next piece; the last piece returns the model's output. Tensors may be anywhere
            in lists, tuples, dicts and dataclasses. It must take modules from `model` only, because it also runs on
            copies.
        prepare: called as `prepare(model, call)` with a full model, before calls with new shapes, dtypes or values.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Call, Any], Any] = field(repr=False)
    prepare: Callable[[nn.Module, Call], None] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class BlockPartition:
    """Splits a model that consists of a beginning, a list of blocks and an end. It splits before each block and before
    the end.

    Args:
        layers: the model's classes, or their full names ("package.module.Class") if they may not be installed. A
            derived class matches if it inherits `forward` and `methods`.
        blocks: the name of the `ModuleList` or `Sequential` that holds the blocks.
        begin: called as `begin(model, ...)` with the model's arguments. Returns the input of the first block.
        end: called as `end(model, x)` with the output of the last block. Returns the model's output.
        end_uses: the names of the modules and parameters that `end` uses. All others, outside `blocks` and
            `shared_uses`, belong to `begin`.
        methods: the names of other methods of the model that determine how its modules are used.
        parts: the classes that modules within the model must have, by the names of these modules.
        share: called as `share(model, ...)` with the model's arguments, once in each stage that has blocks. Returns the
            arguments that all blocks get in addition to x, such as a mask.
        shared_uses: the names of the modules that `share` uses.
        block: called as `block(module, x, shared)` for each block. By default `module(x)`.
        find_problem: called with the model. Returns the reason why it cannot be split, or None.
    """

    layers: tuple[type[nn.Module] | str, ...]
    blocks: str
    begin: Callable[..., Any]
    end: Callable[[Any, Any], Any]
    end_uses: tuple[str, ...]
    methods: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    share: Callable[..., Any] | None = None
    shared_uses: tuple[str, ...] = ()
    block: Callable[[Any, Any, Any], Any] = lambda module, x, shared: module(x)
    find_problem: Callable[[Any], str | None] = lambda model: None

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """Return the pieces in the order of the forward, or None if the model does not match this partition.

        Raises:
            InputError: the model matches, but `find_problem` reported that it cannot be split.
        """
        own = all(
            not hasattr(model, name) or comes_from(model, self.layers, name) for name in ("forward", *self.methods)
        )
        if not own or not all(comes_from(model.get_submodule(name), (kind,)) for name, kind in self.parts.items()):
            return None
        if (problem := self.find_problem(model)) is not None:
            raise InputError(f"the model ({type(model).__name__}): {problem}")
        kinds = (model.named_modules, model.named_parameters, model.named_buffers)
        names = [name for named in kinds for name, _ in named(remove_duplicate=False)]
        blocks = children_of(model.get_submodule(self.blocks))
        end_uses = tuple(name for name in self.end_uses if name in names)
        return [
            Piece("the beginning", self._rest(names), lambda m, call, x: self.begin(m, *call.args, **call.kwargs)),
            *(self._block_piece(f"{self.blocks}.{name}") for name in blocks),
            Piece("the end", end_uses, lambda m, call, x: self.end(m, x)),
        ]

    def _rest(self, names: Sequence[str]) -> tuple[str, ...]:
        """The modules of `begin`: the largest ones that contain nothing used elsewhere, and single parameters."""
        taken = (self.blocks, *self.end_uses, *self.shared_uses)

        def is_split(name: str) -> bool:
            return not name or any(other.startswith(f"{name}.") for other in taken)

        own = (name for name in names if name not in taken and not is_split(name))
        return tuple(name for name in own if is_split(name.rpartition(".")[0]))

    def _block_piece(self, name: str) -> Piece:
        def run(model: nn.Module, call: Call, activations: Any) -> Any:
            share = self.share and partial(self.share, model, *call.args, **call.kwargs)
            shared = call.once("shared", share) if share else None
            return self.block(model.get_submodule(name), activations, shared)

        return Piece(name, (name, *self.shared_uses), run)


def children_of(module: nn.Module) -> list[str]:
    """The names of its children. (`named_children` leaves out the second name of a module.)"""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]


@dataclass(frozen=True)
class Partition:
    """The stages of a model over the ranks of a pipeline.

    Attributes:
        stages: the pieces of each stage, in the order of the forward.
        ranks: the pipeline rank of each stage.
        costs: the number of elements of each stage's parameters.
    """

    stages: tuple[tuple[Piece, ...], ...]
    ranks: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of all stages, in order."""
        return [piece for stage in self.stages for piece in stage]

    def stages_of(self, name: str) -> list[int]:
        """The stages that use the module, parameter or buffer of that name; the first, if no piece uses it."""
        return [i for i, stage in enumerate(self.stages) if any(_is_used(name, piece) for piece in stage)] or [0]

    def ranks_of(self, name: str) -> set[int]:
        """The pipeline ranks whose stages use the module, parameter or buffer of that name."""
        return {self.ranks[stage] for stage in self.stages_of(name)}

    def holders(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """For each parameter and buffer, by its id, the pipeline ranks that use it under any of its names."""
        ranks: dict[int, set[int]] = {}
        for name, tensor in all_tensors(model):
            ranks.setdefault(id(tensor), set()).update(self.ranks_of(name))
        return {key: tuple(sorted(found)) for key, found in ranks.items()}

    def not_called(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules, by name, that no stage calls directly; stages may call modules below them."""
        pieces = self.pieces
        return [pair for pair in model.named_modules() if not any(_is_used(pair[0], piece) for piece in pieces)]


def _is_used(path: str, piece: Piece) -> bool:
    return any(is_within(path, use) for use in piece.uses)


def find_pieces(model: nn.Module, partition: str | Sequence[str], count: int = 2) -> Sequence[Piece]:
    """The pieces of `model` by the config's `partition`.

    Args:
        count: the number of stages for which the error proposes split points.

    Raises:
        InputError: no partitioner knows the model, or it cannot be split in this way.
        RegistryError: no partitioner has this name.
    """
    if not isinstance(partition, str):
        from .fx_split import split_at

        return split_at(model, partition)
    for _, partitioner in PARTITIONERS.each() if partition == "auto" else [(partition, PARTITIONERS.get(partition))]:
        if (pieces := partitioner.pieces_of(model)) is not None:
            return list(pieces)
    which = "no partitioner knows" if partition == "auto" else f"the partitioner {partition!r} does not know"
    raise InputError(
        f"{which} {type(model).__name__}; name the modules that start a stage, as in partition="
        f"{_propose(model, count)}, or register a partitioner (see {page('Pipeline parallelism')})"
    )


def _propose(model: nn.Module, count: int) -> tuple[str, ...]:
    """Split points for `count` stages, in the largest list of modules."""
    rows = [
        (sum(p.numel() for p in row.parameters()), [f"{name}.{key}".lstrip(".") for key in children_of(row)])
        for name, row in model.named_modules()
        if isinstance(row, (nn.ModuleList, nn.Sequential)) and len(row) >= count
    ]
    _, names = max(rows, default=(0, ["layers.4"] * count))
    return tuple(names[len(names) * stage // count] for stage in range(1, count))


def resolve(
    model: nn.Module, size: int, chunks: int, partition: str | Sequence[str] = "auto", schedule: str = "1f1b"
) -> Partition:
    """The partition of `model` into `size` x `chunks` stages for a schedule.

    Raises:
        HalfmeshError: there is none.
    """
    count = size * chunks
    stages_text = f"pipeline.size={size}" + (f" x chunks={chunks}" if chunks > 1 else "")
    if not isinstance(partition, str) and len(partition) != count - 1:
        raise InputError(f"partition: {counted(len(partition), 'split point')}, but {stages_text} needs {count - 1}")
    pieces = find_pieces(model, partition, count)
    if len(pieces) < count:
        names = ", ".join(piece.name for piece in pieces)
        raise InputError(f"{stages_text} needs {count} stages, but {type(model).__name__} has only the pieces {names}")
    params = list(model.named_parameters(remove_duplicate=False))
    costs = [float(sum(p.numel() for p in {p for name, p in params if _is_used(name, each)})) for each in pieces]
    runs = list(pairwise(divide(costs, count)))
    stages = tuple(tuple(pieces[begin:end]) for begin, end in runs)
    ranks = tuple(SCHEDULES.get(schedule).rank_of(stage, size) for stage in range(count))
    return Partition(stages, ranks, tuple(sum(costs[begin:end]) for begin, end in runs))


def divide(costs: Sequence[float], count: int) -> list[int]:
    """Bounds that divide `costs` into `count` consecutive runs, none empty, with the smallest possible largest sum; of
    equal ones the more even runs."""
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}  # by end: largest sum, squares, bounds
    for run in range(1, count + 1):
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, [*bounds, end])
                for begin, (largest, squares, bounds) in best.items()
                for cost in [sums[end] - sums[begin]]
                if begin < end
            )
            for end in range(run, len(sums) - (count - run))
        }
    return best[len(costs)][2]


def all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in all_tensors(model)}
