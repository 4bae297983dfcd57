"""Random numbers over the mesh: those that must differ between ranks, and those that must be equal."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..utils.torch_private import in_shapes_only, with_memory
from .mesh import ParallelContext

_SEEDS = 2**40  # of common sequences; seeds of forks are above
_FORK = 0x5EED5F  # the bits of a fork's seed above these
_STEP = 0x9E3779B97F  # 2**40 / golden ratio, odd: multiples of it come back after 2**40 steps, and lie far apart
_RANK_STEP = 0xBF58476D1D  # odd, and no small multiple of _STEP
CPU = torch.device("cpu")


@with_memory()
def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator that training may use on this rank."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


@with_memory()
def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo the draws made since `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def derived_seed(*parts: int) -> int:
    """A 63-bit seed from these numbers."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class IsolatedRNG:
    """A scope in which python's, numpy's and torch's CPU generators draw from a separate sequence.

    Leaving it restores their former state; entering it again continues the sequence.

    Args:
        start: a seed, or a result of `random_state`.
    """

    def __init__(self, start: int | Mapping[str, Any]) -> None:
        self.state: Any = None if isinstance(start, int) else start
        """The state of the sequence between two scopes; None before the first one of a seed."""
        self.seed = start if isinstance(start, int) else 0

    def __enter__(self) -> None:
        self._outside, self._begun = random_state(CPU), self.state
        if self.state is not None:
            set_random_state(self.state, CPU)
        else:
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            torch.random.default_generator.manual_seed(self.seed)

    def __exit__(self, *_: object) -> None:
        self.state = random_state(CPU)
        set_random_state(self._outside, CPU)


class SharedRNG(IsolatedRNG):
    """A scope in which all ranks draw as rank 0 would. At its end each generator of this rank that began in rank 0's
    state keeps its new state, as if the user had drawn; the others return to their former state.

    Args:
        start: `random_state` of rank 0, or one that was saved.
    """

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        ours, begun, drawn = self._outside, self._begun, self.state
        set_random_state({name: (drawn if same_state(ours[name], begun[name]) else ours)[name] for name in ours}, CPU)


def same_state(one: Any, other: Any) -> bool:
    """Return True if two states of a generator, or two results of `random_state`, are equal."""
    if isinstance(one, dict):
        return all(same_state(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def model_seed(seed: int, context: ParallelContext, own_rng_axes: Iterable[str] = ()) -> int:
    """The seed of the model's random numbers. It differs between data ranks, stages and ranks of `own_rng_axes`, and is
    equal on the ranks of a tensor group."""
    coordinate = 0
    for axis in own_rng_axes:
        coordinate = coordinate * context.sizes[axis] + context.coordinate(axis)
    place = context.dp_rank + context.dp_size * (context.pp_rank + context.sizes["pp"] * coordinate)
    return (seed + place) % _SEEDS


class RandomFork:
    """Random numbers that differ between the ranks of a tensor group, while the common ones stay equal.

    Outside a fork torch's generator draws the same on all ranks of the group, for replicated activations. Inside a fork
    it draws from a sequence of this rank, for sharded activations. After a fork the ranks draw the same again, however
    much was drawn inside.

    The seed of the generator shows if a fork is open, and how the common sequence goes on after it. So activation
    checkpointing, which restores the generator, repeats a forward exactly, even if it begins or ends inside a fork,
    however many forks were opened since: nothing is remembered.

    Args:
        rank: this rank in the tensor group.
        device: whose generator is used.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._offset = (rank + 1) * _RANK_STEP
        self._generator = generator_of(device)

    @property
    def is_open(self) -> bool:
        """True inside a fork."""
        return self._generator.initial_seed() // _SEEDS == _FORK

    @torch.compiler.disable
    def open(self) -> None:
        """Draw from this rank's sequence. Does nothing inside a fork, and where only shapes are inferred."""
        if not (self.is_open or in_shapes_only()):
            inside = (self._generator.initial_seed() + self._offset) % _SEEDS
            self._generator.manual_seed(_FORK * _SEEDS + inside)

    @torch.compiler.disable
    def close(self) -> None:
        """Go on with the common sequence. Does nothing outside a fork."""
        if self.is_open:
            self._generator.manual_seed((self._generator.initial_seed() - self._offset + _STEP) % _SEEDS)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator from which torch draws on `device`."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # there are no generators before
    return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
