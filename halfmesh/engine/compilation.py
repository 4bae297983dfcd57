"""The keys `compile` and `activation_checkpoint`: find the modules to compile, and those to recompute in backward.

`module.compile()` keeps modules and their names, and copies of the model are not compiled. Hooks, random numbers and
communication stay outside of the compiled code (`torch.compiler.disable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError, shorten
from ..parallel.pipeline.partition import children_of
from ..parallel.tensor.plans import near_names
from ..parallel.trial import is_within
from ..utils.engine_hook import EngineHook
from ..utils.torch_private import is_compiled
from .recompute import Checkpointed

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..config.schema import ActivationCheckpointConfig, CompileConfig
    from ..parallel.pipeline.partition import Partition
    from .accumulation import Accumulation

_ROWS = (nn.ModuleList, nn.Sequential)


def compile_modules(modules: Sequence[nn.Module], options: CompileConfig, before: Callable[[nn.Module], None]) -> None:
    """Compile `modules` in place. Nothing runs before their first call.

    Args:
        before: called before compiled code of a module, outside of it.
    """
    arguments = options.model_dump(include={"backend", "mode", "dynamic", "fullgraph"})
    for module in modules:
        forward = vars(module).get("forward")
        if isinstance(forward, Checkpointed):  # the recomputation has to run the same code
            forward.compiled = _compiled(forward.own, partial(before, module), len(modules), arguments)
        else:  # `module.compile()`
            is_torchs = type(module).forward.__module__.partition(".")[0] == "torch"
            call = _within_function(module._call_impl) if is_torchs else module._call_impl
            module._compiled_call_impl = _compiled(call, partial(before, module), len(modules), arguments)


def resolve_compiled(
    model: nn.Module, options: CompileConfig, ranks: int, partition: Partition | None, checkpoints: bool
) -> tuple[tuple[str, ...], list[str]]:
    """The names of the modules of `model` to compile ("" is the model itself), or all problems.

    With several ranks these are the repeated blocks, if there are any: the gradients of a graph are ready only when all
    of its backward has run, and with one graph per block they are sent while backward goes on.

    Args:
        ranks: the number of ranks of all axes together.
        partition: how a pipeline splits the model, if one does. Its stages call blocks, and not the model.
        checkpoints: modules are recomputed in backward; these may be compiled, but not as part of a larger graph.
    """
    if any(map(is_compiled, model.modules())):
        return (), ["compile: the model is already compiled; pass it uncompiled, or remove compile"]
    blocks = called_blocks(model, partition)
    if blocks and (options.scope == "blocks" or (options.scope == "auto" and (ranks > 1 or checkpoints))):
        return blocks, []
    if options.scope != "blocks" and partition is None:
        return ("",), []
    use = "use scope='model'" if partition is None else "remove compile, or the pipeline"
    return (), [
        f"compile: {type(model).__name__} has no repeated blocks (two or more modules of one class, with modules of "
        f"their own, in a ModuleList or Sequential); {use}"
    ]


def called_blocks(model: nn.Module, partition: Partition | None) -> tuple[str, ...]:
    """The repeated blocks of `model`, except those that no stage of a pipeline calls."""
    passed_by = not_called(model, partition)
    return tuple(name for name in find_blocks(model) if name not in passed_by)


def not_called(model: nn.Module, partition: Partition | None) -> set[str]:
    """The modules that no stage of a pipeline calls directly."""
    return set() if partition is None else {name for name, _ in partition.not_called(model)}


def is_called(module: nn.Module) -> bool:
    """Return True if the module can be called; lists and dicts of modules cannot."""
    return type(module).forward is not nn.Module.forward


def find_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the repeated blocks: modules of one class, with submodules, that follow each other in a ModuleList or
    Sequential. Of nested lists, the outermost modules that are not lists of blocks themselves."""
    children = {name: model.get_submodule(name) for name in children_of(model)}
    within = {name: list(find_blocks(child)) for name, child in children.items()}
    rows = {name for name, child in children.items() if isinstance(child, _ROWS) and within[name]}
    inner = {name for name, child in children.items() if is_called(child) and list(child.children())} - rows
    kinds = Counter(type(children[name]) for name in inner if isinstance(model, _ROWS))
    for name, child in children.items():
        is_block = name in inner and kinds[type(child)] > 1
        yield from [name] if is_block else [f"{name}.{found}" for found in within[name]]


def _within_function(own: Callable[..., Any]) -> Callable[..., Any]:
    """Of classes of torch (Sequential, TransformerEncoderLayer) torch before 2.15 silently does not compile `own`. (Of
    others it breaks no graph at FSDP's hooks if `own` is compiled itself.)"""
    return lambda *args, **kwargs: own(*args, **kwargs)


def _compiled(call: Callable[..., Any], before: Callable[[], None], recompiles: int, arguments: dict[str, Any]) -> Any:
    """`torch.compile(call)` that sees hooks added to or removed from submodules, with `recompiles` times torch's limit
    of variants (8 for all modules together that share code; beyond it calls run uncompiled)."""
    from torch._dynamo import config as dynamo_config

    # torch reads these when it compiles, in one of the calls, and torch.compile has no arguments for them.
    limit = dynamo_config.recompile_limit * recompiles
    within = dynamo_config.patch(recompile_limit=limit, skip_nnmodule_hook_guards=False)
    result = within(torch.compile(call, **arguments))

    def run(*args: Any, **kwargs: Any) -> Any:
        before()
        return result(*args, **kwargs)

    return run


def uncompile(module: nn.Module) -> None:
    """Undo `compile_modules` for a module."""
    module._compiled_call_impl = None


class GraphSteps(EngineHook):
    """Where compiled code runs in CUDA graphs, whose outputs and gradients last until the next generation of graphs.

    torch begins a generation with each compiled call that follows a backward or needs none. Of compiled blocks, the
    next one would overwrite what this one returns in evaluation, and recomputation what backward has left. So for
    blocks a generation begins with `mark`, at the first forward of an update and at each evaluation.

    Args:
        options: its `graphs` say what makes the graphs.
    """

    def __init__(self, options: CompileConfig, accumulation: Accumulation) -> None:
        [(key, value), *_] = options.graphs.items()
        self._name, self._accumulation, self._trains = f"compile.{key}={value!r}", accumulation, False

    def mark(self, model: nn.Module, _: Any) -> None:
        """Begin a generation; a hook before `model`'s forward."""
        if not self._trains:
            torch.compiler.cudagraph_mark_step_begin()
        self._trains = self._trains or (model.training and torch.is_grad_enabled())

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._accumulation.has_backward:
            raise InputError(
                f"the model was called between engine.backward and engine.step, but {self._name} makes CUDA graphs, "
                "whose next call may overwrite gradients. Add up the losses of an update for one backward, and "
                "evaluate after engine.step; or use mode='max-autotune-no-cudagraphs'"
            )

    def after_step(self, result: StepResult) -> None:
        self._trains = False


def resolve_recomputed(
    model: nn.Module, options: ActivationCheckpointConfig, partition: Partition | None, compiled: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """The names of the modules of `model` to recompute, none within another, or all problems.

    Args:
        partition: how a pipeline splits the model, if one does.
        compiled: the names of its compiled modules.
    """
    problems: list[str] = []
    passed_by, kind = not_called(model, partition), type(model).__name__
    called = [name for name, module in model.named_modules() if name and is_called(module)]
    names = list(called_blocks(model, partition))[:: options.every]
    if options.patterns:
        found: set[str] = set()
        for pattern in options.patterns:
            matching = {name for name in called if fnmatchcase(name, pattern)}
            if matching <= passed_by:
                what = f"{shorten(sorted(matching))}, which no stage of the pipeline calls as a whole"
                what = what if matching else f"no module that is called{near_names(pattern, called)}"
                problems.append(f"activation_checkpoint: the pattern {pattern!r} matches {what}")
            found |= matching - passed_by
        names = [name for name in called if name in found and not _is_below(name, found)]
    elif not names:
        known = near_names("", set(called) - passed_by)
        problems.append(f"activation_checkpoint: {kind} has no repeated blocks; name modules in `patterns`{known}")
    if inside := [name for name in names if _is_below(name, compiled)]:
        problems.append(
            f"activation_checkpoint: {shorten(inside)} would be inside compiled code; choose whole blocks ('full', or "
            "patterns of blocks), or remove compile"
        )
    return ((), problems) if problems else (tuple(names), [])


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(is_within(name, other) and name != other for other in others)
