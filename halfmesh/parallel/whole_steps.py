"""Steps whole parameters of which each rank holds a shard, for optimizers that work on a full matrix.

Each matrix has an owner among the ranks that hold its shards. For a step the shards of its gradient and weight are sent
to the owner, which holds the optimizer's state of the matrix and steps it; then the shards of the new weight are sent
back. Owners are balanced by bytes, and messages to all of them are one all-to-all. Where one rank holds all of a
parameter nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, optim

from ..utils.param_shard import ParamShard
from ..utils.torch_private import foreach_copy_
from .collectives import send_rows
from .comm import gather_objects
from .shard_spec import Box, Placement, narrow

_ROUND_BYTES = 64 * 2**20
"""The number of bytes of weights, for each rank, that are in flight at a time."""


@dataclass(eq=False)
class _Matrix:
    """A parameter that is stepped as a whole.

    Attributes:
        shard: this rank's shard.
        placement: the placement of `shard`.
        pieces: the boxes that this rank gets as the owner, by rank. Empty on other ranks.
        owner: the rank that steps it for this one. None: this rank holds nothing of it.
        is_sent: True if several ranks hold shards of it. Equal on all ranks.
        param: the whole parameter, during a step on its owner.
    """

    shard: ParamShard
    placement: Placement
    pieces: Mapping[int, Sequence[Box]] = field(default_factory=dict)
    owner: int | None = None
    is_sent: bool = False
    param: nn.Parameter | None = None

    def give(self, value: torch.Tensor, grad: torch.Tensor) -> None:
        """Make the whole `param`."""
        self.param = nn.Parameter(value)
        self.param.grad = grad


@dataclass(eq=False)
class WholeSteps:
    """Gives optimizers whole parameters during their step.

    Args:
        parts: the optimizers that need these; they hold `target(shard)` of shards.
        shards: every parameter of this rank.
        target: the tensor that an optimizer holds for a shard.
        placement: the region of the full parameter that a shard holds.
        group: the ranks over which parameters are sharded; None: this rank alone.
        device: where messages are sent from.
    """

    parts: Sequence[optim.Optimizer]
    shards: Sequence[ParamShard]
    target: Callable[[ParamShard], nn.Parameter]
    placement: Callable[[ParamShard], Placement]
    group: dist.ProcessGroup | None
    device: torch.device

    def __post_init__(self) -> None:
        self._ranks, self._rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        self._load = [0] * self._ranks  # elements that each rank steps
        self._matrices: dict[nn.Parameter, _Matrix] = {}
        self.plan()

    def owns(self, shard: ParamShard) -> bool | None:
        """True if this rank steps the whole parameter of `shard`, and holds its state; None: it is not stepped so."""
        matrix = self._matrices.get(self.target(shard))
        return None if matrix is None else matrix.owner == self._rank

    @contextmanager
    def scope(self) -> Iterator[None]:
        """The scope of a step: the optimizers hold whole parameters with their gradients, each on its owner; other
        ranks do not hold these, if something of the group is left then: else their shards, without a gradient. All
        ranks together, also after an error in it."""
        self.plan()
        given = [self._matrices[target] for target in self._held() if target.grad is not None]
        rounds = list(self._rounds([matrix for matrix in given if matrix.is_sent]))
        swaps = [(group, group["params"]) for part in self.parts for group in part.param_groups]
        views, wholes = {}, {}
        for some in rounds:
            self._gather(some)
        for matrix in given:
            target = self.target(matrix.shard)
            if matrix.owner == self._rank and not matrix.is_sent:
                (box,), grad = matrix.placement.regions, cast(torch.Tensor, target.grad)
                views[matrix] = box.view(target.detach())
                matrix.give(views[matrix], box.view(grad))
            target.grad = None
            wholes[target] = matrix.param
        for group, params in swaps:  # (an optimizer may look at the first one of a group, or expect a gradient of each)
            group["params"] = [p for p in (wholes.get(target, target) for target in params) if p is not None] or params
        swapped = {target: param for target, param in wholes.items() if param is not None}
        self._move_state(swapped)
        try:
            yield
        finally:
            for group, params in swaps:
                group["params"] = params
            self._move_state({param: target for target, param in swapped.items()})
            for some in rounds:
                self._scatter(some)
            for matrix, view in views.items():
                if matrix.param is not None and matrix.param.untyped_storage() is not view.untyped_storage():
                    view.copy_(matrix.param.detach())  # the optimizer sets `param.data`
            for matrix in given:
                matrix.param = None

    def _move_state(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for part in self.parts:
            for param, other in new.items():
                if param in part.state:
                    part.state[other] = part.state.pop(param)

    def _held(self) -> list[nn.Parameter]:
        return [param for part in self.parts for group in part.param_groups for param in group["params"]]

    # -- the plan ----------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Find an owner for each parameter in the groups that has none. All ranks together."""
        targets = [target for target in self._held() if target not in self._matrices]
        if not targets:
            return
        shard_of = {self.target(shard): shard for shard in self.shards}
        made = [_Matrix(shard_of[target], self.placement(shard_of[target])) for target in targets]
        own = {matrix.shard.name: matrix.placement.regions for matrix in made}
        by_rank = [own] if self.group is None else gather_objects(own, self.group)
        for matrix in sorted(made, key=lambda matrix: -math.prod(matrix.placement.shape)):  # the largest first
            self._assign(matrix, [regions.get(matrix.shard.name, ()) for regions in by_rank])
        self._matrices |= {self.target(matrix.shard): matrix for matrix in made}

    def _assign(self, matrix: _Matrix, regions: Sequence[Sequence[Box]]) -> None:
        """Set the owner of `matrix`, and its pieces there. Several ranks may hold the same shard: the first holders of
        each are one copy, which has an owner, the second ones another."""
        holders: dict[Any, list[int]] = {}
        for rank, boxes in enumerate(regions):
            if boxes:
                holders.setdefault(tuple((box.at, box.sizes) for box in boxes), []).append(rank)
        copies = list(zip(*holders.values(), strict=True))
        if not copies:
            return
        matrix.is_sent = sum(map(len, holders)) > 1  # also one rank's, if it has it in several boxes
        place = min(range(len(copies[0])), key=lambda n: self._load[copies[0][n]])
        for copy in copies:
            self._load[copy[place]] += math.prod(matrix.placement.shape)
            if self._rank in copy:
                matrix.owner = copy[place]
                matrix.pieces = {rank: regions[rank] for rank in copy} if matrix.owner == self._rank else {}

    # -- what is sent ------------------------------------------------------------------------------------------

    def _rounds(self, sent: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
        """`sent`, of which several ranks hold shards, in parts of one dtype and a limited size, equal on all
        ranks of the group."""
        some, size = list[_Matrix](), 0
        for matrix in sent:
            dtype = self.target(matrix.shard).dtype
            if some and (size > self._ranks * _ROUND_BYTES or self.target(some[0].shard).dtype != dtype):
                yield some
                some, size = [], 0
            some.append(matrix)
            size += math.prod(matrix.placement.shape) * dtype.itemsize
        if some:
            yield some

    def _gather(self, some: Sequence[_Matrix]) -> None:
        """Give the owners the whole of `some`."""
        own = [matrix for matrix in some if matrix.owner == self._rank]
        wholes = []
        for kind in (torch.Tensor.detach, lambda target: target.grad):
            shards = {matrix: kind(self.target(matrix.shard)) for matrix in some}
            first = shards[some[0]]
            made = {m: torch.empty(m.placement.shape, dtype=first.dtype, device=first.device) for m in own}
            self._send(first.dtype, self._views(some, shards), self._pieces(own, made))
            wholes.append(made)
        for matrix in own:
            matrix.give(wholes[0][matrix], wholes[1][matrix])

    def _scatter(self, some: Sequence[_Matrix]) -> None:
        """Send the shards of the new weights back."""
        made = {matrix: matrix.param.detach() for matrix in some if matrix.param is not None}
        shards = {matrix: self.target(matrix.shard).detach() for matrix in some}
        self._send(self.target(some[0].shard).dtype, self._pieces(list(made), made), self._views(some, shards))

    def _views(self, some: Sequence[_Matrix], shards: Mapping[_Matrix, torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each rank the boxes of this rank's `shards` whose owner it is."""
        views: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for matrix in some:
            if matrix.owner is not None:
                views[matrix.owner] += [box.view(shards[matrix]) for box in matrix.placement.regions]
        return views

    def _pieces(self, own: Sequence[_Matrix], made: Mapping[_Matrix, torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each rank the boxes that it holds of this rank's whole parameters."""
        return [
            [narrow(made[matrix], box.at, box.sizes) for matrix in own for box in matrix.pieces.get(rank, ())]
            for rank in range(self._ranks)
        ]

    def _send(
        self, dtype: torch.dtype, sent: Sequence[list[torch.Tensor]], received: Sequence[list[torch.Tensor]]
    ) -> None:
        """Copy the tensors `sent` to each rank into those `received` there, in order."""
        sizes = [[sum(tensor.numel() for tensor in each) for each in side] for side in (sent, received)]
        into = [tensor for each in received for tensor in each]
        out = [tensor.reshape(-1).to(self.device) for each in sent for tensor in each]
        flat = torch.cat([torch.empty(0, dtype=dtype, device=self.device), *out])
        found = flat if self.group is None else send_rows(flat, *sizes, self.group)
        parts = found.split([tensor.numel() for tensor in into])
        if into:
            foreach_copy_(into, [part.view(tensor.shape) for part, tensor in zip(parts, into, strict=True)])
