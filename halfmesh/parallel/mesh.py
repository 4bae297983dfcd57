"""One mesh: this rank's coordinates on its axes (pp, dp, tp), and the collectives over its ranks."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.env import RankNames
from ..errors import InputError, did_you_mean
from ..utils.tensors import is_dense
from .comm import NamedCalls, broadcast_object, gather_objects, host_backend, is_simulated, join_rows
from .dims import ParallelDims

if TYPE_CHECKING:
    from ..distributed.process_group import OwnedGroup


class ParallelContext:
    """The layout of one engine: pp * dp * tp == world size, tp fastest. Other packages' axes lie between dp and tp.

    It is passed explicitly; there is no global one, and two of them may exist in one process. A world of one rank
    needs no process group. Implements `halfmesh.utils.param_shard.Ranks` over all of its ranks.

    Args:
        dims: the axes and their sizes, of as many ranks as the process group has.
        device: this rank's device.
        group: the process group, if it was created for this context or another one; the last `close` destroys it.
        timeout: seconds that a collective within an axis may take.

    Attributes:
        sizes: of the axes, by their names, outermost first.
        last_stage: the coordinate on the pipeline axis that has the last stage.
    """

    def __init__(
        self,
        dims: ParallelDims,
        device: torch.device,
        group: OwnedGroup | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.dims = dims
        self.device = device
        self.size = dims.world_size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pp_size, self.dp_size, self.tp_size = dims.pp, dims.dp, dims.tp
        self.last_stage = dims.pp - 1
        self.sizes: Mapping[str, int] = dims.sizes
        self._places = dims.coordinates(self.rank)
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self._axis_groups: dict[str, Any] = {}
        self._calls: NamedCalls | None = None

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate on `axis`."""
        return self._places[axis]

    @property
    def rank_names(self) -> RankNames:
        """The names of ranks in messages."""
        return self.dims.rank_names

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.coordinate("pp")

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last stage of the pipeline, where outputs and losses are computed."""
        return self.pp_rank == self.last_stage

    @property
    def counts_outputs(self) -> bool:
        """True if this rank counts outputs and losses for its data rank: it has the last stage, and is the first of the
        ranks that computed the same."""
        return self.is_last_stage and all(n == 0 for axis, n in self._places.items() if axis not in ("pp", "dp"))

    @property
    def dp_rank(self) -> int:
        """This rank's coordinate on the data axis."""
        return self.coordinate("dp")

    @property
    def tp_rank(self) -> int:
        """This rank's coordinate on the tensor axis."""
        return self.coordinate("tp")

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh with the axes of `sizes`. Created on first use, by all ranks together."""
        if self.size == 1:
            raise InputError("one process has no DeviceMesh; start several with torchrun --nproc-per-node N")
        groups = [self.group(axis) for axis in self.sizes]
        return DeviceMesh.from_group(groups, self.device.type, mesh=self._grid, mesh_dim_names=tuple(self.sizes))

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same weights and see different data."""
        return self.group("dp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards of one layer and see the same data."""
        return self.group("tp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in their coordinate on `axis` only. Created on first use, by all ranks
        together."""
        return self._made(axis, lambda: self._make_group(axis))

    def gloo_group(self, use: str) -> dist.ProcessGroup | None:
        """All ranks, over gloo; one for each `use`, because messages of two threads must not mix. Created on first use,
        by all ranks together; None in a world of one rank."""
        if self.size == 1:
            return None
        return self._made(use, lambda: dist.new_group(backend=host_backend(), timeout=self._timeout))

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks of this rank's pipeline stage, which hold the same parameters, or shards of them."""
        size = self.size // self.pp_size
        return list(range(self.pp_rank * size, (self.pp_rank + 1) * size))

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The `stage_ranks`, over gloo. Created on first use, by all ranks together."""
        if self.pp_size == 1:
            return self.gloo_group("host")
        return self._made("stage", lambda: self._new_groups(self._grid.flatten(1).tolist(), host_backend()))

    @property
    def groups(self) -> dict[str, str]:
        """The axis of each group that was created so far, by the group's name."""
        return {
            group.group_name: key.partition("(")[0] for key, group in self._axis_groups.items() if group is not None
        }

    @property
    def _grid(self) -> torch.Tensor:
        """All ranks, by their coordinates on the axes."""
        return torch.arange(self.size).view(*self.sizes.values())

    def subgroup(self, axis: str, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The ranks of `group(axis)` at the coordinates `places`; None if this rank is not among them. All ranks."""
        return self._made(f"{axis}{tuple(places)}", lambda: self._make_group(axis, places))

    def _make_group(self, axis: str, places: Sequence[int] | None = None) -> Any:
        if self.sizes[axis] == self.size and places is None:
            return dist.group.WORLD
        rows = self._grid.movedim(list(self.sizes).index(axis), -1).flatten(0, -2).tolist()
        places = range(self.sizes[axis]) if places is None else places
        return self._new_groups([[ranks[place] for place in places] for ranks in rows])

    def _new_groups(self, ranks: list[list[int]], backend: str | None = None) -> Any:
        """Groups of these ranks; returns the one of this rank, or None. All ranks together."""
        # Not init_device_mesh: its groups have torch's time limits, not the configured one.
        return dist.new_subgroups_by_enumeration(ranks, self._timeout, backend)[0]

    def _made(self, key: str, make: Callable[[], Any]) -> Any:
        """The group of that key, created on first use."""
        if key not in self._axis_groups:
            self._axis_groups[key] = make()
        return self._axis_groups[key]

    def all_reduce(
        self, tensor: torch.Tensor, axis: str | None = None, op: Literal["sum", "mean"] = "sum"
    ) -> torch.Tensor:
        """Sum `tensor` over all ranks of the engine, or over those of one axis; in place, without gradients.

        Args:
            axis: "dp" for counts that each data rank made in its own batches (the ranks of a tensor group see the same
                batches), "tp" or "pp"; None for all ranks.
            op: "mean" divides the sum by the number of these ranks.

        Returns:
            `tensor`.
        """
        size = self._size_of(axis)
        if op not in ("sum", "mean"):
            raise InputError(f"op={op!r}: all_reduce gives the 'sum' or the 'mean'")
        if size > 1:
            dist.all_reduce(tensor, group=None if axis is None else self.group(axis))
            if op == "mean":
                tensor.detach().div_(size)
        return tensor

    def gather(self, tensor: torch.Tensor, axis: str | None = None) -> torch.Tensor:
        """The tensors of all ranks of the engine, or of those of one axis, joined along dim 0 in order of rank; without
        gradients. It reads shapes on the host, and waits for the device.

        Args:
            tensor: [rows, ...], of which ranks may have different numbers; a 0-dim tensor is one row.
            axis: as of `all_reduce`; "dp" for predictions of each data rank's own batches.

        Raises:
            InputError: dtypes, or shapes beyond dim 0, differ between the ranks; raised on all of them.
        """
        rows = tensor.detach().reshape(-1, *tensor.shape[1:])
        return rows if self._size_of(axis) == 1 else join_rows(rows, None if axis is None else self.group(axis))

    def _size_of(self, axis: str | None) -> int:
        """The number of ranks of an axis; None: of all ranks."""
        if axis is not None and axis not in self.sizes:
            axes = tuple(self.sizes)
            raise InputError(f"axis={axis!r} is not an axis of the mesh{did_you_mean(str(axis), axes)}: {axes}")
        return self.size if axis is None else self.sizes[axis]

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, axis: str | None = None, place: int = 0) -> None:
        """Overwrite `tensor` (any device, dtype, strides) with that of rank 0, or of the rank `place` of `axis`."""
        if self.size > 1:
            group = None if axis is None else self.group(axis)
            # As bytes: not every backend has every dtype. Flat: a 0-dim tensor has no bytes to view.
            source = tensor.detach().to(self.device).contiguous()
            if source.numel():
                dist.broadcast(source.reshape(-1).view(torch.uint8), group_src=place, group=group)
            if source.data_ptr() != tensor.data_ptr():
                if is_dense(tensor):
                    tensor.copy_(source)
                else:  # several elements may share memory (expand), which cannot be written
                    tensor.data = source.to(tensor.device)

    def from_first(self, value: Any) -> Any:
        """Rank 0's `value`, on all ranks."""
        return broadcast_object(value, 0, self.device) if self.size > 1 else value

    def begin_calls(self, owner: OwnedGroup | None) -> None:
        """Make `agree_on_call` compare the calls of the ranks from now on. All ranks together.

        Args:
            owner: of the process group; knows which ranks have ended.
        """
        if self.size > 1 and not is_simulated():  # a dry run has one process
            name = self.from_first(uuid.uuid4().hex)  # torchrun's store outlives a group
            told = dict if owner is None else owner.failures.told
            world: Any = dist.group.WORLD
            store = dist.PrefixStore(f"halfmesh/calls/{name}", world.get_group_store().clone())
            self._calls = NamedCalls(store, self.rank, self.size, self._timeout.total_seconds(), told)

    def agree_on_call(self, call: str) -> None:
        """Return when all ranks make this `call` ("engine.save"). Raises InputError if they do not."""
        if self._calls is not None:
            self._calls.agree_on(call)

    def everyone(self, value: Any) -> list[Any]:
        """The `value` of each rank, by rank, on all ranks."""
        return gather_objects(value)

    def leave(self) -> None:
        """Stop using this context but keep its groups, which may still report an error."""
        if self._group is not None:
            self._group.leave(self)

    def close(self) -> None:
        """Free the groups that this context created, and the process group if no other context needs it."""
        self.__dict__.pop("mesh", None)
        groups, self._axis_groups = self._axis_groups, {}
        if not dist.is_initialized():
            return
        for group in groups.values():
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        if self._group is not None:
            self._group.close(self)
            self._group = None
