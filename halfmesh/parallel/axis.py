"""The base classes of a mesh axis that shards the model: its config keys, its plan, and its effect on a model.

`tensor`, `pipeline`, `context` and `expert` implement them, and packages can register others in `AXES`. The data axis
has a `DataStrategy` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import nn, optim

from ..errors import InputError
from ..utils.optimizer_state import change_state, reject_other_state
from ..utils.param_shard import ParamShard
from ..utils.torch_private import assigns
from .comm import SameCalls
from .mesh import ParallelContext
from .shard_spec import Split

if TYPE_CHECKING:
    from ..options import Options
    from .reducer import Reduction


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of `Axis.plan`: the user's objects, which it must not change, and the axis's keys.

    Attributes:
        model: the full model.
        optimizer: the optimizer over its parameters.
        criterion: the criterion, or None.
        dataloader: the training dataloader, or None.
        options: the axis's keys, an instance of `Axis.options`.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    criterion: Any
    dataloader: Any
    options: Any


@dataclass(frozen=True)
class AxisInputs:
    """The inputs of `Axis.apply`.

    Attributes:
        model: the model, equal on all ranks or already sharded over other axes. It may not be on the device yet.
        optimizer: the optimizer over its parameters.
        plan: the result of `Axis.plan`.
        context: the layout.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    plan: Any
    context: ParallelContext


class AppliedAxis:
    """A model after it was sharded over an axis, in place. The defaults fit an axis whose ranks compute one batch
    together and hold equal parameters.

    Attributes:
        dim: the name of the axis in the mesh.
        size: the number of ranks of the axis.
        rank: this rank's coordinate on the axis.
        splits: the parameters of which this rank holds a shard, and how they were split.
        ties: the parameters that other ranks of the axis also hold, if each rank holds only some modules.
        first_names: for each name in the full model, the first name of the same tensor (tied tensors have several).
            None: this rank has all modules.
        same: compares inputs and outputs over the ranks of the axis. None if these ranks compute different things.
    """

    is_divided_by_engine = True
    """`initialize` recognizes a sharded model by this attribute: one of the model's hooks is a method of this object,
    or a module has the attribute."""
    ties: Collection[nn.Parameter] = ()
    first_names: dict[str, str] | None = None

    def __init__(self, context: ParallelContext, dim: str, compared_as: str | None = None) -> None:
        """Begin with nothing sharded.

        Args:
            context: the layout.
            dim: the name of the axis in the mesh.
            compared_as: the name of the axis's ranks in messages, if they compute the same values; else None.
        """
        self.dim, self.size, self.rank = dim, context.size_of(dim), context.coordinate(dim)
        self.splits: dict[nn.Parameter, Split] = {}
        self.same = None if compared_as is None else SameCalls(context.group(dim), compared_as)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copy of the model, such as an average of its weights, is sharded in the same way

    def __reduce__(self) -> NoReturn:
        raise InputError("a sharded model cannot be pickled; save engine.state_dict(), or engine.full_state_dict()")

    # -- for `apply` -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def split(self, optimizer: optim.Optimizer, param: nn.Parameter, split: Split) -> None:
        """Keep only this rank's shard of a parameter, and of its optimizer state that has the same shape."""
        self.splits[param] = split
        cut = self.cut(split)
        change_state(optimizer, param, cut)
        param.data, param.grad = cut(param.data), None

    def take_whole_states(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Add hooks that accept state dicts with full tensors: each rank loads its shard."""
        optimizer.register_load_state_dict_post_hook(reject_other_state)
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            takes = {n: partial(self._take_part, self.splits[p]) for n, p in own.items() if p in self.splits}
            if takes:
                module.register_load_state_dict_pre_hook(partial(shard_loaded_state, takes))

    def _take_part(self, split: Split, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        is_whole = value.shape == split.whole_shape(param.shape, self.size)
        return split.cut(value, self.rank, self.size) if is_whole else value

    # -- for the engine ----------------------------------------------------------------------------------------

    def replicas(self, param: nn.Parameter) -> float:
        """Return the number of ranks of the axis that hold the same elements of `param`, so that norms count each
        element once. An axis that is a view of the data ranks, which are counted already, returns 1 / size for shards.
        """
        return 1 if param in self.splits else self.size

    def cut(self, split: Split) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that cuts this rank's shard out of a full tensor."""
        return partial(split.cut, rank=self.rank, size=self.size)

    def make_reduction(self, shards: Sequence[ParamShard]) -> Reduction | None:
        """Return the reduction of `shards` over the axis. None: their gradients are complete. Called on all ranks."""
        return None

    def settle(self) -> None:
        """Reset before and after a forward, because an earlier forward or backward may have failed."""

    def explain(self, error: RuntimeError) -> None:
        """Raise InputError if an `error` of forward or backward comes from something that the axis cannot support."""

    def skip_trial(self) -> None:
        """Skip the comparison with the unsharded model. Called in a dry run, where tensors have no values."""

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> Mapping[str, str]:
        """Return rows of the effective plan, by name. The row "layout" describes the parameters of this rank.

        Args:
            params: this rank's parameters by name, sharded over the axes.
            sizes: the number of elements of each parameter after sharding over the data ranks.
            options: the axis's keys.
        """
        return {}


_Take = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


def shard_loaded_state(
    takes: Mapping[str, _Take], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """A hook that runs before a state dict is loaded into a module with sharded parameters. For each name in `takes`, a
    function of the parameter and the tensor in the state dict returns the tensor to load."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, take in takes.items():
        value = state.get(prefix + name)
        if value is not None and assigns(metadata):
            raise InputError(f"load_state_dict: assign=True would replace {prefix + name}, which is sharded; remove it")
        if isinstance(value, torch.Tensor):
            state[prefix + name] = take(own[name], value)


class Axis:
    """The base class of mesh axes. Register a subclass under its key in the config's `parallel`:

        @AXES.register("wide")
        class Wide(Axis): ...

    All methods except `apply` run before halfmesh changes anything, and work in one process.

    Attributes:
        dim: the axis's short name in the mesh ("tp"), unique among axes.
        options: the class of the axis's keys. It must have a key `size`, 1 by default.
        modes: the AMP modes that the axis works with, in addition to modes that name it in their `composes`.
        splits_params: True if a rank may hold a shard of a parameter. Optimizers that work on whole matrices then get
            whole ones.
        same_rng: True if the ranks of the axis compute the same values, with the same random numbers.
        replica_dim: if set, the axis is a view of the data ranks, as `replica_dim` x `dim`. Each of these ranks has its
            own rows of the batch, and the ranks of `replica_dim` hold the same shards.
        splits_loss: True if each rank computes the loss of its part of one batch. Gradients are then averaged over
            these ranks as over data ranks, and data strategies also shard over them.
        splits_modules: True if a rank has only some modules. Such an axis is outermost in the mesh and applied last.
        splits_batch: the key for the number of microbatches into which the axis splits a data rank's batch, or "".
        cost: the communication that ranks wait for, in a few words, for `halfmesh plan`.
    """

    dim: ClassVar[str]
    options: ClassVar[type[Options]]
    modes: ClassVar[Collection[str]] = ()
    splits_params: ClassVar[bool] = True
    same_rng: ClassVar[bool] = True
    replica_dim: ClassVar[str] = ""
    splits_loss: ClassVar[bool] = False
    splits_modules: ClassVar[bool] = False
    splits_batch: ClassVar[str] = ""
    cost: ClassVar[str] = ""

    @staticmethod
    def sizes_to_try(ranks: int, node: int) -> Iterator[int]:
        """Yield the sizes above 1 that `halfmesh plan` may try on `ranks` ranks, `node` per machine, smallest first.

        The default keeps the ranks of the axis within a machine.
        """
        yield from (size for size in range(2, node + 1) if math.gcd(ranks, node) % size == 0)

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        """Yield dotted keys and their problems in a `halfmesh.Config` with a size of this axis above 1."""
        yield from ()

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Any, list[str]]:
        """Return the plan for sharding the model, which `apply` gets, and all problems. Change nothing."""
        return None, []

    @staticmethod
    def apply(inputs: AxisInputs) -> AppliedAxis:
        """Shard the model in place. Parameters must stay the same objects, with this rank's shard as their data."""
        raise NotImplementedError
