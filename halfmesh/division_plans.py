"""How a model will be divided, compiled and computed again: all of it found out before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn, optim

from . import activation, compilation
from .activation import Activations
from .amp.fused import is_elementwise
from .compilation import Compilation
from .errors import IncompatibleConfigError
from .key_checks import recipe_of
from .parallel import optimizer_checks as elementwise
from .parallel.data_strategy import DataStrategy
from .parallel.registries import DATA_STRATEGIES
from .parallel.tensor.checks import ResolvedPlan
from .parallel.tensor.checks import resolve as resolve_tensor

if TYPE_CHECKING:
    from .config import Config
    from .parallel.pipeline.partition import Partition


@dataclass(frozen=True)
class Plans:
    """How a model will be divided, None for an axis of size 1; and what is compiled and computed again, if anything."""

    tensor: ResolvedPlan | None = None
    partition: Partition | None = None
    compilation: Compilation | None = None
    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks, where the data ranks may gather weights block by block."""
    activations: Activations | None = None


def data_strategy(config: Config, data_ranks: int) -> type[DataStrategy]:
    """What the data ranks hold, by the config; one of them holds everything."""
    strategy: type[DataStrategy] = DATA_STRATEGIES.get(config.parallel.data.strategy)
    return strategy if data_ranks > 1 else DataStrategy


def make_plans(
    model: nn.Module, optimizer: optim.Optimizer, criterion: Any, loader: Any, config: Config, ranks: int = 1
) -> Plans:
    """How `model` is divided and compiled by the config, on so many ranks.

    Raises:
        IncompatibleConfigError: the model, the optimizer or the loader's batches cannot be divided so, or the model
            cannot be compiled.
    """
    tensor: ResolvedPlan | None = None
    problems: list[str] = []
    parallel = config.parallel
    strategy = data_strategy(config, ranks // (parallel.tensor.size * parallel.pipeline.size))
    if parallel.tensor.size > 1:
        options = parallel.tensor
        tensor, problems = resolve_tensor(model, options.size, options.plan, options.sequence_parallel)
    if (parallel.tensor.size > 1 or strategy.shards_state) and not is_elementwise(optimizer):
        problem = elementwise.find_problem(optimizer)  # one of others: by trying
        problems += [] if problem is None else [problem]
    partition = None
    if config.parallel.pipeline.size > 1:
        from .stage_checks import find_optimizer_problem, make_partition

        if (problem := find_optimizer_problem(optimizer)) is not None:
            problems.append(problem)
        partition, more = make_partition(model, criterion, loader, config.parallel.pipeline)
        problems += more
    compiled = None
    if config.compile.enabled:
        checkpoints = config.activation_checkpoint.enabled
        compiled, more = compilation.resolve(model, config.compile, ranks, partition, checkpoints)
        problems += more
    activations = None
    if config.activation_checkpoint.enabled:
        activations, more = activation.resolve(model, config.activation_checkpoint, partition, compiled)
        problems += more
    problems += strategy.find_problems(model, recipe_of(config).param_dtype)
    if problems:
        keys = [f"parallel.{axis}" for axis in ("tensor", "pipeline") if getattr(config.parallel, axis).size > 1]
        keys += ["parallel.data"] if strategy.shards_state else []
        keys += ["compile"] if config.compile.enabled else []
        keys += ["activation_checkpoint"] if config.activation_checkpoint.enabled else []
        keys = [", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys
        raise IncompatibleConfigError(problems, f"{' and '.join(keys)} with this model and optimizer")
    blocks = tuple(compilation.find_blocks(model)) if strategy.shards_model else ()
    return Plans(tensor, partition, compiled, blocks, activations)
