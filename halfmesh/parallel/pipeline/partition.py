"""How a model's pieces are dealt out to stages; before anything is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from ..._torch import call_hooks
from ...errors import InputError, RegistryError, shorten
from ..registries import PARTITIONERS
from .fx_split import split_at, takes_any_arguments
from .pieces import Piece, children_of


class UnknownModelError(InputError):
    """No partitioner knows the model."""


@dataclass(frozen=True)
class Partition:
    """Which pieces make which stage, in the order of the forward. Stage i is on rank i % size of the pipeline."""

    stages: tuple[tuple[Piece, ...], ...]
    size: int
    costs: tuple[float, ...] = ()
    """How many elements the parameters of each stage have."""

    @property
    def pieces(self) -> list[Piece]:
        """Of all stages, in order."""
        return [piece for stage in self.stages for piece in stage]

    @property
    def names(self) -> list[str]:
        """Each stage in words: its first and last piece."""
        return [s[0].name if len(s) == 1 else f"{s[0].name} to {s[-1].name}" for s in self.stages]

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank of the pipeline has."""
        return list(range(rank, len(self.stages), self.size))

    def is_used_by(self, name: str, rank: int) -> bool:
        """Whether a stage of a rank calls the module of that name, or one that it is in."""
        return any(_is_used(name, piece) for index in self.of_rank(rank) for piece in self.stages[index])

    def not_called(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules, by name, that no stage calls: it calls those below them."""
        return [
            (name, module)
            for name, module in model.named_modules()
            if not any(_is_used(name, piece) for piece in self.pieces)
        ]

    def stages_of(self, name: str) -> list[int]:
        """The stages that use the parameter or buffer of that name; the first, if no piece uses it."""
        found = [i for i, stage in enumerate(self.stages) if any(_is_used(name, piece) for piece in stage)]
        return found or [0]

    def holders(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """For each parameter and buffer, by its id, the ranks of the pipeline that use it under any of its names."""
        ranks: dict[int, set[int]] = {}
        for name, tensor in all_tensors(model):
            ranks.setdefault(id(tensor), set()).update(stage % self.size for stage in self.stages_of(name))
        return {key: tuple(sorted(found)) for key, found in ranks.items()}


def count_parameters(model: nn.Module, piece: Piece) -> float:
    """The number of elements of the parameters that a piece uses."""
    used = {id(p): p for name, p in model.named_parameters(remove_duplicate=False) if _is_used(name, piece)}
    return float(sum(param.numel() for param in used.values()))


def _is_used(path: str, piece: Piece) -> bool:
    return any(path == use or path.startswith(f"{use}.") for use in piece.uses)


def find_pieces(model: nn.Module, partition: str | Sequence[str]) -> Sequence[Piece]:
    """The pieces that the config's `partition` makes of `model`.

    Raises:
        InputError: no partitioner knows the model, or it cannot be cut so.
    """
    if not isinstance(partition, str):
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
    raise UnknownModelError(f"{which} {type(model).__name__}")


def resolve(
    model: nn.Module, size: int, chunks: int, partition: str | Sequence[str] = "auto"
) -> tuple[Partition | None, list[str]]:
    """How `model` is cut into `size` x `chunks` stages, and every reason why it cannot be."""
    count = size * chunks
    stages_text = f"pipeline.size={size}" + (f" x chunks={chunks}" if chunks > 1 else "")
    points = None if isinstance(partition, str) else partition
    if points is not None and len(points) != count - 1:
        return None, [
            f"partition: {len(points)} split point(s) make {len(points) + 1} stages, but {stages_text} needs {count}; "
            f"name the {count - 1} modules with which stages 1 to {count - 1} begin"
        ]
    try:
        pieces = find_pieces(model, partition)
    except UnknownModelError as error:
        return None, [f"{error}; {_suggest(model, count)}"]
    except InputError as error:
        return None, [str(error)]
    if len(pieces) < count:
        names = ", ".join(piece.name for piece in pieces)
        return None, [
            f"{stages_text} needs {count} stages, but {type(model).__name__} has {len(pieces)} pieces only ({names}); "
            f"use fewer stages ({len(pieces)} at most), or a model with more blocks"
        ]
    costs = [count_parameters(model, piece) for piece in pieces]
    runs = list(pairwise(divide(costs, count)))
    stages = tuple(tuple(pieces[begin:end]) for begin, end in runs)
    found = Partition(stages, size, tuple(sum(costs[begin:end]) for begin, end in runs))
    return found, list(_find_problems(model, found))


def divide(costs: Sequence[float], count: int) -> list[int]:
    """Bounds of `count` runs of `costs`, none empty, whose largest sum is as small as possible. Where there is a choice
    on the way, the more even runs are taken."""
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}  # by its end: largest sum, squares, bounds
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
    """For each name of a parameter or buffer the first one that the same tensor has."""
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
            f"{shorten(shared)}: running statistics that several stages would keep, each from its own activations; use "
            "a norm without statistics there, or cut the model so that one stage has both uses"
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


def _suggest(model: nn.Module, count: int) -> str:
    """Split points that would do, from the longest row of modules; none where the forward cannot be traced."""
    if type(model).forward is not nn.Module.forward and takes_any_arguments(model):
        return (
            "split points cannot cut it either, because its forward takes *args or **kwargs; register a partitioner "
            "(halfmesh.PARTITIONERS, see docs/pipeline.md), or use tensor parallelism or fsdp"
        )
    rows = [
        (sum(p.numel() for p in row.parameters()), name, row)
        for name, row in model.named_modules()
        if isinstance(row, (nn.ModuleList, nn.Sequential)) and len(row) >= count
    ]
    how = "parallel = dict(pipeline=dict(size=..., partition=(...)))"
    if not rows:
        children = ", ".join(name for name, _ in model.named_children())
        return f"name the {count - 1} module(s) that begin a stage in {how}; it has {children or 'no modules'}"
    _, name, row = max(rows, key=lambda found: found[0])
    costs = [float(sum(p.numel() for p in module.parameters())) for module in row]
    keys = children_of(row)
    points = [".".join(filter(None, (name, keys[bound]))) for bound in divide(costs, count)[1:-1]]
    text = ", ".join(map(repr, points)) + ("," if len(points) == 1 else "")
    return f"name the modules that begin a stage, for example partition=({text}); or register a partitioner"
