"""What the mesh means for the model: which part of it this rank holds, over the tensor axis and over the pipeline; and
what of that is compiled, or computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from .amp.recipe import Recipe
from .compilation import uncompile
from .division_plans import Plans, data_strategy
from .parallel.activations.checkpoint import Checkpointed
from .parallel.activations.offload import Offload
from .parallel.context import ParallelContext
from .parallel.data_strategy import DataStrategy, StrategyInputs
from .parallel.deferred.late import Late
from .parallel.reducer import ReduceOptions
from .parallel.rng import CommonRandom, IsolatedRNG, model_seed
from .parallel.shard_spec import Placement, whole
from .parallel.tensor.apply import TensorParallel
from .parallel.tensor.axis import TensorAxis
from .shard import ParamShard

if TYPE_CHECKING:
    from .config import Config
    from .parallel.pipeline.cut import StageCut
    from .parallel.pipeline.skeleton import Skeleton


def reduce_options(config: Config, data_ranks: int) -> ReduceOptions:
    """How gradients are sent between the data ranks."""
    data = config.parallel.data
    bucket_mb = data.bucket_mb or max(25, data_ranks)  # under zero1 each rank gets 1 / data_ranks of it
    return ReduceOptions(
        dtype=getattr(torch, data.reduce_dtype),
        bucket_bytes=int(bucket_mb * 2**20),
        max_inflight=data.max_inflight,
        mean=config.loss_reduction == "mean",
    )


class Division:
    """A model that is divided in place.

    Args:
        model: whole, and equal on all ranks; it need not be on the device yet.
        optimizer: over its parameters; it holds this rank's afterwards.
        late: gives the model its values, where it has none yet.

    Attributes:
        tensor, cut: what was done for each axis; None where it is 1.
        data: what the data ranks hold.
        random: the model's own random numbers, where there are several ranks.
        compiled: the modules that `compile` has compiled.
        checkpointed: what stands in for the forwards of modules that are computed again.
        offload: moves activations to the host, if they are to be moved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        plans: Plans,
        config: Config,
        context: ParallelContext,
        late: Late | None = None,
    ) -> None:
        self.plans = plans
        self.late = late
        self._config = config
        self._context = context
        self.tensor: TensorParallel | None = None
        self.cut: StageCut | None = None
        self.skeleton: Skeleton | None = None
        self.compiled: list[nn.Module] = []
        self.data: DataStrategy
        self.checkpointed: list[Checkpointed] = []
        self.offload = Offload(context.device) if config.activation_offload else None
        self.random = CommonRandom(model_seed(config.seed, context), context.device) if context.size > 1 else None
        self.host_random = IsolatedRNG(model_seed(config.seed, context))
        """Those of python and numpy that stages of a pipeline draw, one more or less often than others."""
        if plans.tensor is not None:
            axis = TensorAxis(context.tp_group, context.device, self.random)
            self.tensor = TensorParallel(model, optimizer, plans.tensor, axis)
            if plans.partition is None:
                self.tensor.watch_calls(model)
        if plans.partition is not None:
            from .parallel.pipeline.cut import StageCut
            from .parallel.pipeline.skeleton import Skeleton

            self.skeleton = Skeleton(model)
            self.cut = StageCut(model, optimizer, plans.partition, context)

    def make_shards(self, model: nn.Module, optimizer: optim.Optimizer, recipe: Recipe) -> Sequence[ParamShard]:
        """The parameters of `model`, which goes to this rank's device, each with 1 / (number of ranks that hold the
        same numbers). Where data ranks hold parts, these, which `optimizer` holds afterwards.
        """
        context, late, plans = self._context, self.late, self.plans
        if late is not None:
            late.begin(model, plans.blocks, None if self.tensor is None else self.tensor.cuts)
        inputs = StrategyInputs(
            model=model,
            optimizer=optimizer,
            shards=[ParamShard(name, p, self._weight(p, context)) for name, p in model.named_parameters()],
            context=context,
            options=self._config.parallel.data,
            reduce=reduce_options(self._config, context.dp_size),
            param_dtype=recipe.param_dtype,
            blocks=plans.blocks,
            not_called=None if plans.partition is None else {n for n, _ in plans.partition.not_called(model)},
            tied=() if self.cut is None else self.cut.ties.keys(),
            make=(lambda module: None) if late is None else late.make,
            finish=(lambda: None) if late is None else late.finish,
        )
        self.data = data_strategy(self._config, context.dp_size)(inputs)
        return self.data.shards

    @property
    def divides(self) -> bool:
        """Whether this rank has a part of the model only, or of its update."""
        return self.divides_model or self.data.shards_state

    @property
    def divides_model(self) -> bool:
        """Whether the model has this rank's part of the parameters only."""
        return self.tensor is not None or self.cut is not None or self.data.shards_model

    def placement(self, shard: ParamShard) -> Placement:
        """Where in the whole model's parameter the numbers of `shard`, one of those made here, lie."""
        source = shard.param if shard.source is None else shard.source.param
        split = None if self.tensor is None else self.tensor.splits.get(shard.model_param)
        place = whole(source.shape)
        if self.tensor is not None and split is not None:
            axis = self.tensor.axis
            place = whole(split.whole_shape(source.shape, axis.size)).split(split, axis.rank, axis.size)
        return place if shard.source is None else self.data.placement(shard, place)

    def first_names(self, model: nn.Module) -> dict[str, str]:
        """For each name of a parameter or buffer in the whole model the first one that the same tensor has there."""
        if self.cut is not None:
            return self.cut.first_names
        from .parallel.pipeline.partition import first_names

        return first_names(model)

    def publish(self, shards: Sequence[ParamShard]) -> None:
        """The weights of `shards`, all that the optimizer holds, are new: take them to the ranks that use them."""
        publisher = self.data.publisher
        if publisher is not None:
            publisher.begin()
            publisher.stepped(shards)
            publisher.finish()

    def _weight(self, param: nn.Parameter, context: ParallelContext) -> float:
        copies = context.dp_size
        weight = 1 / copies if self.tensor is None else self.tensor.weight(param, copies)
        return weight if self.cut is None else weight * self.cut.weight(param)

    @contextmanager
    def drawing(self, model: nn.Module) -> Iterator[None]:
        """Around the forward of a stage: it draws the model's own random numbers."""
        assert self.random is not None
        settle: Callable[[], Any] = (lambda: None) if self.tensor is None else self.tensor.axis.settle
        settle()
        self.random.enter(model, always=True)
        try:
            yield
        finally:
            settle()
            self.random.leave()

    def around_call(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
        """What is around a forward of the whole model: its own random numbers in training, and `saving`."""
        saving = self.saving(model)
        if self.random is None:
            return saving
        own, axis = partial(self.random.around, model), None if self.tensor is None else self.tensor.axis

        @contextmanager
        def around() -> Iterator[None]:
            scope: AbstractContextManager[Any] = own()
            if axis is not None and model.training:  # whose hooks draw torch's numbers from `random`
                axis.settle()  # a backward may have left a fork open, which is not to be put back
                scope = self.host_random  # the ranks call the same layers, also where python or numpy chooses them
            with scope, saving():
                yield

        return around

    def saving(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
        """What is around a forward of `model`, or of a stage, for what autograd saves of it."""
        if self.offload is None or self.plans.activations is not None:
            return nullcontext
        return partial(self.offload.everything, model)

    def checkpoint_and_compile(self, model: nn.Module) -> None:
        """Do with what this rank computes what the config says. `model` is cast already, and was copied where a copy is
        needed that runs without data."""
        partition, rank = self.plans.partition, self._context.pp_rank

        def is_here(name: str) -> bool:
            return partition is None or partition.is_used_by(name, rank)

        if self.plans.activations is not None:
            self.checkpointed = self.plans.activations.apply(model, self.offload, is_here)
        if self.plans.compilation is not None:
            self.compiled = self.plans.compilation.apply(model, is_here)

    def explain(self, error: RuntimeError) -> None:
        """Say what an error of torch in forward or backward means here, where that is known.

        Raises:
            InputError: it is something that a model cannot do in this layout.
        """
        if self.tensor is not None and self.tensor.check is not None:
            self.tensor.check.explain(error)
        self.data.explain(error)

    def close(self, restore: bool) -> None:
        """Nothing is computed any more. With `restore` the model gets its modules and parameters again, without the
        values that other ranks hold; otherwise it stays in parts."""
        for module in self.compiled:
            uncompile(module)
        for forward in self.checkpointed:
            forward.remove()
        if self.tensor is not None:
            self.tensor.axis.settle()
        for part in (self.data, self.cut, self.tensor) if restore else ():
            if part is not None:
                part.undo()
