"""The device mesh of an engine: this rank's coordinates on its axes (pp, dp, tp), and collectives over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.env import RankNames
from ..errors import InputError
from ..utils.tensors import is_dense
from .comm import NamedCalls, broadcast_object, gather_objects, is_simulated, join_rows, own_store
from .dims import ParallelDims

if TYPE_CHECKING:
    from ..distributed.process_group import OwnedGroup


def splits_world() -> bool:
    """Return True if NCCL creates a group by splitting the communicator of all ranks, which all ranks must wait for.
    Then one split creates all groups of an axis. Groups created one by one would need one split each."""
    world: Any = dist.group.WORLD
    return dist.get_backend() == "nccl" and world.bound_device_id is not None


class ParallelContext:
    """The layout of one engine, as `engine.context`: this rank's place in the mesh, its groups, and collectives.

    The sizes of the axes multiply to the world size: pp * dp * tp, with any other axes between dp and tp. The last axis
    changes fastest, so neighboring ranks form a tensor group. halfmesh keeps no global context, so one process may hold
    several. A single process needs no process group.

    Args:
        dims: the axes and their sizes. They must have as many ranks as the process group.
        device: this rank's device.
        group: the process group, if halfmesh created it. The last context that closes destroys it.
        timeout: the time limit of a collective within an axis, in seconds.

    Attributes:
        dims: the layout, with the sub-axes that `split` added.
        size: the number of ranks (the world size).
        rank: this rank's number.
        sizes: the sizes of the axes by name, outermost first.
        pp_size: the size of the pipeline axis.
        dp_size: the size of the data axis.
        tp_size: the size of the tensor axis.
        last_stage: the coordinate of the last stage on the pipeline axis.
    """

    def __init__(
        self, dims: ParallelDims, device: torch.device, group: OwnedGroup | None = None, timeout: float = 600.0
    ) -> None:
        self.dims = dims
        self.device = device
        self.size = dims.world_size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pp_size, self.dp_size, self.tp_size = dims.pp, dims.dp, dims.tp
        self.last_stage = dims.pp - 1
        self.sizes: Mapping[str, int] = dims.sizes
        self._group = group
        self._timeout = timedelta(seconds=timeout)
        self._rows: dict[tuple[str, ...], list[int]] = {}
        self._groups: dict[Any, tuple[str, Any]] = {}  # with their axes in words
        self._calls: NamedCalls | None = None

    def split(self, axis: str, sizes: Mapping[str, int]) -> None:
        """Add sub-axes to `axis`: dp=8 can also be seen as {"edp": 2, "ep": 4}, of which the last changes fastest.

        A sub-axis has a size, a coordinate and a group, like an axis. Call this on all ranks together. A repeated split
        does nothing.

        Raises:
            InputError: the product of the sizes is not the size of the axis.
        """
        self.dims = self.dims.split(axis, sizes)

    def coordinate(self, *axes: str) -> int:
        """Return this rank's coordinate on an axis; for several axes, its place among the ranks of `group(*axes)`."""
        return self._row(axes).index(self.rank)

    def size_of(self, *axes: str) -> int:
        """Return the size of an axis. For several axes: the number of ranks of `group(*axes)`."""
        return len(self._row(axes))

    def _row(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks of `group(*axes)`."""
        if axes not in self._rows:
            self._rows[axes] = self.dims.row(self.rank, *axes)
        return self._rows[axes]

    @property
    def rank_names(self) -> RankNames:
        """The names of the ranks, for messages."""
        return self.dims.rank_names

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.coordinate("pp")

    @property
    def is_last_stage(self) -> bool:
        """True if this rank holds the last pipeline stage, which computes outputs and losses. True if pp is 1."""
        return self.pp_rank == self.last_stage

    @property
    def counts_outputs(self) -> bool:
        """True if this rank counts outputs and losses for its data rank: it holds the last stage, and it is the first
        of the ranks that computed the same values."""
        return self.is_last_stage and self.coordinate(*(axis for axis in self.sizes if axis not in ("pp", "dp"))) == 0

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
        """The `DeviceMesh` with the axes of `sizes`. It is created on first use: read it on all ranks together.

        Raises:
            InputError: the run has one process.
        """
        if self.size == 1:
            raise InputError("one process has no DeviceMesh; start several, with torchrun")
        groups = [self.group(axis) for axis in self.sizes]
        ranks = torch.arange(self.size).view(*self.sizes.values())
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(self.sizes))

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The process group of the data axis: the same weights, different data."""
        return self.group("dp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The process group of the tensor axis: shards of the same layers, the same data."""
        return self.group("tp")

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this rank only in their coordinates on `axes`.

        Its ranks are in the order of the mesh. It is created on first use: call this on all ranks together. Axes with
        the same ranks share one group.
        """
        words = " x ".join([axis for axis in axes if self.size_of(axis) > 1] or axes)
        if self.size_of(*axes) == self.size:
            return self._made("world", words, lambda: dist.group.WORLD)
        return self._made(tuple(self._row(axes)), words, lambda: self._new_groups(self.dims.rows(*axes)))

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks of this rank's pipeline stage. They hold the same parameters, or shards of them."""
        return self._row(tuple(axis for axis in self.sizes if axis != "pp"))

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """A gloo group of the `stage_ranks`, created on first use by all ranks together. None in one process."""
        if self.size == 1:
            return None
        # With an NCCL world that is bound to a device, torch lets each rank that is not in a new gloo group take part
        # in a split of NCCL's (`perform_nocolor_split`), and the others not. That ends only because the stages are all
        # ranks, in rows of equal size: each rank is left out equally often. One group of some ranks would hang.
        rows = self.dims.rows(*(axis for axis in self.sizes if axis != "pp"))
        return self._made("stage", "stage", lambda: self._new_groups(rows, "fake" if is_simulated() else "gloo"))

    @property
    def groups(self) -> dict[str, str]:
        """The axes ("dp", "dp x cp") of each group created so far, by the group's name."""
        return {group.group_name: words for words, group in self._groups.values() if group is not None}

    @property
    def communicators(self) -> tuple[str, ...]:
        """The axes of each NCCL communicator on this rank: "world", which is created first, and those of the groups
        created so far."""
        made = [words for key, (words, group) in self._groups.items() if group and key not in ("world", "stage")]
        return ("world", *made) if self.size > 1 else ()

    def subgroup(self, places: Sequence[int], *axes: str) -> dist.ProcessGroup | None:
        """Return a separate group of the ranks of `group(*axes)` at the coordinates `places`, or None if this rank is
        not one of them. Call it on all ranks."""
        rows = [[row[place] for place in places] for row in self.dims.rows(*axes)]
        return self._made((axes, *places), " x ".join(axes), lambda: self._new_groups(rows))

    def _new_groups(self, rows: list[list[int]], backend: str | None = None) -> Any:
        """Groups of these ranks; returns the one of this rank, or None. All ranks together."""
        # Not init_device_mesh: its groups have torch's time limits, not the configured one. NCCL's `split_share`, which
        # would save the buffers of each group, stays off: communicators that share them run one after the other, in the
        # order in which a rank starts them. Sums over dp would not overlap sends and sums over tp any more, ranks that
        # start them in other orders would wait for each other, and an aborted group may take the others with it.
        if backend is None and splits_world():
            rest = sorted({*range(self.size)}.difference(*rows))  # torch names groups by how many a rank has made
            made = dist.split_group(split_ranks=[*rows, rest] if rest else rows, timeout=self._timeout)
            return None if self.rank in rest else made
        return dist.new_subgroups_by_enumeration(rows, self._timeout, backend)[0]

    def _made(self, key: Any, words: str, make: Callable[[], Any]) -> Any:
        """The group of that key, created on first use; `words`: its name in `groups`."""
        if key not in self._groups:
            self._groups[key] = words, make()
        return self._groups[key][1]

    def all_reduce(
        self, tensor: torch.Tensor, axis: str | Sequence[str] | None = None, op: Literal["sum", "mean"] = "sum"
    ) -> torch.Tensor:
        """Sum `tensor` in place over all ranks of the engine, or over the ranks of some axes, without gradients.

        Args:
            tensor: a tensor on this rank's device.
            axis: "dp", "tp" or "pp"; several axes as ("dp", "cp"); None for all ranks. Use "dp" for counts that each
                data rank made in its own batches, because the ranks of a tensor group see the same batches.
            op: "sum", or "mean", which divides the sum by the number of these ranks.

        Returns:
            The same `tensor`.

        Raises:
            InputError: `op` is neither "sum" nor "mean".
        """
        size, group = self._over(axis)
        if op not in ("sum", "mean"):
            raise InputError(f"op={op!r}: all_reduce gives the 'sum' or the 'mean'")
        if size > 1:
            dist.all_reduce(tensor, group=group)
            if op == "mean":
                tensor.detach().div_(size)
        return tensor

    def gather(self, tensor: torch.Tensor, axis: str | Sequence[str] | None = None) -> torch.Tensor:
        """Concatenate the tensors of all ranks of the engine, or of the ranks of some axes, without gradients.

        The tensors are joined along dim 0 in the order of the ranks. The call waits for the device.

        Args:
            tensor: [rows, ...]. The number of rows may differ between ranks. A 0-dim tensor is one row.
            axis: as in `all_reduce`. Use "dp" for the predictions of each data rank's own batches.

        Raises:
            InputError: dtypes, or shapes beyond dim 0, differ between the ranks. All ranks raise it.
        """
        size, group = self._over(axis)
        rows = tensor.detach().reshape(-1, *tensor.shape[1:])
        return rows if size == 1 else join_rows(rows, group)

    def _over(self, axis: str | Sequence[str] | None) -> tuple[int, dist.ProcessGroup | None]:
        """The number of ranks of these axes and their group; None: all ranks."""
        if axis is None:
            return self.size, None
        axes = (axis,) if isinstance(axis, str) else axis
        size = self.size_of(*axes)
        return size, self.group(*axes) if size > 1 else None

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, axis: str | None = None, place: int = 0) -> None:
        """Overwrite `tensor` with the tensor of rank 0, or of the rank at coordinate `place` of `axis`.

        The tensor may have any device, dtype and strides.
        """
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
        """Return rank 0's `value` on all ranks."""
        return broadcast_object(value, 0, self.device) if self.size > 1 else value

    def begin_calls(self, owner: OwnedGroup | None) -> None:
        """Make `agree_on_call` compare the calls of the ranks from now on. Call it on all ranks together.

        Args:
            owner: the owner of the process group, which knows the ranks that have ended.
        """
        if self.size > 1 and not is_simulated():  # a dry run has one process
            (store,) = own_store(self)
            told = dict if owner is None else owner.failures.told
            self._calls = NamedCalls(store, self.rank, self.size, self._timeout.total_seconds(), told)

    def agree_on_call(self, call: str) -> None:
        """Return when all ranks make this `call` ("engine.save"). Raise InputError if they do not."""
        if self._calls is not None:
            self._calls.agree_on(call)

    def everyone(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks, on all ranks."""
        return gather_objects(value)

    def leave(self) -> None:
        """Stop using this context, but keep its groups, which may still report an error."""
        if self._group is not None:
            self._group.leave(self)

    def close(self) -> None:
        """Destroy the groups that this context created, and the process group if no other context needs it."""
        self.__dict__.pop("mesh", None)
        groups, self._groups = self._groups, {}
        if not dist.is_initialized():
            return
        for _, group in groups.values():
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        if self._group is not None:
            self._group.close(self)
            self._group = None
