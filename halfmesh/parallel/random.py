"""Random numbers over the mesh: what must differ between ranks, and what must not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import torch_private
from .context import ParallelContext

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples of it are far apart
_WORD = 2**64
_OFFSET_STEP = 4  # CUDA counts in steps of 4
_OFFSET_FACTOR = 0xBF58476D1CE4E5B9  # odd, and no small multiple of _GOLDEN
_REMEMBERED = 1024  # forks that a backward may still go back into, of 5 kB each on the CPU


def separate_dp_ranks(seed: int, context: ParallelContext) -> None:
    """Seed torch with `seed` + dp rank, so that dropout differs between the data ranks and agrees within one.

    The ranks of a tensor group or pipeline see the same data, so what loads and augments them draws alike, too:
    python's and numpy's generators are seeded where there are such ranks. One process, and data ranks for those two,
    keep what the user seeded. Weights do not depend on any of it: they are made before, and broadcast.
    """
    if context.size > context.dp_size:
        random.seed(seed + context.dp_rank)
        np.random.seed((seed + context.dp_rank) % 2**32)
    if context.size > 1:
        torch.manual_seed(seed + context.dp_rank)


def model_seed(seed: int, context: ParallelContext) -> int:
    """The seed of the model's own random numbers: one for each data rank and stage, the same in a tensor group."""
    return seed + context.dp_rank + context.dp_size * context.pp_rank


class CommonRandom:
    """The random numbers of the model's own forward in training: a sequence of their own, so that all ranks of a tensor
    group drop alike, whatever else one of them draws (to write a sample, to pick a colour). What is drawn outside goes
    on as if the model had drawn nothing.

    Args:
        seed: the same on all ranks of the group.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = _cuda_generator(device) if device.type == "cuda" else torch.default_generator
        self.state = torch.Generator(device).manual_seed(seed).get_state()
        """Where the sequence is, between two calls of the model."""
        self._outside: torch.Tensor | None = None

    @torch.compiler.disable
    def enter(self, model: nn.Module, *_: Any, always: bool = False) -> None:
        """A forward hook: the model begins. `always`: also in evaluation, where some of its modules may train."""
        if (model.training or always) and self._outside is None:
            self._outside = self._generator.get_state()
            self._generator.set_state(self.state)

    @torch.compiler.disable
    def leave(self, *_: Any) -> None:
        """A forward hook: the model ends."""
        if self._outside is not None:
            self.state = self._generator.get_state()
            self._generator.set_state(self._outside)
            self._outside = None


class RandomFork:
    """Random numbers that differ between the ranks of a tensor group, while the common ones stay in step.

    Outside a fork torch's generator draws the same on all ranks of the group: what follows is dropped alike where
    activations are whole. Inside a fork it draws from a sequence of this rank's own, for activations that are divided.
    However much is drawn inside, the ranks agree again outside.

    Whether a fork is open, and where its sequence begins, is told by the generator's own state. So activation
    checkpointing, which goes back to that state, repeats a forward exactly, wherever in a fork it began or ended.

    Args:
        rank: this rank's place in the tensor group.
        device: whose generator is used.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._on_cuda = device.type == "cuda"
        self._generator = _cuda_generator(device) if self._on_cuda else torch.default_generator
        self._outside: dict[int, Any] = {}  # the common state to go back to, by the seed inside

    @property
    def is_open(self) -> bool:
        """Whether random numbers are this rank's own now."""
        return self._generator.initial_seed() in self._outside

    @torch.compiler.disable
    def open(self) -> None:
        """Draw from a sequence of this rank's own. Does nothing within a fork, and where nothing is drawn."""
        if self.is_open or torch_private.in_fake_mode():
            return
        generator = self._generator
        outside: Any
        if self._on_cuda:  # the state is a seed and a counter, both known to the host
            seed, offset = generator.initial_seed(), generator.get_offset()
            outside, begin = (seed, offset + _OFFSET_STEP), seed + offset * _OFFSET_FACTOR
        else:
            begin = int(torch.randint(2**62, (), generator=generator))
            outside = generator.get_state()
        seed = (begin + (self._rank + 1) * _GOLDEN) % _WORD
        self._outside[seed] = outside
        if len(self._outside) > _REMEMBERED:
            del self._outside[next(iter(self._outside))]
        generator.manual_seed(seed)

    @torch.compiler.disable
    def close(self) -> None:
        """Draw in common again. Does nothing outside a fork."""
        outside = self._outside.get(self._generator.initial_seed())
        if outside is None:
            return
        if self._on_cuda:
            seed, offset = outside
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)
        else:
            self._generator.set_state(outside)


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # there are no generators before
    return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]
