"""The contract of a data strategy: how data ranks replicate or shard a model, and exchange gradients and weights.

`replicate`, `zero1` and `fsdp` implement it; packages register others in DATA_STRATEGIES.
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
        model: already sharded over the other axes; not on the device yet.
        optimizer: over its parameters.
        shards: its parameters, with weights that count the data ranks.
        options: the config's `parallel.data`.
        reduce: how gradients are reduced.
        param_dtype: the mode's dtype of all parameters; None: each keeps its dtype.
        casts: of weights that may be cast before they are gathered; see `amp.float8.Float8Product.pack` and `unpack`.
        blocks: names of the model's repeated blocks; a rank may not have all of them.
        not_called: under a pipeline, names of the modules that stages do not call directly.
        kept: parameters that the mode leaves in fp32 by their names.
        tied: parameters that other pipeline ranks hold, too.
        outside: parameters that the criterion computes with, outside of the model's forward.
        make: materializes the tensors of a module of a deferred model. A strategy calls it at last for `model`.
        axes: those of the data ranks, whose losses are averaged: ("dp",), or more of the mesh.
        fewer_axes: parameters that fewer data ranks hold (experts), and the axes of these. Their gradients stand for
            those of all data ranks: a mean is a mean over these ranks.
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
        """The data ranks."""
        return self.context.group(*self.axes)

    @property
    def mean_over(self) -> int:
        """The number of data ranks, whose losses are averaged."""
        return self.context.size_of(*self.axes)

    def group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        """The ranks over which the gradient of `param` is summed, and which hold equal values of it."""
        return self.context.group(*self.fewer_axes.get(param, self.axes))


class DataStrategy:
    """Every data rank holds the full model (`replicate`). Base class of other strategies.

    Attributes:
        options: its own keys of `parallel.data`, besides those of all strategies.
        modes: the AMP modes that it works with, besides those that name it in their `composes`.
        shards_state: each data rank steps a shard of the weights, and holds the optimizer's state of that shard.
        shards_model: the model's parameters are sharded, too.
        cost: for `halfmesh plan`: what data ranks wait for, besides the sum of gradients, in a few words.
        shards: those that the optimizer steps on this rank; it holds their parameters.
        publisher: sends new weights to the ranks that use them; None: they need not be sent.
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
        """Keys of a `halfmesh.Config`, dotted, and their problems.

        Args:
            param_dtype: the mode's dtype of all parameters; None: each keeps its dtype.
        """
        yield from ()

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        """Keys that do not fit this number of data ranks."""
        yield from ()

    @staticmethod
    def ranks_of_copy(options: Any, data_ranks: int) -> int:
        """The data ranks that together hold what it shards: all of them, or so many that each such group has a copy."""
        return data_ranks

    @staticmethod
    def steps_on_host(options: Any) -> bool:
        """Return True if gradients are reduced, and the optimizer steps, in host memory."""
        return False

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        """Keys that work but could work better."""
        yield from ()

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        """The reasons why a model cannot be trained this way; called before anything is changed."""
        yield from ()

    def make_reducer(self, shards: Sequence[ParamShard], buffers: Buffers, withholds: bool) -> Reduction:
        """The reduction that completes the gradients of `shards`, and averages BatchNorm's statistics in `buffers`.

        Args:
            withholds: before the step gradients are not final (scaled, or partial). A strategy under which changes of
                them cannot be detected replaces them by placeholders.
        """
        inputs = self.inputs
        return Reducer(shards, buffers, inputs.group, inputs.reduce, inputs.group_of)

    def keep_gathered(self, keeps: bool, params: Collection[nn.Parameter] | None = None) -> None:
        """Begin or end a time in which gathered weights may be kept. Called under a pipeline if the strategy
        `shards_model`: with True before the first microbatch, with False before the last backward of the stage with
        `params`."""

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """The method `name` of the model, with full weights where it uses them."""
        return getattr(model, name)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        """The region of the full tensor in `shard`, a data rank's shard of the tensor at `source`."""
        return source

    @property
    def update_device(self) -> torch.device:
        """The device of optimizer steps."""
        return torch.device("cpu") if self.steps_on_host(self.inputs.options) else self.inputs.context.device

    @property
    def text(self) -> str:
        """A line of the effective plan: the shards that each data rank holds, or steps."""
        asked = self.inputs.options.strategy
        is_whole = asked != "replicate" and self.inputs.mean_over == 1
        return f" ({asked}: nothing to shard with 1 data rank)" if is_whole else ""

    @property
    def exchange(self) -> str:
        """The end of that line: what data ranks send to each other."""
        return f"gradients averaged in {self.inputs.options.reduce_dtype}"

    @property
    def diverged(self) -> str:
        """Why the data ranks hold different weights now, on purpose, so that none can be saved; "" where they agree."""
        return ""

    def follow(self) -> None:
        """See `Publisher`."""

    def arrive(self, module: nn.Module | None = None) -> None:
        """See `Publisher`. With `module` wait for its weights only: compiled code uses them without a word."""

    def join(self, names: list[str]) -> list[str]:
        """See `Publisher`: by default the names of this rank."""
        return names

    def find_lost_writes(self, watch: bool) -> Collection[str]:
        """The weights for which a write by forward was lost since the watch began; `watch`: continue to watch."""
        return ()

    def explain(self, error: RuntimeError) -> None:
        """Raise InputError if `error`, of forward or backward, is due to something that is not supported here."""


class WithheldGradient(torch.Tensor):
    """A placeholder with the shape and dtype of a gradient and no values. Computing with it raises InputError.

    With None instead, `torch.nn.utils.clip_grad_norm_` would silently skip the parameter.
    """

    param_name: str
    why: str

    @staticmethod
    def of(param: torch.Tensor, name: str, why: str) -> WithheldGradient:
        """The placeholder for `param`, which has this `name` in the model; `why` ends the message."""
        grad: WithheldGradient = torch.Tensor._make_wrapper_subclass(
            WithheldGradient, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        grad.param_name, grad.why = name, why
        return grad

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        grad = next(tensor for tensor in given if isinstance(tensor, cls))
        raise InputError(
            f"the gradient of {grad.param_name!r} was used between engine.backward and engine.step ({function}), "
            f"{grad.why}. To clip, call engine.clip_grad_norm_(n); to add another loss, call engine.backward(loss)"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the gradient of {self.param_name!r}, {self.why}>"
