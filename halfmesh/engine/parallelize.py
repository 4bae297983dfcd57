"""Applies the parallel axes, activation checkpointing and torch.compile to the model, by plans made before anything
changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import kept_by_name
from ..amp.recipe import Recipe
from ..amp.stepper import is_elementwise
from ..config.composition import Setup
from ..errors import IncompatibleConfigError, InputError, shorten
from ..parallel.axis import AppliedAxis, AxisInputs, PlanInputs
from ..parallel.buckets import ReduceOptions
from ..parallel.comm import SameCalls
from ..parallel.context.axis import ContextParallel
from ..parallel.data_strategy import DataStrategy, StrategyInputs
from ..parallel.dims import ParallelDims
from ..parallel.mesh import ParallelContext
from ..parallel.reducer import Reduction
from ..parallel.registries import AXES
from ..parallel.rng import IsolatedRNG, model_seed, same_state
from ..parallel.shard_spec import Placement, whole
from ..parallel.trial import find_unit
from ..parallel.whole_steps import WholeSteps
from ..utils.optimizer_state import parts_of
from ..utils.param_shard import ParamShard
from . import compilation
from .deferred import Materializer
from .executor import ModelRNG
from .offload import Offload
from .pipeline_handles import PipelineOutput
from .recompute import Checkpointed

if TYPE_CHECKING:
    from ..config import Config
    from ..parallel.pipeline.partition import Partition


@dataclass(frozen=True)
class Plans:
    """The plan of each axis larger than 1, in the order in which they shard the model, and the modules to compile and
    to recompute."""

    axes: Mapping[str, Any]
    strategy: type[DataStrategy]
    partition: Partition | None
    """The plan of the axis that removes modules, if there is one."""
    blocks: tuple[str, ...]
    """Names of the repeated blocks, if the data ranks may gather weights block by block."""
    compiled: tuple[str, ...]
    """Names of the modules that are compiled; "" is the model itself."""
    recomputed: tuple[str, ...]
    """Names of the modules whose activations are recomputed."""
    whole_steps: tuple[optim.Optimizer, ...] = ()
    """The optimizers that step parameters as a whole, of which ranks hold shards."""


def make_plans(model: nn.Module, optimizer: optim.Optimizer, criterion: Any, loader: Any, setup: Setup) -> Plans:
    """The plans by which the config shards and compiles `model`.

    Raises:
        IncompatibleConfigError: the model, the optimizer or the loader's batches cannot be sharded in this way, or the
            model cannot be compiled.
    """
    problems: list[str] = []
    config, dims = setup.config, setup.dims
    parallel, strategy = config.parallel, setup.strategy
    used = {name: AXES.get(name) for name, size in parallel.sizes.items() if size > 1}
    axes: dict[str, Any] = {}
    partition = None
    for name, axis in sorted(used.items(), key=lambda pair: pair[1].splits_modules):
        plan, more = axis.plan(PlanInputs(model, optimizer, criterion, loader, getattr(parallel, name)))
        axes[name], partition = plan, plan if axis.splits_modules else partition
        problems += more
    if dims.grad_ranks > 1 or strategy.shards_model or not all(axis.same_rng for axis in used.values()):
        tables = (nn.Embedding, nn.EmbeddingBag)
        if limited := [name for name, m in model.named_modules() if isinstance(m, tables) and m.max_norm is not None]:
            problems.append(
                f"{shorten(limited)}: max_norm makes forward write into the rows it looks up, which differ between "
                "ranks; build it without max_norm, and limit the rows after the lookup (rows * (limit / "
                "rows.norm(dim=-1, keepdim=True)).clamp(max=1))"
            )
    whole_steps: list[optim.Optimizer] = []
    splits_params = strategy.shards_state or any(axis.splits_params for axis in used.values())
    for part in parts_of(optimizer) if splits_params else ():
        try:
            if not is_elementwise(part) and find_unit(part) != "element":  # of a third party's: by trying it
                whole_steps.append(part)
                if part.state:
                    problems.append(
                        f"optimizer: {type(part).__name__} steps whole parameters and has state already; pass a new "
                        "one, and load a checkpoint of engine.save"
                    )
        except InputError as error:
            problems.append(str(error))
    compiled: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    checkpoints = config.activation_checkpoint.enabled
    if config.compile.enabled:
        compiled, more = compilation.resolve_compiled(model, config.compile, dims.world_size, partition, checkpoints)
        problems += more
    if checkpoints:
        recomputed, more = compilation.resolve_recomputed(model, config.activation_checkpoint, partition, compiled)
        problems += more
    problems += strategy.find_problems(model, setup.recipe.param_dtype)
    if problems:
        raise IncompatibleConfigError(problems, "this config with this model and optimizer")
    blocks = tuple(compilation.find_blocks(model)) if strategy.shards_model else ()
    return Plans(axes, strategy, partition, blocks, compiled, recomputed, tuple(whole_steps))


def reduce_options(config: Config, dims: ParallelDims) -> ReduceOptions:
    """The options for reducing gradients."""
    data = config.parallel.data
    bucket_mb = data.bucket_mb or max(25, dims.grad_ranks)  # under zero1 each rank gets a part of it
    return ReduceOptions(
        dtype=getattr(torch, data.reduce_dtype),
        bucket_bytes=int(bucket_mb * 2**20),
        max_inflight=data.max_inflight,
        mean=config.loss_reduction == "mean",
        loss_parts=dims.grad_ranks // dims.dp,
    )


class ParallelModel:
    """A model that is parallelized in place.

    Args:
        model: full, and equal on all ranks; it need not be on the device yet.
        optimizer: over its parameters; it holds this rank's shards afterwards.

    Attributes:
        axes: each applied axis larger than 1, in the order of application.
        data: the applied data strategy.
        settles: reset the axes: a forward or backward may have ended early.
        own_rng_axes: axes of the mesh whose ranks compute different things, with different random numbers.
        random: the model's random number generators, if there are several ranks.
        compiled: the modules that `compile` has compiled.
        checkpointed: the replaced forwards of modules that are recomputed.
        offload: moves activations to the host, if configured.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, plans: Plans, config: Config, context: ParallelContext
    ) -> None:
        self.plans = plans
        self._config = config
        self._context = context
        self._linear: Any = None  # products of linear layers in another dtype
        self.compiled: list[nn.Module] = []
        self.data: DataStrategy
        self.checkpointed: list[Checkpointed] = []
        self.offload = Offload(context.device) if config.activation_offload else None
        kinds = [AXES.get(name) for name in plans.axes]
        self.own_rng_axes = [kind.dim for kind in kinds if not kind.same_rng and not kind.replica_dim]
        seed = model_seed(config.seed, context, self.own_rng_axes)
        self.random = ModelRNG(seed, context.device) if context.size > 1 else None
        self.host_random = IsolatedRNG(model_seed(config.seed, context))
        """Python's and numpy's random numbers where ranks call the same layers, or different stages of one model."""
        self.same_layers = any(kind.same_rng for kind in kinds)
        for part in plans.whole_steps:
            part.unit = "matrix"  # type: ignore[attr-defined]
        self._whole_steps: WholeSteps | None = None
        self.axes: dict[str, AppliedAxis] = {}
        for name, plan in plans.axes.items():
            self.axes[name] = AXES.get(name).apply(AxisInputs(model, optimizer, plan, context))
        self._fewer_axes: dict[nn.Parameter, tuple[str, ...]] = {}
        for kind, applied in zip(kinds, self.axes.values(), strict=True):
            if kind.replica_dim:
                fewer = tuple(kind.replica_dim if axis == "dp" else axis for axis in context.dims.grad_axes)
                context.group(*fewer)  # made by all ranks, some of which may have no such parameters
                self._fewer_axes |= dict.fromkeys(applied.splits, fewer)
        self.settles = [a.settle for a in self.axes.values() if type(a).settle is not AppliedAxis.settle]
        context_axis = self.axes.get("context")
        self.sequences = context_axis if isinstance(context_axis, ContextParallel) else None
        """The axis whose ranks share sequences."""
        if self.sequences is not None:
            self.sequences.is_weighted = config.loss_reduction == "weighted"

    def make_shards(
        self, model: nn.Module, optimizer: optim.Optimizer, criterion: Any, recipe: Recipe, late: Materializer | None
    ) -> Sequence[ParamShard]:
        """Move `model` to this rank's device. Returns its parameters, or the data ranks' shards of them, which
        `optimizer` holds afterwards; each with weight 1 / (number of ranks that hold the same numbers).

        Args:
            late: materializes the model's parameters, if they have no values yet.
        """
        context, plans = self._context, self.plans
        self._linear = recipe.linear
        if late is not None:
            late.cuts = {p: axis.cut(split) for axis in self.axes.values() for p, split in axis.splits.items()}
        is_outside = isinstance(criterion, nn.Module) and model not in set(criterion.modules())  # no part of it
        inputs = StrategyInputs(
            model=model,
            optimizer=optimizer,
            shards=[ParamShard(name, p, self._weight(p)) for name, p in model.named_parameters()],
            context=context,
            options=self._config.parallel.data,
            reduce=reduce_options(self._config, context.dims),
            axes=context.dims.grad_axes,
            fewer_axes=self._fewer_axes,
            param_dtype=recipe.param_dtype,
            casts={} if recipe.linear is None else recipe.linear.cast_before_gather(model),
            blocks=plans.blocks,
            not_called=None if plans.partition is None else {n for n, _ in plans.partition.not_called(model)},
            kept=set(kept_by_name(model, recipe)),
            tied={param for axis in self.axes.values() for param in axis.ties},
            outside=set(criterion.parameters()) if is_outside else set(),
            make=(lambda module: None) if late is None else late.make,
        )
        self.data = plans.strategy(inputs)
        if late is not None:
            late.finish()
        return self.data.shards

    @property
    def divides(self) -> bool:
        """True if this rank has only a shard or stage of the model, or of its update."""
        return self.divides_model or self.data.shards_state

    @property
    def divides_model(self) -> bool:
        """True if the model has only this rank's parameters or shards of them."""
        return any(axis.splits or axis.first_names is not None for axis in self.axes.values()) or self.data.shards_model

    def partial_gradients(self, withholds: bool) -> str:
        """Under what this rank does not have the whole gradients of its parameters; "" if it has.

        Args:
            withholds: as of `DataStrategy.make_reducer`.
        """
        keys = [f"parallel.{name}" for name, axis in self.axes.items() if axis.splits]
        if self.data.shards_state and (withholds or not self.data.shards_model):
            keys.append(f"parallel.data={self._config.parallel.data.strategy!r}")
        return f"under {' and '.join(keys)}" if keys else ""

    def placement(self, shard: ParamShard) -> Placement:
        """The region of the full model's parameter that `shard`, one of those made here, holds."""
        source = shard.param if shard.source is None else shard.source.param
        region = whole(source.shape)
        for axis in self.axes.values():
            if (split := axis.splits.get(shard.model_param)) is not None:
                region = whole(split.whole_shape(source.shape, axis.size)).split(split, axis.rank, axis.size)
        return region if shard.source is None else self.data.placement(shard, region)

    def state_placement(self, shard: ParamShard) -> Placement | None:
        """The region of the full model's parameter for which this rank holds the optimizer's state; None: another rank
        holds all of it."""
        if self._whole_steps is None or (owns := self._whole_steps.owns(shard)) is None:
            return self.placement(shard)
        return whole(self.placement(shard).shape) if owns else None

    def find_owners(self) -> None:
        """Find the owners of whole parameters in groups that were added since the last step. All ranks together."""
        if self._whole_steps is not None:
            self._whole_steps.plan()

    def step_whole(self, update: MixedPrecisionOptimizer) -> None:
        """Let the optimizers step whole parameters that need these. All ranks together."""
        if not self.plans.whole_steps:
            return
        masters = update.master_weights
        kinds = [AXES.get(name) for name in self.plans.axes]
        axes = {"dp" if kind.replica_dim else kind.dim for kind in kinds if kind.splits_params}
        axes |= {*self._context.dims.grad_axes} if self.data.shards_state else set()
        group = self._context.group(*sorted(axes)) if self._context.size_of(*axes) > 1 else None
        made = self._whole_steps = WholeSteps(
            self.plans.whole_steps, masters.shards, masters.target, self.placement, group, self._context.device
        )
        update.stepper.scope = made.scope

    def first_names(self, model: nn.Module) -> dict[str, str]:
        """For each name of a parameter or buffer in the full model, the first name of the same tensor there."""
        for axis in self.axes.values():
            if axis.first_names is not None:
                return axis.first_names
        from ..parallel.pipeline.partition import first_names

        return first_names(model)

    def publish(self, shards: Sequence[ParamShard]) -> None:
        """Send the new weights of `shards`, all that the optimizer holds, to the ranks that use them."""
        publisher = self.data.publisher
        if publisher is not None:
            publisher.begin()
            publisher.stepped(shards)
            publisher.finish()
            publisher.arrive()

    def _weight(self, param: nn.Parameter) -> float:
        """1 / (number of ranks that hold the same numbers of `param`)."""
        return 1 / math.prod([self._context.dp_size, *(axis.replicas(param) for axis in self.axes.values())])

    def make_reductions(self, trained: Sequence[ParamShard]) -> list[Reduction]:
        """The reductions that complete gradients over the axes. All ranks together."""
        made = (axis.make_reduction(trained) for axis in self.axes.values())
        return [reduction for reduction in made if reduction is not None]

    @property
    def same(self) -> list[SameCalls]:
        """Comparisons of calls over the ranks that compute the same; one for each such axis."""
        return [axis.same for axis in self.axes.values() if axis.same is not None]

    def full_call(self, model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns the output of the full model; `forward` computes this rank's share of it."""
        axis = self.sequences
        if axis is None:
            return forward
        axis.trial_scope = partial(self._trial_scope, model)

        def call(*args: Any, **kwargs: Any) -> Any:
            output, sequences = axis.call(model, forward, args, kwargs)
            if isinstance(output, PipelineOutput):
                output.sequences = sequences
            return output

        return call

    @contextmanager
    def _trial_scope(self, model: nn.Module) -> Iterator[Callable[[], bool]]:
        """See `ContextParallel.trial_scope`."""
        generators: list[Any] = [self.host_random] if self.random is None else [self.random, self.host_random]
        before = [generator.state for generator in generators]
        if self._linear is not None:
            self._linear.remove(model)  # the trial restores the modules' attributes
        try:
            yield lambda: any(
                then is not None and not same_state(then, generator.state)
                for then, generator in zip(before, generators, strict=True)
            )
        finally:
            for generator, then in zip(generators, before, strict=True):
                generator.state = then

    def saving(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
        """The scope of a forward of `model`, or of a stage, that offloads what autograd saves."""
        if self.offload is None or self.plans.recomputed:
            return nullcontext
        return partial(self.offload.everything, model)

    def checkpoint_and_compile(self, model: nn.Module) -> None:
        """Apply activation checkpointing and compilation to this rank's modules. `model` is cast already, and was
        copied if a copy is needed that runs without data."""
        partition, rank = self.plans.partition, self._context.pp_rank

        def computed_here(names: Iterable[str]) -> list[nn.Module]:
            mine = (name for name in names if partition is None or rank in partition.ranks_of(name))
            return list(dict.fromkeys(map(model.get_submodule, mine)))

        selective = self._config.activation_checkpoint.selective
        saving = nullcontext if self.offload is None else self.offload.inputs
        self.checkpointed = [Checkpointed(m, selective, saving) for m in computed_here(self.plans.recomputed)]
        self.compiled = computed_here(self.plans.compiled)
        if self.compiled:
            compilation.compile_modules(self.compiled, self._config.compile, self.data.arrive)

    def explain(self, error: RuntimeError) -> None:
        """Explain a known error of torch in forward or backward.

        Raises:
            InputError: the model does something that this layout does not support.
        """
        for axis in self.axes.values():
            axis.explain(error)
        self.data.explain(error)

    def close(self) -> None:
        """End compilation and recomputation. The model stays sharded."""
        for module in self.compiled:
            compilation.uncompile(module)
        for forward in self.checkpointed:
            forward.remove()
        for settle in self.settles:
            settle()
