"""The partition of a model's pieces into stages, found before the model is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from ...errors import InputError, counted, page
from ...utils.tensors import parameter_names
from ..modules import is_within
from ..registries import PARTITIONERS, SCHEDULES
from .pieces import Piece


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
        return [
            (name, module)
            for name, module in model.named_modules()
            if not any(_is_used(name, piece) for piece in self.pieces)
        ]


def _is_used(path: str, piece: Piece) -> bool:
    return any(is_within(path, use) for use in piece.uses)


def find_pieces(model: nn.Module, partition: str | Sequence[str], stages: int = 2) -> Sequence[Piece]:
    """The pieces of `model` by the config's `partition`.

    Args:
        stages: the number of stages for which the error proposes split points.

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
    raise InputError(f"{which} {type(model).__name__}; {_suggest(model, stages)}")


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
        raise InputError(
            f"partition: {counted(len(partition), 'split point')} for {len(partition) + 1} stages, but {stages_text} "
            f"needs {count}; name the {counted(count - 1, 'module')} with which stages 1 to {count - 1} begin"
        )
    pieces = find_pieces(model, partition, count)
    if len(pieces) < count:
        names = ", ".join(piece.name for piece in pieces)
        raise InputError(
            f"{stages_text} needs {count} stages, but {type(model).__name__} has only {len(pieces)} pieces ({names}); "
            f"use at most {len(pieces)} stages, or a model with more blocks"
        )
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


def _suggest(model: nn.Module, count: int) -> str:
    """Split points for `count` stages, from the longest list of modules."""
    if any(name.startswith("*") for name in parameter_names(model)):
        return (
            "split points do not work either, because its forward takes *args or **kwargs; register a partitioner "
            f"(halfmesh.PARTITIONERS, see {page('Pipeline parallelism')}), or use tensor parallelism or fsdp"
        )
    rows = [
        (sum(p.numel() for p in row.parameters()), [f"{name}.{key}".lstrip(".") for key, _ in row.named_children()])
        for name, row in model.named_modules()
        if isinstance(row, (nn.ModuleList, nn.Sequential))
    ]
    _, names = max((row for row in rows if len(row[1]) >= count), default=(0, []))
    points = tuple(names[len(names) * stage // count] for stage in range(1, count)) if names else "(...)"
    return f"name the modules that start a stage, for example partition={points}; or register a partitioner"
