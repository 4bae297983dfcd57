"""engine.load: a checkpoint of any layout and precision into this one. Nothing changes before all of it is known to
fit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError, InputError, bullet_list, find_near, shorten
from ..parallel.context import ParallelContext
from ..parallel.regions import whole
from ..shard import ParamShard
from . import forms, planners, progress
from .contents import AVERAGE, COUNTERS, MODEL, STATE, Holding, Piece, Pieces, join_groups, without_empty
from .finding import Found
from .saving import class_name
from .together import together

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how a step is computed, not which: those of this run stay."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was looked into.

    Attributes:
        common: what was the same on all ranks.
        first, own: what rank 0 had for itself, and the rank with this one's number, if there was one.
    """

    found: Found
    reader: planners.SafeReader
    metadata: Metadata
    common: Mapping[str, Any]
    first: Mapping[str, Any]
    own: Mapping[str, Any] | None

    def shapes(self, prefix: str) -> dict[str, torch.Size]:
        """The whole tensors whose names begin with `prefix`, by the rest of their names."""
        tensors = self.metadata.state_dict_metadata
        return {
            name.removeprefix(prefix): tensor.size
            for name, tensor in tensors.items()
            if name.startswith(prefix) and isinstance(tensor, TensorStorageMetadata)
        }

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        tensor = self.metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        return tensor.properties.dtype


def look_into(found: Found, context: ParallelContext) -> Stored:
    """Read what stands in the small files. All ranks together.

    Raises:
        CheckpointError: they hold something that does not belong there.
    """

    def looked() -> Stored:
        folder, files = found.folder, {name: size for name, (size, _) in found.manifest.files.items()}
        reader = planners.SafeReader(folder, files)
        own = progress.rank_file(context.rank)
        try:
            metadata = reader.read_metadata()
            _refuse_missing_tensors(metadata, found.manifest.about.get("tensors"))
            return Stored(
                found,
                reader,
                metadata,
                progress.read(folder / progress.COMMON, forms.COMMON),
                progress.read(folder / progress.rank_file(0), forms.OWN),
                progress.read(folder / own, forms.OWN) if own in files else None,
            )
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{folder} holds more than plain data, which is not read because it could run code "
                f"({str(error).partition(chr(10))[0]}); take another checkpoint"
            ) from error

    return together(context, f"loading {found.folder} failed", looked)


def _refuse_missing_tensors(metadata: Metadata, saved: Any) -> None:
    """Raise CheckpointError if there are not as many tensors as were saved; None: an older checkpoint does not say."""
    there = len(metadata.state_dict_metadata)
    if saved is not None and saved != there:
        raise CheckpointError(f".metadata names {there} tensors, and {saved} were saved; take another checkpoint")


def refuse_other(stored: Stored, holding: Holding, scheduled: bool, context: ParallelContext) -> None:
    """Raise InputError, on all ranks, if the checkpoint is of another model or optimizer.

    Args:
        scheduled: whether a learning-rate scheduler takes the state that was saved: it knows groups by their number.
    """
    together(context, f"loading {stored.found.folder} failed", holding.update.sync_param_groups)
    weights = without_empty(holding.weight_targets())
    mine = {name: tuple(piece.placement.shape) for name, piece in weights.items()}
    everyone = context.everyone((mine, [group["params"] for group in holding.groups()], list(holding.extras())))
    model = {name: shape for shapes, *_ in everyone for name, shape in shapes.items()}
    groups = join_groups([names for _, names, _ in everyone])
    extras = {name for *_, names in everyone for name in names}
    saved = {name: tuple(shape) for name, shape in stored.shapes(MODEL).items()}
    problems = [*model_problems(model, saved), *_extra_problems(extras, stored.common["extras"].keys())]
    problems += _optimizer_problems(groups, stored.common, holding, scheduled)
    if problems:
        raise InputError(
            bullet_list(f"{stored.found.folder} does not fit the model and optimizer of this engine:", problems)
        )


def model_problems(model: Mapping[str, Any], saved: Mapping[str, Any], source: str = "the checkpoint") -> Iterator[str]:
    """What of a model is not as it was saved in `source`: names and shapes of the whole tensors."""
    missing, unexpected = sorted(model.keys() - saved.keys()), sorted(saved.keys() - model.keys())
    if missing:
        yield f"{source} has no {shorten([_near(name, unexpected) for name in missing])}"
    if unexpected:
        yield f"the model has no {shorten(unexpected)}"
    other = [
        f"{name} ({saved[name]} in {source}, {model[name]} here)"
        for name in sorted(model.keys() & saved.keys())
        if saved[name] != model[name]
    ]
    if other:
        yield f"other shapes: {shorten(other)}"


def _extra_problems(mine: Set[str], saved: Set[str]) -> Iterator[str]:
    """What modules give and take with `get_extra_state` and `set_extra_state`."""
    if mine - saved:
        yield f"the checkpoint has no {shorten(sorted(mine - saved))} (of get_extra_state)"
    if saved - mine:
        yield f"the model has no {shorten(sorted(saved - mine))} (of get_extra_state)"


def _near(name: str, others: Sequence[str]) -> str:
    near = find_near(name, others)
    return f"{name} (but {near})" if near else name


def _optimizer_problems(
    groups: list[list[str]], common: Mapping[str, Any], holding: Holding, scheduled: bool
) -> Iterator[str]:
    own = class_name(holding.update.optimizer)
    if common["optimizer"] != own:
        yield (
            f"it was saved with the optimizer {common['optimizer']}, and this is {own}; use the same class, or load "
            "the weights alone: engine.load_weights"
        )
        return
    saved = [group["params"] for group in common["groups"]]
    mine, theirs = list(map(sorted, groups)), list(map(sorted, saved))
    if sorted(mine) == sorted(theirs):
        if scheduled and mine != theirs:
            order = [str(theirs.index(group)) for group in mine]
            yield (
                f"its optimizer has the same groups in another order: here are its {shorten(order)}, and the "
                "lr_scheduler's state is by number, so that learning rates would be exchanged; build the groups in the "
                "order of then, or give initialize no lr_scheduler"
            )
        return
    here, there = ({name for names in each for name in names} for each in (groups, saved))
    words = [f"only {where}: {shorten(sorted(names))}" for where, names in _named(here - there, there - here)]
    yield (
        f"its optimizer has groups of {list(map(len, saved))} parameters, and this one of {list(map(len, groups))} "
        f"({'; '.join(words) or 'the same parameters, in other groups'}); build the groups as they were then"
    )


def _named(here: set[str], there: set[str]) -> Iterator[tuple[str, set[str]]]:
    yield from ((where, names) for where, names in (("here", here), ("in the checkpoint", there)) if names)


def read_tensors(stored: Stored, holding: Holding, context: ParallelContext) -> None:
    """Write the weights into masters and model, their average, and give the optimizer its state. All ranks together."""
    targets = {MODEL + name: piece for name, piece in holding.weight_targets().items()}
    state = _StateTargets(stored, holding)
    averages = _average_targets(stored, holding)
    pieces = without_empty(targets | state.pieces | averages)
    together(context, too_late(stored), lambda: _read(pieces, stored, context))
    together(context, too_late(stored), state.hand_over)
    holding.tell()
    if holding.average is not None and holding.average.values:
        holding.average.begin_anew(besides={shard for shard, name in holding.trained() if AVERAGE + name in averages})


def _average_targets(stored: Stored, holding: Holding) -> Pieces:
    """Memory for the average of the weights, as far as the checkpoint has one."""
    saved = stored.shapes(AVERAGE)
    if holding.average is not None and saved:
        for shard, _ in holding.trained():
            holding.average.make(shard)
    return {name: piece for name, piece in holding.averages().items() if name.removeprefix(AVERAGE) in saved}


def too_late(stored: Stored) -> str:
    """What has failed, for an error after the first change."""
    return f"loading {stored.found.folder} failed when weights were changed already; make the engine anew"


def _read(pieces: Pieces, stored: Stored, context: ParallelContext) -> None:
    try:
        with torch.no_grad():
            planners.read(pieces, stored.reader, alone=context.size == 1)
    except CheckpointException as error:
        mine = error.failures.get(context.rank)
        if mine is not None:
            raise mine[0] from error


class _StateTargets:
    """Memory for the optimizer's state that a checkpoint has."""

    def __init__(self, stored: Stored, holding: Holding) -> None:
        self._holding = holding
        self._stored = stored
        self._shards = {name: shard for shard, name in holding.trained()}
        self._values: dict[str, dict[str, Any]] = {
            name: dict(stored.common["plain_state"].get(name, {})) for name in self._shards
        }
        self.pieces: Pieces = {}
        for prefix, make in ((STATE, self._part), (COUNTERS, self._counter)):
            for rest, shape in stored.shapes(prefix).items():
                key, _, name = rest.partition(".")
                if name in self._shards:
                    piece = make(self._shards[name], prefix + rest, key, shape)
                    self.pieces[prefix + rest] = piece
                    self._values[name][key] = piece.held

    def _part(self, shard: ParamShard, full_name: str, key: str, shape: torch.Size) -> Piece:
        masters = self._holding.update.master_weights
        target = masters.target(shard)
        dtype = self._stored.dtype(full_name)
        dtype = target.dtype if dtype.is_floating_point and target.is_floating_point() else dtype  # as torch has it
        there = masters.optimizer.state.get(target, {}).get(key)
        fits = isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (target.shape, dtype)
        held = there.detach() if fits else torch.empty_like(target, dtype=dtype).detach()
        return Piece(held, self._holding.division.placement(shard))

    def _counter(self, shard: ParamShard, full_name: str, key: str, shape: torch.Size) -> Piece:
        return Piece(torch.empty(shape, dtype=self._stored.dtype(full_name)), whole(shape))

    def hand_over(self) -> None:
        """Give the optimizer its state and settings, through its own `load_state_dict`."""
        holding, optimizer = self._holding, self._holding.update.optimizer
        names, saved = holding.groups(), self._stored.common["groups"]
        numbers = iter(range(sum(len(group["params"]) for group in names)))
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        for index, group in enumerate(names):
            kept = {key: group[key] for key in HOW if key in group}
            places = {name: next(numbers) for name in group["params"]}
            groups.append({**_group_of(group["params"], index, saved), **kept, "params": list(places.values())})
            state |= {place: self._values[name] for name, place in places.items() if self._values[name]}
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _group_of(names: Sequence[str], index: int, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The group of a checkpoint that holds `names`, those that this rank has of a group."""
    return next((group for group in saved if names and names[0] in group["params"]), saved[index])
