"""Random numbers over the mesh: what must differ between ranks, and what must not."""

from __future__ import annotations

import random

import numpy as np
import torch

from .context import ParallelContext

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples of it are far apart
_WORD = 2**64


def separate_dp_ranks(seed: int, context: ParallelContext) -> None:
    """Seed torch with `seed` + dp rank, so that dropout differs between the data ranks and agrees within one.

    The ranks of a tensor group see the same data, so what loads and augments them draws alike, too: python's and
    numpy's generators are seeded where there is such a group. One process, and data ranks for those two, keep what the
    user seeded. Weights do not depend on any of it: they are made before, and broadcast.
    """
    if context.tp_size > 1:
        random.seed(seed + context.dp_rank)
        np.random.seed((seed + context.dp_rank) % 2**32)
    if context.dp_size > 1 or context.tp_size > 1:
        torch.manual_seed(seed + context.dp_rank)


class RandomFork:
    """Random numbers that differ between the ranks of a tensor group, while the common ones stay in step.

    Outside a fork torch's generator draws the same on all ranks of the group: what follows is dropped alike where
    activations are whole. Inside a fork it draws from a sequence of this rank's own, for activations that are divided.
    The fork is a function of the common generator's state, so that activation checkpointing, which restores that
    state, repeats it.

    Args:
        rank: this rank's place in the tensor group.
        device: whose generator is used.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._generator = torch.default_generator if device.type != "cuda" else _cuda_generator(device)
        self._on_cuda = device.type == "cuda"
        self._outside: torch.Tensor | int | None = None

    @property
    def is_open(self) -> bool:
        """Whether random numbers are this rank's own now."""
        return self._outside is not None

    def open(self) -> None:
        """Draw from a sequence of this rank's own. Does nothing within a fork."""
        if self._outside is not None:
            return
        generator = self._generator
        if self._on_cuda:  # the state is a seed and a counter, both known to the host
            self._outside, offset = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(_mixed(self._outside, self._rank))
            generator.set_offset(offset)
        else:
            drawn = int(torch.randint(2**62, (), generator=generator))
            self._outside = generator.get_state()
            generator.manual_seed(_mixed(drawn, self._rank))

    def close(self) -> None:
        """Draw in common again. Does nothing outside a fork."""
        if self._outside is None:
            return
        generator = self._generator
        if isinstance(self._outside, int):
            offset = generator.get_offset()  # all ranks have drawn as much
            generator.manual_seed(self._outside)
            generator.set_offset(offset)
        else:
            generator.set_state(self._outside)
        self._outside = None


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # there are no generators before
    return torch.cuda.default_generators[device.index if device.index is not None else torch.cuda.current_device()]


def _mixed(seed: int, rank: int) -> int:
    """A seed (64 bits) far from those of the other ranks and from `seed`."""
    return (seed + (rank + 1) * _GOLDEN) % _WORD
