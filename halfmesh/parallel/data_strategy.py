"""The base class of data strategies: how data ranks replicate or shard a model, and exchange gradients and weights.

`replicate`, `zero1` and `fsdp` implement it, and packages can register others in `DATA_STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn, optim

from ..errors import InputError
from ..options import Options
from ..utils.param_shard import ParamShard, Publisher
from ..utils.torch_private import move_module
from .buckets import ReduceOptions
from .mesh import ParallelContext
from .reducer import Buffers, Reducer, Reduction
from .shard_spec import Placement

SCATTERED = "when under data='zero1' each rank has only the sums of its shard"
UNFINISHED = "when under data='fsdp' it may still be scaled or undivided, or cover only this rank's part of the model"


@dataclass(frozen=True)
class StrategyInputs:
    """The inputs of a strategy.

    Attributes:
        model: the model, already sharded over the other axes, not on the device yet.
        optimizer: the optimizer over its parameters.
        shards: its parameters, with weights that count the data ranks.
        context: the layout.
        options: the config's `parallel.data`.
        reduce: how gradients are reduced.
        param_dtype: the mode's dtype of all parameters. None: each keeps its dtype.
        casts: the casts of weights that may be cast before they are gathered: see `amp.float8.Float8Product.pack` and
            `unpack`.
        blocks: the names of the model's repeated blocks. A rank may not have all of them.
        not_called: under a pipeline, the names of the modules that stages do not call directly.
        kept: the parameters that the mode leaves in fp32 because of their names.
        tied: the parameters that other pipeline ranks also hold.
        outside: the parameters that the criterion computes with, outside the model's forward.
        make: materializes the tensors of a module of a deferred model. The last call must be for `model`.
        axes: the axes of the data ranks, over which losses are averaged: ("dp",), or more of the mesh.
        fewer_axes: the parameters that fewer data ranks hold (experts), and the axes of these ranks. A mean of their
            gradients is a mean over these ranks.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    shards: Sequence[ParamShard]
    context: ParallelContext
    options: Any
    reduce: ReduceOptions
    param_dtype: torch.dtype | None
    casts: Mapping[nn.Parameter, Any]
    blocks: Sequence[str]
    not_called: Collection[str] | None
    kept: Collection[torch.Tensor]
    tied: Collection[nn.Parameter]
    outside: Collection[nn.Parameter]
    make: Callable[[nn.Module], None]
    axes: tuple[str, ...] = ("dp",)
    fewer_axes: Mapping[nn.Parameter, tuple[str, ...]] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the data ranks."""
        return self.context.group(*self.axes)

    @property
    def mean_over(self) -> int:
        """The number of data ranks, over which losses are averaged."""
        return self.context.size_of(*self.axes)

    def group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        """Return the group of the ranks that hold equal values of `param`, over which its gradient is summed."""
        return self.context.group(*self.fewer_axes.get(param, self.axes))


class DataStrategy:
    """The strategy `replicate`, in which every data rank holds the full model, and the base class of other strategies.

    Attributes:
        options: the class of its own keys of `parallel.data`, in addition to the keys of all strategies.
        modes: the AMP modes that it works with, in addition to modes that name it in their `composes`.
        shards_state: True if each data rank steps a shard of the weights, with the optimizer's state of that shard.
        shards_model: True if the model's parameters are also sharded.
        cost: the communication that data ranks wait for in addition to the sum of gradients, in a few words, for
            `halfmesh plan`.
        shards: the shards that the optimizer steps on this rank. The optimizer holds their parameters.
        publisher: sends new weights to the ranks that use them. None: nothing needs to be sent.
    """

    options: ClassVar[type[Options]] = Options
    modes: ClassVar[Collection[str]] = ()
    shards_state: ClassVar[bool] = False
    shards_model: ClassVar[bool] = False
    cost: ClassVar[str] = ""
    publisher: Publisher | None = None

    def __init__(self, inputs: StrategyInputs) -> None:
        """Move the model to its device, and keep this rank's shard of it."""
        inputs.make(inputs.model)
        move_module(inputs.model, inputs.context.device)
        self.inputs = inputs
        self.shards: Sequence[ParamShard] = inputs.shards

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        """Yield dotted keys of a `halfmesh.Config`, and their problems.

        Args:
            config: a `halfmesh.Config` that uses this strategy.
            param_dtype: the mode's dtype of all parameters. None: each keeps its dtype.
        """
        yield from ()

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        """Yield keys that do not fit this number of data ranks, and their problems."""
        yield from ()

    @staticmethod
    def ranks_of_copy(options: Any, data_ranks: int) -> int:
        """Return the number of data ranks that together hold one copy of the sharded state: all of them by default."""
        return data_ranks

    @staticmethod
    def steps_on_host(options: Any) -> bool:
        """Return True if gradients are reduced, and the optimizer steps, in host memory."""
        return False

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        """Yield keys that work but could work better, and the advice."""
        yield from ()

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        """Yield the reasons why a model cannot be trained this way. Called before halfmesh changes anything."""
        yield from ()

    def make_reducer(self, shards: Sequence[ParamShard], buffers: Buffers, withholds: bool) -> Reduction:
        """Return the reduction that completes the gradients of `shards` and averages BatchNorm's statistics.

        Args:
            shards: the shards whose gradients it reduces.
            buffers: the buffers with BatchNorm's statistics.
            withholds: True if gradients are not final before the step (scaled, or partial). A strategy that cannot
                detect changes of them replaces them with placeholders.
        """
        return Reducer(shards, buffers, self.inputs.group, self.inputs.reduce, self.inputs.group_of)

    def keep_gathered(self, keeps: bool, params: Collection[nn.Parameter] | None = None) -> None:
        """Start or end a period in which gathered weights may be kept. Called under a pipeline if `shards_model`: with
        True before the first microbatch, and with False before the last backward of the stage with `params`."""

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return the method `name` of the model, with full weights where it uses them."""
        return getattr(model, name)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        """Return the region of the full tensor that `shard` holds: a data rank's shard of the tensor at `source`."""
        return source

    @property
    def text(self) -> str:
        """The part of the effective plan about the shards that each data rank holds or steps."""
        asked = self.inputs.options.strategy
        is_whole = asked != "replicate" and self.inputs.mean_over == 1
        return f" ({asked}: nothing to shard with 1 data rank)" if is_whole else ""

    @property
    def exchange(self) -> str:
        """The part of the effective plan about the data that data ranks send to each other."""
        return f"gradients averaged in {self.inputs.options.reduce_dtype}"

    @property
    def diverged(self) -> str:
        """The reason why the data ranks hold different weights on purpose now, so that none can be saved. Else ""."""
        return ""

    def follow(self) -> None:
        """See `Publisher`."""

    def arrive(self, module: nn.Module | None = None) -> None:
        """See `Publisher`. With `module`, wait for its weights only: compiled code gives no notice of use."""

    def join(self, names: list[str]) -> list[str]:
        """See `Publisher`: by default the names of this rank."""
        return names

    def find_lost_writes(self, watch: bool) -> Collection[str]:
        """Return the weights whose writes in forward were lost since the watch began. `watch`: keep watching."""
        return ()

    def explain(self, error: RuntimeError) -> None:
        """Raise InputError if an `error` of forward or backward comes from something that is not supported here."""


class WithheldGradient(torch.Tensor):
    """A placeholder with the shape and dtype of a gradient and no values. Computing with it raises InputError.

    With None instead, `torch.nn.utils.clip_grad_norm_` would silently skip the parameter.
    """

    param_name: str
    why: str

    @staticmethod
    def of(param: torch.Tensor, name: str, why: str) -> WithheldGradient:
        """Return the placeholder for `param`, which has this `name` in the model. `why` is the end of the message."""
        grad: WithheldGradient = torch.Tensor._make_wrapper_subclass(
            WithheldGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        grad.param_name, grad.why = name, why
        return grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.param_name!r}, {self.why}>"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        grad = next(tensor for tensor in given if isinstance(tensor, cls))
        raise InputError(
            f"the gradient of {grad.param_name!r} was used between engine.backward and engine.step ({function}), "
            f"{grad.why}. To clip, call engine.clip_grad_norm_(n); to add another loss, call engine.backward(loss)"
        )
