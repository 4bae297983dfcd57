"""A model's forward as a sequence of pieces, and their partition into stages, found before the model is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import InputError, RegistryError, counted, shorten
from ...utils.tensors import map_tensors
from ...utils.torch_private import call_hooks
from ..modules import comes_from
from ..registries import PARTITIONERS, SCHEDULES


@dataclass
class Call:
    """The arguments that all ranks of a pipeline call the model with: a microbatch, or a batch to evaluate."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, which only the first piece of a stage calls."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def afresh(self) -> Call:
        """The same call without results of `once`."""
        return Call(self.args, self.kwargs)


def signature_of(call: Call) -> str:
    """A key that is equal for calls with the same shapes, dtypes and plain values."""
    return repr(map_tensors(lambda t: (tuple(t.shape), t.dtype, t.requires_grad), (call.args, dict(call.kwargs))))


@dataclass(frozen=True)
class Piece:
    """A step of a model's forward.

    Attributes:
        name: its name in messages and the plan; the name of its module if it is one.
        uses: names of the modules, parameters and buffers that it needs, including everything below them.
        run: called as run(model, call, activations) with the output of the previous piece (None in the first one).
            Returns the input of the next piece, or the model's output in the last one. Tensors may be anywhere in
            lists, tuples, dicts and dataclasses. It must take modules from `model` only: it also runs on copies.
        prepare: called as prepare(model, call) with a full model, before calls of a new kind.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Call, Any], Any] = field(repr=False)
    prepare: Callable[[nn.Module, Call], None] | None = field(default=None, repr=False)


class Partitioner(Protocol):
    """A partitioner, as registered in PARTITIONERS: knows the pieces of some models."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """The pieces in the order of the forward; None for a model that it does not know.

        Raises:
            InputError: it knows that the model cannot be split.
        """
        ...


@dataclass(frozen=True)
class BlockPartition:
    """Splits models that are a beginning, a list of blocks and an end: before each block, and before the end.

    Args:
        layers: the model's classes, or their full names ("package.module.Class") for those that may not be installed.
            Derived classes count if they inherit `forward` and `methods`.
        methods: names of other methods of the model that determine the use of its modules.
        parts: the classes that modules within the model must have, by the modules' names.
        blocks: name of the ModuleList or Sequential that holds the blocks.
        begin: called as begin(model, ...) with the model's arguments; returns the input of the first block.
        end: called as end(model, x) with the output of the last block; returns the model's output.
        end_uses: names of the modules and parameters that `end` needs. All others, outside `blocks` and `shared_uses`,
            count as those of `begin`.
        share: called as share(model, ...) with the model's arguments, once in each stage that has blocks; returns the
            arguments of all blocks besides x, such as a mask.
        shared_uses: names of the modules that `share` needs.
        block: called as block(module, x, shared) for each block, if it is not just module(x).
        find_problem: returns the reason why a model of these classes cannot be split, or None.
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
        """See `Partitioner`."""
        if not self._knows(model):
            return None
        if (problem := self.find_problem(model)) is not None:
            raise InputError(f"the model ({type(model).__name__}): {problem}")
        names, blocks = _names(model), children_of(model.get_submodule(self.blocks))
        end_uses = tuple(name for name in self.end_uses if name in names)
        return [
            Piece("the beginning", self._rest(names), lambda m, call, x: self.begin(m, *call.args, **call.kwargs)),
            *(self._block_piece(f"{self.blocks}.{name}") for name in blocks),
            Piece("the end", end_uses, lambda m, call, x: self.end(m, x)),
        ]

    def _knows(self, model: nn.Module) -> bool:
        return (
            comes_from(model, self.layers)
            and all(_has_method_of(model, method, self.layers) for method in self.methods)
            and all(comes_from(model.get_submodule(name), (kind,)) for name, kind in self.parts.items())
        )

    def _rest(self, names: Sequence[str]) -> tuple[str, ...]:
        """The modules of `begin`: the largest without anything that is used elsewhere, and single parameters."""
        taken = (self.blocks, *self.end_uses, *self.shared_uses)

        def is_split(name: str) -> bool:
            return not name or any(other.startswith(f"{name}.") for other in taken)

        own = (name for name in names if name not in taken and not is_split(name))
        return tuple(name for name in own if is_split(name.rpartition(".")[0]))

    def _block_piece(self, name: str) -> Piece:
        def run(model: nn.Module, call: Call, activations: Any) -> Any:
            shared = None
            if self.share is not None:
                share = self.share
                shared = call.once("shared", lambda: share(model, *call.args, **call.kwargs))
            return self.block(model.get_submodule(name), activations, shared)

        return Piece(name, (name, *self.shared_uses), run)


def _has_method_of(model: nn.Module, method: str, kinds: Sequence[type[nn.Module] | str]) -> bool:
    """Return True if one of `kinds` defines the model's `method`; also true if nothing does."""
    origin = next((kind for kind in type(model).__mro__ if method in vars(kind)), None)
    return origin is None or origin in kinds or f"{origin.__module__}.{origin.__qualname__}" in kinds


def children_of(module: nn.Module) -> list[str]:
    """The names of its children. (`named_children` leaves out the second name of a module.)"""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]


def _names(model: nn.Module) -> list[str]:
    """The names of its modules, parameters and buffers."""
    kinds = (model.named_modules, model.named_parameters, model.named_buffers)
    return [name for named in kinds for name, _ in named(remove_duplicate=False)]


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

    @property
    def names(self) -> list[str]:
        """For each stage, its first and last piece."""
        return [s[0].name if len(s) == 1 else f"{s[0].name} to {s[-1].name}" for s in self.stages]

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a pipeline rank has."""
        return [stage for stage, its_rank in enumerate(self.ranks) if its_rank == rank]

    def stages_of(self, name: str) -> list[int]:
        """The stages that use the module, parameter or buffer of that name; the first, if no piece uses it."""
        found = [i for i, stage in enumerate(self.stages) if any(_is_used(name, piece) for piece in stage)]
        return found or [0]

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
        return [
            (name, module)
            for name, module in model.named_modules()
            if not any(_is_used(name, piece) for piece in self.pieces)
        ]


def _is_used(path: str, piece: Piece) -> bool:
    return any(path == use or path.startswith(f"{use}.") for use in piece.uses)


def find_pieces(model: nn.Module, partition: str | Sequence[str], stages: int = 2) -> Sequence[Piece]:
    """The pieces of `model` by the config's `partition`.

    Args:
        stages: the number of stages for which the error proposes split points.

    Raises:
        InputError: no partitioner knows the model, or it cannot be split in this way.
    """
    if not isinstance(partition, str):
        from .fx_split import split_at

        return split_at(model, partition)
    try:
        known = PARTITIONERS.each() if partition == "auto" else [(partition, PARTITIONERS.get(partition))]
    except RegistryError as error:
        raise InputError(str(error)) from error
    for _, partitioner in known:
        pieces = partitioner.pieces_of(model)
        if pieces is not None:
            return list(pieces)
    which = "no partitioner knows" if partition == "auto" else f"the partitioner {partition!r} does not know"
    raise InputError(f"{which} {type(model).__name__}; {_suggest(model, stages)}")


def resolve(
    model: nn.Module, size: int, chunks: int, partition: str | Sequence[str] = "auto", schedule: str = "1f1b"
) -> tuple[Partition | None, list[str]]:
    """The partition of `model` into `size` x `chunks` stages for a schedule, and all problems."""
    count = size * chunks
    stages_text = f"pipeline.size={size}" + (f" x chunks={chunks}" if chunks > 1 else "")
    if not isinstance(partition, str) and len(partition) != count - 1:
        return None, [
            f"partition: {counted(len(partition), 'split point')} for {len(partition) + 1} stages, but {stages_text} "
            f"needs {count}; name the {counted(count - 1, 'module')} with which stages 1 to {count - 1} begin"
        ]
    try:
        pieces = find_pieces(model, partition, count)
    except InputError as error:
        return None, [str(error)]
    if len(pieces) < count:
        names = ", ".join(piece.name for piece in pieces)
        return None, [
            f"{stages_text} needs {count} stages, but {type(model).__name__} has only {len(pieces)} pieces ({names}); "
            f"use at most {len(pieces)} stages, or a model with more blocks"
        ]
    params = list(model.named_parameters(remove_duplicate=False))
    used = [{p for name, p in params if _is_used(name, piece)} for piece in pieces]
    costs = [float(sum(p.numel() for p in some)) for some in used]
    runs = list(pairwise(divide(costs, count)))
    stages = tuple(tuple(pieces[begin:end]) for begin, end in runs)
    ranks = tuple(SCHEDULES.get(schedule).rank_of(stage, size) for stage in range(count))
    found = Partition(stages, ranks, tuple(sum(costs[begin:end]) for begin, end in runs))
    return found, list(_find_problems(model, found))


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


def _find_problems(model: nn.Module, partition: Partition) -> Iterator[str]:
    ranks = partition.holders(model)
    shared = [
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.rpartition(".")[2].startswith("running_") and len(ranks[id(buffer)]) > 1
    ]
    if shared:
        yield (
            f"{shorten(shared)}: several stages would keep these running statistics, each from its own activations; "
            "use a norm without statistics there, or cut the model so that one stage has both uses"
        )
    hooked = [name or "the model itself" for name, module in partition.not_called(model) if call_hooks(module)]
    if hooked:
        yield (
            f"{shorten(hooked)}: hooks are registered on it, but under a pipeline it is not called as a whole; "
            "register them on the modules below it"
        )
    tables = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, module in model.named_modules() if isinstance(module, tables) and module.sparse]
    if sparse:
        yield f"{shorten(sparse)}: sparse gradients do not work under a pipeline; build the embedding with sparse=False"
    by_batch = [name for name, module in model.named_modules() if getattr(module, "scale_grad_by_freq", False)]
    if by_batch:
        yield (
            f"{shorten(by_batch)}: scale_grad_by_freq divides gradients by how often an index is in the batch, but a "
            "pipeline computes them for each microbatch; build the embedding with scale_grad_by_freq=False"
        )


def _suggest(model: nn.Module, count: int) -> str:
    """Split points for `count` stages, from the longest list of modules."""
    from .fx_split import takes_any_arguments

    if takes_any_arguments(model):
        return (
            "split points cannot cut it either, because its forward takes *args or **kwargs; register a partitioner "
            "(halfmesh.PARTITIONERS, see docs/pipeline.md), or use tensor parallelism or fsdp"
        )
    rows = [
        (sum(p.numel() for p in row.parameters()), [f"{name}.{key}".lstrip(".") for key, _ in row.named_children()])
        for name, row in model.named_modules()
        if isinstance(row, (nn.ModuleList, nn.Sequential))
    ]
    _, names = max((row for row in rows if len(row[1]) >= count), default=(0, []))
    if not names:
        how = "parallel = dict(pipeline=dict(size=..., partition=(...)))"
        children = ", ".join(name for name, _ in model.named_children())
        return f"name the {counted(count - 1, 'module')} that begin a stage in {how}; it has {children or 'no modules'}"
    points = tuple(names[len(names) * stage // count] for stage in range(1, count))
    return f"name the modules that begin a stage, for example partition={points}; or register a partitioner"
