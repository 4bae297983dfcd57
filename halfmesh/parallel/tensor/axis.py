"""The tensor axis as the divided layers see it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..._torch import edit_stamp, in_shapes_only
from ...errors import InputError
from ..rng import CommonRandom, RandomFork
from . import collectives


class TensorAxis:
    """The ranks that hold the parts of one layer: how to reach them, and how random numbers part and meet again.

    One for each engine; all of its divided layers share it, copies of them too.

    Attributes:
        group: the ranks, `size` of them, of which this is number `rank`.
        device: this rank's.
        common: the random numbers of the model's forward.
        fork: differing ones, open where activations are divided.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, common: CommonRandom | None = None) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.size = group.size()
        self.common = common or CommonRandom(0, device)
        self.fork = RandomFork(self.rank, device)
        self._copied: tuple[Any, ...] | None = None

    @torch.compiler.disable
    def copy_in(self, x: torch.Tensor) -> torch.Tensor:
        """`x` for layers that each give part of its gradient. Those that share an input (q, k, v) share the sum."""
        if not (x.requires_grad and torch.is_grad_enabled()) or in_shapes_only():
            return x
        stamp = edit_stamp(x)
        if self._copied is None or self._copied[0] is not x or self._copied[1] != stamp:
            self._copied = x, stamp, collectives.copy_in(x, self.group)
        return self._copied[2]

    @torch.compiler.disable
    def settle(self, *_: Any) -> None:
        """A divided computation ends: random numbers are in common again, and its input is forgotten.

        Takes what a forward hook is given.
        """
        self.fork.close()
        self._copied = None

    def gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks, in order of rank. Without gradients."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return parts

    def __deepcopy__(self, memo: Any) -> TensorAxis:
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a model that is divided over a tensor group cannot be pickled; save engine.state_dict(), or call "
            "engine.close(restore=True) first, which gives the whole model back"
        )
