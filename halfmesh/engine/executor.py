"""Forward and criterion of the loop where no pipeline splits the model; the scope of their random numbers; warnings of
calls that bypass them; and as many calls on each data rank in an evaluation, where each forward needs all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..amp.recipe import Recipe
from ..config.composition import Setup
from ..errors import InputError
from ..parallel.rng import generator_of
from ..utils.engine_hook import EngineHook
from ..utils.log import get_logger
from ..utils.tensors import tensors_of
from .accumulation import Accumulation

if TYPE_CHECKING:
    from ..data.loader import EngineDataLoader
    from ..data.sharding import ShardedLoader
    from .engine import Engine
    from .parallelize import ParallelModel

_log = get_logger(__name__)

_FEW = (
    "the evaluation loader has no batch for some of the %d data ranks, but each forward needs all of them (fsdp, "
    "expert); use more samples, a smaller batch size, drop_last=False, or fewer ranks"
)
_DIRECT = (
    "%s itself was called in training, not the engine: it does not compute in the config's dtypes, and ranks that "
    "share a batch draw different dropout. Replace model(x) by engine(x); other computations belong into autocast()"
)
_PARTS = (
    "%s.state_dict() has only this rank's part. To save all of it, call engine.save(path), engine.save_weights(path) "
    "or engine.full_state_dict() on every rank, before the engine is closed"
)


class ModelRNG:
    """The random numbers of the model's forward in training, on several ranks, as a scope: a separate sequence, so that
    ranks of a tensor group drop the same elements and data ranks different ones, even if user code of one rank draws
    (to log a sample, for example). The user's generator continues as if the model had drawn nothing.

    Args:
        seed: of `model_seed`, the same on all ranks of a tensor group.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._on_cuda, self._generator = device.type == "cuda", generator_of(device)
        self.state = torch.Generator(device).manual_seed(seed).get_state()
        """The state of the sequence between two forwards."""
        self._outside: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        """True within the scope."""
        return self._outside is not None

    def __enter__(self) -> None:
        if not (self._on_cuda and torch.cuda.is_current_stream_capturing()):  # a graph keeps its seed
            self._outside = self._generator.get_state()
            self._generator.set_state(self.state)

    def __exit__(self, *_: object) -> None:
        if self._outside is not None:
            self.state = self._generator.get_state()
            self._generator.set_state(self._outside)
            self._outside = None


@contextmanager
def random_numbers(
    parallel_model: ParallelModel, model: nn.Module, saving: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[None]:
    """The scope of a forward, or of a batch's passes through stages: in training the model draws from its own
    generators. (With stages in evaluation, too, where some modules may be in training mode.)"""
    random, trains = parallel_model.random, model.training or parallel_model.plans.partition is not None
    with ExitStack() as scopes:
        if random is not None and not random.is_open and trains:  # open: a criterion that calls the engine
            for settle in parallel_model.settles:  # a backward may have left a fork open, which must not be restored
                settle()
            if parallel_model.same_layers:
                scopes.enter_context(parallel_model.host_random)
            scopes.enter_context(random)
            for settle in parallel_model.settles:
                scopes.callback(settle)
        scopes.enter_context(saving())
        yield


class DirectExecutor:
    """Computes immediately: no pipeline splits the model."""

    stages = ()

    def __init__(self, parallel_model: ParallelModel, model: nn.Module, accumulation: Accumulation) -> None:
        self._model = model
        self._precision = accumulation.precision
        self._data = parallel_model.data
        self._sequences = parallel_model.sequences
        saving, is_alone = parallel_model.saving(model), parallel_model.random is None
        self._scope = saving if is_alone else partial(random_numbers, parallel_model, model, saving)
        self._same = parallel_model.same

    @property
    def forward(self) -> Callable[..., Any]:
        """Returns the model's output. (Not kept here: this object, referred to by itself, would outlive the engine.)"""
        return partial(self._call, self._model)

    def method(self, name: str) -> Callable[..., Any]:
        """The method `name` of the model, to be called as `forward` is.

        Raises:
            InputError: with `parallel.context`, gradients are on.
        """
        if self._sequences is not None and torch.is_grad_enabled():
            raise InputError(
                f"engine.call({name!r}): under parallel.context only forward can be trained; call this method under "
                "torch.no_grad()"
            )
        return partial(self._call, self._data.method(self._model, name))

    def _call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        for ranks in self._same:
            ranks.compare_inputs(self._model.training, args, kwargs)
        with self._scope():
            output = self._precision.forward(function, *args, **kwargs)
        for ranks in self._same:
            ranks.compare_outputs(self._model.training, output)
        return output

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value."""
        if self._same and self._model.training and torch.is_grad_enabled():
            targets = [tensor for tensor in tensors_of((args, kwargs)) if not tensor.requires_grad]
            for ranks in self._same if targets else ():  # not the outputs, which are equal but for rounding
                ranks.compare_inputs(True, targets, {}, of="targets")
        return self._precision.criterion(criterion, *args, **kwargs)


@dataclass(frozen=True)
class UncopiedHook:
    """A hook on a module; in a copy of the module it does nothing."""

    call: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> Any:
        return UncopiedHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """Replaces the hook in a copy."""


class ModelGuard:
    """Warns of calls of `model` in training, and of state dicts of shards, that the engine did not make.

    It is a scope, in which the engine itself calls model or optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, recipe: Recipe, parallel_model: ParallelModel
    ) -> None:
        self._own_calls = 0
        self._told: set[str] = set()
        self._needs_engine = bool(parallel_model.axes) or recipe.param_dtype is not None  # or an autocast scope
        self.remove: Callable[[], None] = lambda: None
        """Removes the hook on calls; those on state dicts stay."""
        casts = bool(recipe.autocast or recipe.param_dtype or recipe.output_dtype)
        if parallel_model.plans.partition is None and (casts or parallel_model.axes):  # stages reject it themselves
            self.remove = model.register_forward_pre_hook(UncopiedHook(self._check_call)).remove
        if parallel_model.divides_model:
            model.register_state_dict_pre_hook(UncopiedHook(lambda *_: self._warn(_PARTS, "model")))
        if parallel_model.divides:
            optimizer.register_state_dict_pre_hook(UncopiedHook(lambda *_: self._warn(_PARTS, "optimizer")))

    def __enter__(self) -> None:
        self._own_calls += 1

    def __exit__(self, *_: object) -> None:
        self._own_calls -= 1

    def _warn(self, text: str, what: str) -> None:
        if not self._own_calls and what not in self._told:
            self._told.add(what)
            _log.warning(text, what, ranks=None if text is _DIRECT else (0,))

    def _check_call(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # compiled code leaves it out
            return
        is_right = not self._needs_engine and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        if module.training and torch.is_grad_enabled() and not is_right:
            self._warn(_DIRECT, "the model")


def even_out(loader: EngineDataLoader, engine: Engine) -> EngineDataLoader:
    """`loader`, for evaluation: where data ranks meet in forward, its epochs end with as many calls on each."""
    if Setup.of(engine.config, engine.context.size).meets_in_forward:
        loader.even = partial(_evened, weakref.ref(engine))  # the engine has the loader
    return loader


def _evened(engine_of: weakref.ref[Engine], batches: Iterator[Any], loader: ShardedLoader) -> Iterator[Any]:
    """`batches`; at their end a rank that has fewer repeats the calls of its last one, so that nobody sees what they
    return. (After a `break` it makes none.)

    Raises:
        InputError: some rank has no batch; on all ranks, if the loader's sampler has a length.
    """
    engine = engine_of()
    assert engine is not None, "its loader is iterated"
    last, has_batch = _Calls(engine), False
    with engine._hooks.added(last):
        for batch in batches:
            if loader.some_have_none:  # known since the first batch was asked for
                raise InputError(_FEW % engine.context.dp_size)
            last.calls, has_batch = [], True
            yield batch
    if loader.missing and not has_batch:
        raise InputError(_FEW % engine.context.dp_size)
    if not last.is_evaluation:
        return
    for has_grad, method, args, kwargs in last.calls * loader.missing:
        with torch.set_grad_enabled(has_grad):  # fsdp keeps weights gathered for a backward
            if method is None:
                engine(*args, **kwargs)
            else:
                engine.call(method, *args, **kwargs)


class _Calls(EngineHook):
    """The calls of one batch of an evaluation. Its iterator may be kept while the engine trains."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.global_step
        self.calls: list[tuple[bool, str | None, tuple[Any, ...], dict[str, Any]]] = []

    @property
    def is_evaluation(self) -> bool:
        """True until an update: a loop that trains between its batches continues with a new iterator, and calls."""
        return self._engine.global_step == self._step

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_training = self._engine.training and torch.is_grad_enabled()
        if self.is_evaluation and not is_training:
            self.calls.append((torch.is_grad_enabled(), method, args, kwargs))
