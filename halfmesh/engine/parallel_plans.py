"""The plans to shard, compile and recompute a model, made before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn, optim

from ..amp.stepper import is_elementwise
from ..config.composition import Setup
from ..errors import IncompatibleConfigError, shorten
from ..parallel import optimizer_checks as elementwise
from ..parallel.axis import PlanInputs
from ..parallel.data_strategy import DataStrategy
from ..parallel.registries import AXES
from . import compilation

if TYPE_CHECKING:
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
    if dims.dp > 1 or strategy.shards_model or not all(axis.same_rng for axis in used.values()):
        problems += _find_limited_rows(model)
    splits_params = strategy.shards_state or any(axis.splits_params for axis in used.values())
    if splits_params and not is_elementwise(optimizer):
        problem = elementwise.find_problem(optimizer)  # of a third party's optimizer: by trying it
        problems += [] if problem is None else [problem]
    compiled: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    if config.compile.enabled:
        checkpoints = config.activation_checkpoint.enabled
        compiled, more = compilation.resolve_compiled(model, config.compile, dims.world_size, partition, checkpoints)
        problems += more
    if config.activation_checkpoint.enabled:
        recomputed, more = compilation.resolve_recomputed(model, config.activation_checkpoint, partition, compiled)
        problems += more
    problems += strategy.find_problems(model, setup.recipe.param_dtype)
    if problems:
        keys = [f"parallel.{name}" for name in axes]
        keys += ["parallel.data"] if strategy.shards_state else []
        keys += ["compile"] if config.compile.enabled else []
        keys += ["activation_checkpoint"] if config.activation_checkpoint.enabled else []
        keys = keys or ["parallel.data"]
        keys = [", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys
        raise IncompatibleConfigError(problems, f"{' and '.join(keys)} with this model and optimizer")
    blocks = tuple(compilation.find_blocks(model)) if strategy.shards_model else ()
    return Plans(axes, strategy, partition, blocks, compiled, recomputed)


def _find_limited_rows(model: nn.Module) -> Iterator[str]:
    tables = (nn.Embedding, nn.EmbeddingBag)
    limited = [name for name, m in model.named_modules() if isinstance(m, tables) and m.max_norm is not None]
    if limited:
        yield (
            f"{shorten(limited)}: max_norm makes forward write into the rows that are looked up. Each rank looks up "
            "other ones, so that the ranks' weights would differ, and under fsdp what is written is lost; build it "
            "without max_norm, and limit the rows where they are used (rows * (limit / rows.norm(dim=-1, "
            "keepdim=True)).clamp(max=1))"
        )
