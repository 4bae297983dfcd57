"""What tests of pipelines share: a model in pieces in one process, and an engine whose model is cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import halfmesh
from halfmesh import Call, Piece
from halfmesh.parallel.pipeline.partition import find_pieces
from halfmesh.utils.tensors import tensors_of

from .models import CLASSES, FEATURES, make_engine
from .ranks import here
from .versions import SPLIT_SCHEDULES

# -- pieces in one process -------------------------------------------------------------------------------------------


def pieces_of(model: nn.Module, partition: Any = "auto") -> Sequence[Piece]:
    """What `parallel.pipeline.partition`, or a partitioner, makes of `model`."""
    return partition.pieces_of(model) if hasattr(partition, "pieces_of") else find_pieces(model, partition)


def compose(model: nn.Module, pieces: Sequence[Piece], *args: Any, **kwargs: Any) -> Any:
    """The output of all pieces, one after another on `model` itself."""
    return _compose(model, pieces, args, kwargs, _whole)


def assert_equal(found: Any, expected: Any) -> None:
    """Trees of the same type with bitwise equal tensors."""
    assert type(found) is type(expected)
    assert len(tensors_of(expected)) > 0
    torch.testing.assert_close(tensors_of(found), tensors_of(expected), rtol=0, atol=0)


def check_pieces(model: nn.Module, args=(), kwargs=None, partition: Any = "auto") -> Sequence[Piece]:
    """The pieces of `model`, which compute bit by bit what it computes, each with what it says that it uses only."""
    pieces = pieces_of(model, partition)
    given = dict(kwargs or {})
    modes = {module: module.training for module in model.modules()}
    for training in (True, False):
        for module, mode in modes.items():
            module.training = mode and training
        torch.manual_seed(1)
        expected = copy.deepcopy(model)(*copy.deepcopy(args), **given)
        for view in (_whole, _only):
            torch.manual_seed(1)
            assert_equal(_compose(copy.deepcopy(model), pieces, copy.deepcopy(args), given, view), expected)
    for module, mode in modes.items():
        module.training = mode
    assert [name for name, _ in _tensors_by_name(model) if not _is_used(name, pieces)] == []
    return pieces


def _compose(model, pieces, args, kwargs, view):
    call, activations = Call(args, kwargs), None
    for piece in pieces:
        if piece.prepare is not None:
            piece.prepare(model, call)
        activations = piece.run(view(model, piece), Call(args, kwargs), activations)
    return activations


def _whole(model, piece):
    return model


def _only(model, piece):
    """A copy of `model` in which everything that `piece` does not use is None."""
    alone = copy.deepcopy(model)
    tensors = _tensors_by_name(alone)
    kept = {id(tensor) for name, tensor in tensors if _is_used(name, [piece])}
    for name, tensor in tensors:
        if id(tensor) not in kept:
            path, _, own = name.rpartition(".")
            setattr(alone.get_submodule(path), own, None)
    return alone


def _tensors_by_name(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _is_used(name, pieces):
    return any(name == use or name.startswith(f"{use}.") for piece in pieces for use in piece.uses)


# -- an engine under a pipeline --------------------------------------------------------------------------------------

SCHEDULES = {"gpipe": {}, "1f1b": {}, **{name: {"chunks": 2} for name in ("interleaved", *SPLIT_SCHEDULES)}}
"""With what two ranks need for each."""


class Deep(nn.Sequential):
    """A row of layers, with dropout or BatchNorm where they are wanted."""

    def __init__(self, *between: nn.Module, seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, 16), *between, nn.LayerNorm(16), nn.GELU()]
        super().__init__(*layers, nn.Linear(16, CLASSES))


def pipe(size: int = 2, microbatches: int | None = 2, **options: Any) -> dict[str, Any]:
    """A config."""
    return {"parallel": {"pipeline": {"size": size, "microbatches": microbatches, **options}}}


def make(config: Any = None, model: nn.Module | None = None, **options: Any) -> halfmesh.Engine:
    return make_engine(pipe() if config is None else config, model=Deep() if model is None else model, **options)


def step(engine: halfmesh.Engine, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """One turn of the README's loop: output, loss, and what step returned."""
    x, y = here((x, y))
    engine.zero_grad()
    output = engine(x)
    loss = engine.criterion(output, y)
    engine.backward(loss)
    return output, loss, engine.step()
