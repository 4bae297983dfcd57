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
from ..parallel.modules import is_within
from ..parallel.pipeline.pieces import children_of
from ..parallel.tensor.plans import generalise, near_names
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
    """Compile `modules` in place; `uncompile` undoes it. Nothing runs before their first call.

    Args:
        before: called before compiled code of a module, outside of it.
    """
    arguments = options.model_dump(include={"backend", "mode", "dynamic", "fullgraph"})
    for module in modules:
        forward = vars(module).get("forward")
        if isinstance(forward, Checkpointed):  # the recomputation has to run the same code
            forward.compiled = _after(partial(before, module), _compiled(forward.own, len(modules), arguments))
        else:
            _compile_in_place(module, len(modules), arguments, partial(before, module))


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
    if any(is_compiled(module) for module in model.modules()):
        return (), ["compile: the model is already compiled; pass it uncompiled, or remove compile"]
    blocks = called_blocks(model, partition)
    if blocks and (options.scope == "blocks" or (options.scope == "auto" and (ranks > 1 or checkpoints))):
        return blocks, []
    if options.scope != "blocks" and partition is None:
        return ("",), []
    return (), [
        f"compile: {type(model).__name__} has no repeated blocks that could be compiled (two or more modules of one "
        "class, with modules of their own, in a ModuleList or Sequential); "
        + ("use scope='model'" if partition is None else "remove compile, or the pipeline")
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
    candidates = {
        name
        for name, child in children.items()
        if is_called(child)
        and next(child.children(), None) is not None
        and not (isinstance(child, _ROWS) and within[name])
    }
    kinds = Counter(type(children[name]) for name in candidates if isinstance(model, _ROWS))
    for name, child in children.items():
        if name in candidates and kinds[type(child)] > 1:
            yield name
        else:
            yield from (f"{name}.{inner}" for inner in within[name])


def _compile_in_place(
    module: nn.Module, recompiles: int, arguments: dict[str, Any], before: Callable[[], None]
) -> None:
    """`module.compile()`, also for classes of torch (Sequential, TransformerEncoderLayer), whose `forward` torch before
    2.15 silently does not compile."""
    own: Callable[..., Any] = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    is_torchs = type(module).forward.__module__.partition(".")[0] == "torch"
    module._compiled_call_impl = _after(before, _compiled(call if is_torchs else own, recompiles, arguments))


def _after(before: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        before()
        return call(*args, **kwargs)

    return both


def _compiled(call: Callable[..., Any], recompiles: int, arguments: dict[str, Any]) -> Callable[..., Any]:
    """`torch.compile(call)` that sees hooks added to or removed from submodules, with `recompiles` times torch's limit
    of variants (8 for all modules together that share code; beyond it calls run uncompiled)."""
    from torch._dynamo import config as dynamo_config

    # torch reads these when it compiles, in one of the calls, and torch.compile has no arguments for them.
    limit = dynamo_config.recompile_limit * recompiles
    within = dynamo_config.patch(recompile_limit=limit, skip_nnmodule_hook_guards=False)
    result: Callable[..., Any] = within(torch.compile(call, **arguments))
    return result


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
                "whose next call may overwrite gradients that are still needed. Add up the losses of an update for one "
                "backward; evaluate after engine.step; or use mode='max-autotune-no-cudagraphs'"
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
    if options.patterns:
        names = _find_matches(model, options.patterns, partition, problems)
    elif not (names := list(called_blocks(model, partition))[:: options.every]):
        problems.append(_no_blocks(model, partition))
    if inside := [name for name in names if _is_below(name, compiled)]:
        problems.append(
            f"activation_checkpoint: {shorten(inside)} would be inside compiled code, which runs as a whole; choose "
            "whole blocks ('full', or patterns of blocks), or remove compile"
        )
    return ((), problems) if problems else (tuple(names), [])


def _find_matches(
    model: nn.Module, patterns: Sequence[str], partition: Partition | None, problems: list[str]
) -> list[str]:
    """The names of the outermost modules that match. Adds to `problems`."""
    called = {name: module for name, module in model.named_modules() if name and is_called(module)}
    passed_by = not_called(model, partition)
    found: set[str] = set()
    for pattern in patterns:
        names = {name for name in called if fnmatchcase(name, pattern)}
        why = ""
        if not names:
            rows = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
            why = f"only {shorten(rows)}, which is never called as a whole" if rows else "no module"
            why += near_names(f"{pattern}.*" if rows else pattern, called)
        elif names <= passed_by:
            why = f"{shorten(sorted(names))}, which is not called as a whole by a stage of the pipeline"
        if why:
            problems.append(f"activation_checkpoint: the pattern {pattern!r} matches {why}")
        found |= names - passed_by
    return [name for name in called if name in found and not _is_below(name, found)]


def _no_blocks(model: nn.Module, partition: Partition | None) -> str:
    passed_by = {"", *not_called(model, partition)}
    called = (name for name, module in model.named_modules() if is_called(module) and name not in passed_by)
    general = list(dict.fromkeys(map(generalise, called)))
    whole = "" if partition is None else " that a stage of the pipeline calls as a whole"
    example = general[0] if general else "encoder"
    return (
        f"activation_checkpoint: {type(model).__name__} has no repeated blocks{whole}; name the modules: "
        f"activation_checkpoint = dict(patterns=[{example!r}]); it has {shorten(general, 12)}"
    )


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(is_within(name, other) and name != other for other in others)
