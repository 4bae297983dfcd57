"""initialize(): config -> check -> context -> model -> precision -> engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from .. import compat
from ..amp.convert import convert
from ..amp.plugin import AMP_PLUGINS
from ..amp.precision import Precision
from ..amp.recipe import Recipe, UpdateOptions
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.preemption import PreemptionHook, find_resumed
from ..checkpoint.state import ShardedState
from ..config.composition import Setup, batch_size, find_advice
from ..config.config import Config
from ..data.loader import EngineDataLoader
from ..data.sharding import ShardedLoader
from ..debug.nonfinite import NonFiniteProbes
from ..debug.probes import Criterion
from ..distributed.failures import recorded_for_torchrun
from ..errors import IncompatibleConfigError, InputError, problem_list
from ..parallel.comm import same_on_ranks
from ..parallel.mesh import ParallelContext
from ..parallel.reducer import Reduction
from ..utils.engine_hook import Hooks, Progress
from ..utils.log import get_logger
from ..utils.optimizer_state import join_optimizers, move_state, parts_of
from ..utils.torch_private import has_no_memory
from . import deferred, inputs
from . import launch as launchers
from .accumulation import Accumulation
from .compilation import GraphSteps
from .ema import WeightAverage
from .engine import Engine
from .executor import DirectExecutor, ModelGuard, UncopiedHook, even_out
from .guards import ForwardWrites, GradientGuard, SameTrained
from .hints import ChangedBuffers, CountedBatches, SameInputs, tell_of_slow_products
from .launch import Launch
from .lr_scheduler import LRAdvance, make_schedulers
from .parallelize import ParallelModel, Plans, make_plans
from .summary import make_plan

_log = get_logger(__name__)


@dataclass
class _Given:
    """The user's objects."""

    model: Any
    optimizer: Any
    criterion: Any
    dataloader: Any
    eval_dataloader: Any
    lr_scheduler: Any
    sharded: bool


@recorded_for_torchrun()
def initialize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: optim.Optimizer | Sequence[optim.Optimizer] | Callable[..., Any],
    criterion: Callable[..., Any] | None = None,
    dataloader: Any = None,
    config: str | Path | Mapping[str, Any] | Config | Launch | None = None,
    *,
    eval_dataloader: Any = None,
    lr_scheduler: Any = None,
    device: torch.device | str | None = None,
    sharded: bool = False,
) -> Engine:
    """Make a model, an optimizer and a config into an engine.

    Everything is checked first: an error names all problems and leaves your arguments untouched. Then the model moves
    to the device, gets rank 0's weights, and is sharded and cast in place; the optimizer steps fp32 masters if the mode
    keeps them. If something fails after that, such as `resume`, both are restored as by `close`, unless they are
    already sharded.

    Args:
        model: in fp32 (mode NAIVE also takes its own half precision), or a callable that builds it: then only this
            rank's shard gets memory, as with `halfmesh.deferred_init`.
        optimizer: a torch optimizer over `model.parameters()`, a list of several over different parameters, or a
            callable `params -> optimizer` (or list).
        criterion: called as `engine.criterion(...)`; usually (outputs, targets) -> scalar loss. If it has a method
            `set_context(context)`, that is called once with `engine.context`, so that the criterion can average over
            data ranks: `context.all_reduce(x, "dp", op="mean")`. Save its buffers with `engine.attach`.
        dataloader: training DataLoader, with the batch size of one data rank. It is sharded over the data ranks, unless
            its sampler shards already (DistributedSampler, timm's). Every rank reads all of an `IterableDataset` and
            trains on its turns, unless the dataset has `rank` and `world_size`, or an attribute `sharded = True`.
        config: path of a .py, .yaml or .json file, a dict, a Config, or the Launch that a `launch*` function returned.
            Without one, the engine trains in fp32.
        eval_dataloader: evaluation DataLoader, sharded without padding: each sample once.
        lr_scheduler: a scheduler of `optimizer`, or a callable `optimizer -> scheduler`, called with each of several
            optimizers; or a list of these, callables in the order of the optimizers. If a callable has a parameter
            `updates_per_epoch` without a default, it gets the number of updates in an epoch of `dataloader`.
        device: where to train; by default the device of the launch, or this rank's GPU, or the CPU if there is none.
        sharded: `dataloader` gives each data rank its own data, as some streams do. Each data rank must have equally
            many batches, or no end: a rank that runs out leaves the others waiting until `timeout`.

    Raises:
        ConfigError: mistakes in the config.
        IncompatibleConfigError: an unsupported combination, or one that does not fit model or device.
        InputError: arguments of the wrong kind; or no config, although this process launched with one.
    """
    given = _Given(model, join_optimizers(optimizer), criterion, dataloader, eval_dataloader, lr_scheduler, sharded)
    return _initialize(given, config, device)


def _initialize(given: _Given, config: Any, device: torch.device | str | None) -> Engine:
    launch = config if isinstance(config, Launch) else None
    if config is None:
        launchers.reject_forgotten()
    settings = launch.config if launch is not None else launchers.read_config({} if config is None else config)
    device = launch.device if launch is not None and device is None else launchers.choose_device(device)
    setup = Setup.of(settings, launchers.expected_world_size())
    compat.raise_for(compat.check_setup(setup, device.type))
    if settings.global_batch_size is not None:
        setup = setup.accumulate(batch_size(given.dataloader))
        compat.raise_for(compat.check_setup(setup, device.type))  # with the length of a cycle
    settings = setup.config
    with ExitStack() as undo:  # after an error the model can be given again
        _build(given, undo, setup, device)
        plans = _reject_problems(given, setup, device)
        alone = plans.strategy.shards_model
        group = launchers.ensure_process_group(settings, device, setup.dims.rank_names, alone)
        context = ParallelContext(setup.dims, device, group, settings.timeout)
        same_on_ranks(
            {key: getattr(settings, key) for key in type(settings).model_fields},
            what="the ranks have different configs ({ranks} another one than rank 0); start all ranks with the same "
            "config",
        )
        loaders = [
            None if loader is None else ShardedLoader(loader, context, training, sharded=training and given.sharded)
            for loader, training in ((given.dataloader, True), (given.eval_dataloader, False))
        ]
        late = deferred.make_materializer(given.model, context, inputs.overflow_check(given.model, setup.recipe))
        undo.pop_all()
    inputs.broadcast_initial_state(context, given.model, given.optimizer)
    ends = ExitStack()  # what closes the engine
    try:
        engine = _make_engine(given, setup, context, loaders, plans, late, ends)
        _log.info("%s", engine.plan)
        for advice in find_advice(setup) if setup.dims.grad_ranks > 1 else ():
            _log.info("advice: %s", advice)
        if context.device.type == "cuda":
            tell_of_slow_products(setup.recipe, context.device)
        owner = group if launch is None else launch.group
        if owner is not None:
            owner.failures.watch(engine, engine._progress)
        context.begin_calls(owner)
        if settings.resume is not None and (folder := find_resumed(settings, context)) is not None:
            engine.load(folder)
    except BaseException as error:
        if plans.axes or plans.strategy.shards_state:
            error.add_note("model and optimizer are already sharded: build new ones before you call initialize again")
        ends.__exit__(type(error), error, None)
        raise
    if group is not None:
        group.join(context)  # not earlier: a rejected call closes nothing
    return engine


def _make_engine(
    given: _Given,
    setup: Setup,
    context: ParallelContext,
    loaders: list[ShardedLoader | None],
    plans: Plans,
    late: deferred.Materializer | None,
    ends: ExitStack,
) -> Engine:
    """Parallelize and cast the model, and make the engine. From here on the user's objects change; `ends` gives them
    back."""
    config, recipe, model = setup.config, setup.recipe, given.model
    ends.push(lambda kind, *_: context.close() if kind is None else context.leave())
    # Before the model goes to the device, which may not have room for all of it.
    parallel_model = ParallelModel(model, given.optimizer, plans, config, context)
    shards = parallel_model.make_shards(model, given.optimizer, given.criterion, recipe, late)
    ends.callback(parallel_model.close)
    move_state(given.optimizer)
    precision, options, data = _precision(config, recipe, context.device), _update_options(config), parallel_model.data
    device = torch.device("cpu") if data.steps_on_host(config.parallel.data) else context.device
    update = convert(model, given.optimizer, shards, precision, context, options, device, data.publisher)
    ends.callback(update.close, undo=not parallel_model.divides)
    parallel_model.step_whole(update)
    trained, reductions = update.master_weights.trained, list[Reduction]()
    scaled, weighted = update.loss_scales.scale is not None, config.loss_reduction == "weighted"
    withholds = scaled or weighted or bool(parallel_model.axes)
    if context.dims.grad_ranks > 1 or data.shards_model:
        reductions.append(data.make_reducer(trained, dict(model.named_buffers()), withholds))
    reductions += parallel_model.make_reductions(trained)
    reducer = Reduction(reductions) if len(reductions) > 1 else next(iter(reductions), None)
    if reducer is not None:
        ends.callback(reducer.close)
    cycle = config.gradient_accumulation, config.loss_reduction
    has_divisor, in_part = config.gradient_accumulation > 1 or weighted, parallel_model.partial_gradients(withholds)
    in_shards = bool(parallel_model.axes.keys() - {"context"})  # whose ranks hold all parameters
    gradients = GradientGuard(update, model, in_shards, has_divisor, in_part)
    accumulation = Accumulation(update, precision, gradients, *cycle, context, reducer, SameTrained(update, context))
    executor: DirectExecutor | PipelineExecutor
    if "pipeline" in parallel_model.axes:
        from .pipeline_executor import PipelineExecutor

        piped = config.parallel.pipeline, setup.meets_in_forward
        executor = PipelineExecutor(parallel_model, model, accumulation, context, *piped)
    else:
        executor = DirectExecutor(parallel_model, model, accumulation)
    parallel_model.checkpoint_and_compile(model)
    lr = LRAdvance(given.lr_scheduler, config.lr_interval, may_skip=update.skips_nonfinite)
    state = ShardedState(model, update, parallel_model, WeightAverage(update, model))
    progress, hooks = Progress(), Hooks()
    ends.callback(state.average.values.clear)
    guard = ModelGuard(model, update.optimizer, recipe, parallel_model)
    ends.callback(guard.remove)
    train, evaluation = loaders
    needs_end = config.gradient_accumulation > 1  # with 1, each batch ends its cycle
    follows = lr.end_epoch, needs_end, partial(hooks.run, "before_fetch")
    train_loader = None if train is None else EngineDataLoader(train, context, config.seed, *follows)
    eval_loader = None if evaluation is None else EngineDataLoader(evaluation, context, config.seed)
    checkpointer = Checkpointer(state, context, config, progress, lr, train_loader, guard)
    ends.callback(checkpointer.close)
    ends.callback(accumulation.clear)
    criterion, preemption = Criterion(given.criterion), None
    if hasattr(given.criterion, "set_context"):
        if context.size > 1:
            context.group("dp")  # now, by all ranks: under a pipeline the last stage alone calls the criterion
        given.criterion.set_context(context)
    ends.push(lambda kind, error, _: hooks.close(error))
    if config.debug == "sync" and context.size > 1:
        from ..debug.sync_check import SyncCheck

        hooks.add(SyncCheck(state, context, progress, train_loader))
    if not any(map(has_no_memory, model.parameters())):  # as in a dry run
        hooks.add(ForwardWrites(state, context))
    probed = state.model, state.parallel_model, executor.stages, criterion
    probes = NonFiniteProbes(*probed, accumulation=accumulation, context=context, config=config, progress=progress)
    probes.watch(config.debug == "nonfinite", hooks)
    if config.compile.graphs:
        hooks.add(graphs := GraphSteps(config.compile, accumulation))
        if model not in parallel_model.compiled:
            ends.callback(model.register_forward_pre_hook(UncopiedHook(graphs.mark)).remove)
    if config.gradient_accumulation > 1:
        hooks.add(CountedBatches(model, train_loader, accumulation.length, hooks))
    if context.dp_size > 1:
        hooks.add(ChangedBuffers(model, hooks))
    if (train is None or train.own_data) and context.dp_size > 1:
        hooks.add(SameInputs(model, context, hooks))
    if config.checkpoint is not None:

        def is_between_steps() -> bool:
            return not (update.has_gradients or accumulation.averaged)

        both = train_loader, eval_loader
        preemption = PreemptionHook(config.checkpoint, model, context, progress, is_between_steps, both, checkpointer)
        hooks.add(preemption)
    engine = Engine(
        context=context,
        config=config,
        plan=make_plan(config, context, state, lr, recipe, given.dataloader),
        _state=state,
        _progress=progress,
        _criterion=criterion,
        _accumulation=accumulation,
        _executor=executor,
        _guard=guard,
        _lr=lr,
        _dataloader=train_loader,
        _eval_dataloader=eval_loader,
        _hooks=hooks,
        _probes=probes,
        _checkpointer=checkpointer,
        _preemption=preemption,
        _ends=ends,
    )
    if eval_loader is not None:
        even_out(eval_loader, engine)
    if config.profile_ranges:
        from .ranges import add_ranges

        add_ranges(engine)
    return engine


def _build(given: _Given, undo: ExitStack, setup: Setup, device: torch.device) -> None:
    """Call the model, optimizer and scheduler that were given as callables."""
    if not isinstance(given.model, nn.Module) and callable(given.model):
        given.model = deferred.build(given.model)
    if isinstance(given.model, nn.Module):
        deferred.convert_to_meta(given.model, given.optimizer, undo)
        if callable(given.optimizer) and not isinstance(given.optimizer, optim.Optimizer):
            made = given.optimizer(list(given.model.parameters()))  # a callable may go through them twice
            given.optimizer = join_optimizers(made)
    deferred.reject_early_state(given.optimizer)
    if isinstance(given.optimizer, optim.Optimizer):
        count = partial(launchers.count_updates, given.dataloader, setup, device, given.sharded)
        given.lr_scheduler = make_schedulers(given.lr_scheduler, parts_of(given.optimizer), count)


def _reject_problems(given: _Given, setup: Setup, device: torch.device) -> Plans:
    """Raise if anything is wrong with the arguments. Returns the plans to parallelize the model."""
    config, recipe = setup.config, setup.recipe
    unfit = inputs.find_device_problem(device, recipe) or _precision(config, recipe, device).find_problem()
    if unfit:
        raise IncompatibleConfigError([unfit])
    others = given.dataloader, given.eval_dataloader, given.lr_scheduler, given.optimizer, config
    problems = [*inputs.find_problems(given.model, given.optimizer, given.criterion, recipe, device)]
    problems += inputs.find_other_problems(*others)
    if problems:
        raise InputError(problem_list(problems, "what was passed to initialize"))
    return make_plans(given.model, given.optimizer, given.criterion, given.dataloader, setup)


def _precision(config: Config, recipe: Recipe, device: torch.device) -> Precision:
    if config.precision is None:
        return Precision(recipe, device)
    return AMP_PLUGINS.get(config.precision.mode).precision(config.precision.options, recipe, device)


def _update_options(config: Config) -> UpdateOptions:
    return UpdateOptions(
        max_norm=config.clip_grad_norm.max_norm,
        norm_type=config.clip_grad_norm.norm_type,
        on_nonfinite=config.on_nonfinite,
        max_consecutive_skips=config.max_consecutive_skips,
        track_grad_norm=config.track_grad_norm,
        fused=config.fused,
        wide_gradients=config.gradient_dtype == "float32",
        name=config.name,
    )
