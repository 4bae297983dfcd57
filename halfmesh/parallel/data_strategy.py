"""The contract of a data strategy: what each data rank holds of a model, and how gradients and weights are exchanged.

`replicate`, `zero1` and `fsdp` implement it; packages register others in DATA_STRATEGIES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn, optim

from ..utils.param_shard import GatherCast, ParamShard, Publisher
from ..utils.torch_private import move_module
from .mesh import ParallelContext
from .reducer import ReduceOptions, Reducer
from .shard_spec import Placement

if TYPE_CHECKING:
    from .gradient_sums import Reduction


@dataclass(frozen=True)
class StrategyInputs:
    """The inputs of a strategy.

    Attributes:
        model: already sharded over the other axes; not on the device yet.
        optimizer: over its parameters.
        shards: its parameters, with weights that count the data ranks.
        options: the config's `parallel.data`.
        reduce: how gradients are reduced.
        param_dtype: that the mode gives all parameters; None: each has its own.
        casts: of weights that may be cast before they are gathered.
        blocks: names of the model's repeated blocks; a rank may not have all of them.
        not_called: under a pipeline, names of the modules that stages do not call as a whole.
        kept: parameters that the mode leaves in fp32 by their names.
        tied: parameters that other pipeline ranks hold, too.
        outside: parameters that the criterion computes with, outside of the model's forward.
        make: gives the tensors of a module their values, where the model was built without.
        finish: gives all others theirs. A strategy calls it once.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    shards: Sequence[ParamShard]
    context: ParallelContext
    options: Any
    reduce: ReduceOptions
    param_dtype: torch.dtype | None
    casts: Mapping[nn.Parameter, GatherCast]
    blocks: Sequence[str]
    not_called: Collection[str] | None
    kept: Collection[torch.Tensor]
    tied: Collection[nn.Parameter]
    outside: Collection[nn.Parameter]
    make: Callable[[nn.Module], None]
    finish: Callable[[], None]


class DataStrategy:
    """Every data rank holds the whole model (`replicate`). Base class of other strategies.

    Attributes:
        modes: the AMP modes that it works with, besides those that name it in their `composes`.
        keys: those of `parallel.data` that it has.
        shards_state: whether each data rank steps a part of the weights, and holds the optimizer's state of that part.
        shards_model: whether the model's parameters are sharded, too.
        cost: for `halfmesh plan`: what data ranks wait for, besides the sum of gradients, in a few words.
        shards: what the optimizer steps on this rank; it holds their parameters.
        publisher: sends new weights to the ranks that use them; None: they need not be sent.
    """

    modes: ClassVar[Collection[str]] = ()
    keys: ClassVar[Collection[str]] = ("strategy", "size", "reduce_dtype", "bucket_mb", "max_inflight")
    shards_state: ClassVar[bool] = False
    shards_model: ClassVar[bool] = False
    cost: ClassVar[str] = ""
    publisher: Publisher | None = None

    def __init__(self, inputs: StrategyInputs) -> None:
        """Move the model to its device, and keep this rank's shard of it."""
        inputs.finish()
        move_module(inputs.model, inputs.context.device)
        self.inputs = inputs
        self.shards: Sequence[ParamShard] = inputs.shards

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        """Keys of a `halfmesh.Config`, dotted, and what is wrong with them.

        Args:
            param_dtype: that the mode gives all parameters; None: each has its own.
        """
        yield from ()

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        """Keys that do not fit this number of data ranks."""
        yield from ()

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        """Keys that work but could work better."""
        yield from ()

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        """Why a model cannot be trained this way; called before anything is changed."""
        yield from ()

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> Reduction:
        """What completes the gradients of `shards`, and averages BatchNorm's statistics in `buffers`.

        Args:
            withholds: before the step gradients are not final (scaled, or partial). A strategy under which changes of
                them cannot be detected puts placeholders in their place.
        """
        return Reducer(shards, buffers, self.inputs.context.dp_group, self.inputs.reduce)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        """Where in the whole tensor `shard` lies, a data rank's shard of what lies at `source`."""
        return source

    def compared(self, shard: ParamShard) -> ParamShard:
        """What data ranks hold copies of: the shard, or the parameter that the model computes with."""
        return shard

    @property
    def update_device(self) -> torch.device:
        """The device of optimizer steps."""
        return self.inputs.context.device

    @property
    def text(self) -> str:
        """A line of the effective plan: what each data rank holds, or steps."""
        asked = self.inputs.options.strategy
        return (
            ""
            if asked == "replicate" or self.inputs.context.dp_size > 1
            else f" ({asked} has nothing to shard over one data rank)"
        )

    def follow(self) -> None:
        """See `Publisher`."""

    def join(self, names: list[str]) -> list[str]:
        """See `Publisher`: by default ranks have what they step to themselves."""
        return names

    def find_lost_writes(self, watch: bool) -> Collection[str]:
        """The weights that forward has written into in vain since it is watched; `watch`: from now on it is, or not."""
        return ()

    def explain(self, error: RuntimeError) -> None:
        """Raise InputError if `error`, of forward or backward, comes from something not supported here."""

    def undo(self) -> None:
        """Give model and optimizer the original parameters again, without the values that other ranks hold."""


def repoint(
    optimizer: optim.Optimizer,
    new: Mapping[nn.Parameter, nn.Parameter],
    cut: Callable[[nn.Parameter, str, Any], Any] | None = None,
) -> None:
    """Replace parameters of `optimizer`, in the same places of the same groups.

    Args:
        new: for each parameter the one that replaces it.
        cut: called with a parameter, and the name and value of a state of it; returns the new one's. None: state stays.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(param, param) for param in group["params"]]
    for param, other in new.items():
        if cut is not None and param in optimizer.state:
            state = optimizer.state.pop(param)
            optimizer.state[other] = {name: cut(param, name, value) for name, value in state.items()}
