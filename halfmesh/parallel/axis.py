"""The contract of a mesh axis that shards the model: its config keys, its plan, and its effect on a model.

`tensor` and `pipeline` implement it; packages register others in AXES. The data axis has a `DataStrategy` instead.
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
    """The inputs of a plan: the user's objects, which must not be changed, and the axis's keys."""

    model: nn.Module
    optimizer: optim.Optimizer
    criterion: Any
    dataloader: Any
    options: Any


@dataclass(frozen=True)
class AxisInputs:
    """The inputs of `Axis.apply`.

    Attributes:
        model: equal on all ranks, or already sharded over other axes; it may not be on the device yet.
        optimizer: over its parameters.
        plan: the result of `Axis.plan`.
        context: the mesh.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    plan: Any
    context: ParallelContext


class AppliedAxis:
    """A model that was sharded over an axis, in place. The defaults fit ranks that compute one batch together and hold
    equal parameters.

    Attributes:
        dim: the name of the axis in the mesh.
        splits: the parameters of which this rank holds a shard, and how they were split.
        ties: parameters that other ranks of the axis hold too, where each rank holds only some modules.
        first_names: for each name in the full model the first name of the same tensor, tied ones have several;
            None: this rank has all modules.
        same: compares inputs and outputs over the ranks of the axis; None if they do not compute the same.
    """

    is_divided_by_engine = True
    """`initialize` recognises a sharded model by it: one of the model's hooks is a method of this object, or a module
    has this attribute."""
    ties: Collection[nn.Parameter] = ()
    first_names: dict[str, str] | None = None

    def __init__(self, context: ParallelContext, dim: str, compared_as: str | None = None) -> None:
        """`compared_as`: the name of the axis's ranks in messages, if they compute the same."""
        self.dim, self.size, self.rank = dim, context.size_of(dim), context.coordinate(dim)
        self.splits: dict[nn.Parameter, Split] = {}
        self.same = None if compared_as is None else SameCalls(context.group(dim), compared_as)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copy of the model, such as an average of its weights, is sharded in the same way

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a sharded model cannot be pickled; save engine.state_dict(), or engine.full_state_dict() for the whole "
            "model"
        )

    # -- for `apply` -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def split(self, optimizer: optim.Optimizer, param: nn.Parameter, split: Split) -> None:
        """Keep only this rank's shard of a parameter, and of its optimizer state of the same shape."""
        self.splits[param] = split
        cut = self.cut(split)
        change_state(optimizer, param, cut)
        param.data, param.grad = cut(param.data), None

    def take_whole_states(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Add hooks that also accept state dicts with full tensors: each rank loads its shard."""
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
        """The number of ranks of the axis that hold the same elements of `param`: norms count each element once. On a
        view of the data ranks, all of which are counted already, 1 / size for shards."""
        return 1 if param in self.splits else self.size

    def cut(self, split: Split) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from a full tensor to this rank's shard."""
        return partial(split.cut, rank=self.rank, size=self.size)

    def make_reduction(self, shards: Sequence[ParamShard]) -> Reduction | None:
        """The reduction that `shards` need over the axis; None: their gradients are complete. All ranks together."""
        return None

    def settle(self) -> None:
        """Reset before a forward, and after it: a forward or backward may have failed."""

    def explain(self, error: RuntimeError) -> None:
        """Raise InputError if an `error` of forward or backward is due to something that this axis does not support."""

    def skip_trial(self) -> None:
        """Compare nothing with the model as it was: tensors have no values (in a dry run)."""

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> Mapping[str, str]:
        """Rows of the effective plan. "layout" describes what this rank holds.

        Args:
            params: this rank's parameters by name, sharded over the axes.
            sizes: the number of elements of each after sharding over the data ranks.
            options: the axis's keys.
        """
        return {}


_Take = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


def shard_loaded_state(
    takes: Mapping[str, _Take], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """A hook before a state dict is loaded into a module with sharded parameters: for each name in `takes`, a function
    of the parameter and the tensor in the state dict returns the tensor to load."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for name, take in takes.items():
        value = state.get(prefix + name)
        if value is not None and assigns(metadata):
            raise InputError(
                f"load_state_dict(..., assign=True) would replace {prefix + name}, which is sharded; load without "
                "assign, or load before initialize"
            )
        if isinstance(value, torch.Tensor):
            state[prefix + name] = take(own[name], value)


class Axis:
    """An axis of the mesh, registered under its key in `parallel`, which is also its column in the composition table:

        @AXES.register("wide")
        class Wide(Axis): ...

    Everything except `apply` works before anything is changed, and in one process.

    Attributes:
        dim: its short name in the mesh, unique among axes.
        options: its keys; `size` is one of them, and 1 by default.
        modes: the AMP modes that it works with, besides those that name it in their `composes`.
        splits_params: a rank may hold a shard of a parameter; optimizers that need whole ones get these.
        same_rng: its ranks compute the same, with the same random numbers.
        replica_dim: if set, the axis is a view of the data ranks, of `replica_dim` x `dim` of them: each has rows of
            its own, and the ranks of `replica_dim` hold the same shards.
        splits_loss: its ranks have parts of one batch, and each computes the loss of its part: gradients are averaged
            over them as over data ranks, and data strategies shard over them, too.
        splits_modules: a rank has only some modules. Such an axis is outermost in the mesh and is applied last.
        splits_batch: the key, besides `size`, for the number of microbatches into which the axis splits a data rank's
            batch; "" if it does not.
        cost: for `halfmesh plan`: the communication that ranks wait for, in a few words.
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
        """Sizes above 1 that `halfmesh plan` may try on `ranks` ranks, `node` of them in a machine, smallest first.

        The default keeps the ranks of the axis within a machine.
        """
        common = math.gcd(ranks, node)
        yield from (size for size in range(2, common + 1) if common % size == 0)

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        """Keys, dotted, and their problems in a `halfmesh.Config` whose size of this axis is larger than 1."""
        yield from ()

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Any, list[str]]:
        """The plan that shards the model, and all problems."""
        return None, []

    @staticmethod
    def apply(inputs: AxisInputs) -> AppliedAxis:
        """Shard the model in place. Parameters stay the same objects, with this rank's shard as their data."""
        raise NotImplementedError
