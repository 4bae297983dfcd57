"""Pieces of a model run one after another in one process, each with nothing but what it says that it uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halfmesh.parallel.pipeline.partition import Entry, all_entries, find_pieces
from halfmesh.parallel.pipeline.pieces import Call, Piece
from halfmesh.tree import map_tensors


def only(model: nn.Module, piece: Piece) -> nn.Module:
    """A copy of `model` in which everything that `piece` does not use is None."""
    alone = copy.deepcopy(model)
    modules = dict(alone.named_modules(remove_duplicate=False))
    entries = dict(all_entries(alone))
    kept = {id(tensor) for entry, tensor in entries.items() if _is_used(entry, [piece])}
    for (path, name), tensor in entries.items():
        if id(tensor) not in kept:
            setattr(modules[path], name, None)
    return alone


def compose(model: nn.Module, pieces: Sequence[Piece], *args: Any, **kwargs: Any) -> Any:
    """The output of all pieces on `model` itself."""
    call, carry = Call(args, kwargs), None
    for piece in pieces:
        if piece.prepare is not None:
            piece.prepare(model, call)
        carry = piece.run(model, call.afresh(), carry)
    return carry


def compose_alone(model: nn.Module, pieces: Sequence[Piece], *args: Any, **kwargs: Any) -> Any:
    """The output where each piece has the modules that it uses, and no other."""
    call, carry = Call(args, kwargs), None
    for piece in pieces:
        if piece.prepare is not None:
            piece.prepare(model, call)
        carry = piece.run(only(model, piece), call.afresh(), carry)
    return carry


def unused(model: nn.Module, pieces: Sequence[Piece]) -> list[str]:
    """Names of the parameters and buffers that no piece uses."""
    return [".".join(filter(None, entry)) for entry, _ in all_entries(model) if not _is_used(entry, pieces)]


def assert_equal(found: Any, expected: Any) -> None:
    """Trees of the same type with bitwise equal tensors."""
    assert type(found) is type(expected)
    a, b = _tensors(found), _tensors(expected)
    assert len(a) == len(b) > 0
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (one - other).abs().max()


def check_pieces(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    partition: str | Sequence[str] = "auto",
) -> Sequence[Piece]:
    """The pieces of `model`, which compute what it computes and use all that it has."""
    pieces = find_pieces(model, partition)
    given = dict(kwargs or {})
    modes = {module: module.training for module in model.modules()}
    for training in (True, False):
        for module, mode in modes.items():
            module.training = mode and training
        torch.manual_seed(1)
        expected = copy.deepcopy(model)(*copy.deepcopy(args), **given)
        torch.manual_seed(1)
        alone = compose_alone(model, pieces, *copy.deepcopy(args), **given)
        torch.manual_seed(1)
        together = compose(copy.deepcopy(model), pieces, *copy.deepcopy(args), **given)
        assert_equal(alone, expected)
        assert_equal(together, expected)
    for module, mode in modes.items():
        module.training = mode
    assert unused(model, pieces) == []
    return pieces


def _is_used(entry: Entry, pieces: Sequence[Piece]) -> bool:
    name = ".".join(filter(None, entry))
    return any(name == use or name.startswith(f"{use}.") for piece in pieces for use in piece.uses)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda t: found.append(t) or t, tree)  # type: ignore[func-returns-value]
    return found
