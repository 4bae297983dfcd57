"""The key `compile`: which modules are compiled, whether that can work here, and compiling them in place.

`module.compile()` changes no module and no name, and copies of the model are not compiled. Hooks, random numbers and
what is sent between ranks stay outside of the compiled code (`torch.compiler.disable`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._torch import is_compiled
from .parallel.pipeline.block_partition import children_of
from .parallel.recompute import Checkpointed

if TYPE_CHECKING:
    from .config.schema import CompileConfig
    from .parallel.pipeline.partition import Partition

_ROWS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Compilation:
    """What is compiled, and how.

    Attributes:
        names: of the modules; "" is the model itself.
        options: the config's.
    """

    names: tuple[str, ...]
    options: CompileConfig

    def apply(self, model: nn.Module, is_here: Callable[[str], bool]) -> list[nn.Module]:
        """Compile those modules of `model` in place that this rank computes. Nothing runs before their first call.

        Args:
            is_here: whether it computes the module of this name.

        Returns:
            The modules; `uncompile` undoes it.
        """
        options = self.options
        modules = list(dict.fromkeys(model.get_submodule(name) for name in self.names if is_here(name)))
        arguments: dict[str, Any] = {
            "backend": options.backend,
            "mode": options.mode,
            "dynamic": options.dynamic,
            "fullgraph": options.fullgraph,
        }
        for module in modules:
            forward = vars(module).get("forward")
            if isinstance(forward, Checkpointed):  # what is computed again has to be the same code
                forward.compiled = compiled(forward.own, len(modules), **arguments)
            else:
                compile_in_place(module, len(modules), **arguments)
        return modules


def resolve(
    model: nn.Module, options: CompileConfig, ranks: int, partition: Partition | None, checkpoints: bool = False
) -> tuple[Compilation | None, list[str]]:
    """What is compiled of `model`, or every reason why it cannot be.

    Under several ranks the blocks, if there are any: gradients of one graph come all at once, when its backward ends,
    and with several graphs they are sent while backward runs.

    Args:
        ranks: of all axes together.
        partition: how a pipeline cuts the model, if one does. Its stages call blocks, and not the model.
        checkpoints: whether activations are computed again, of modules that may be compiled, and may not be in one.
    """
    if any(is_compiled(module) for module in model.modules()):
        return None, ["compile: the model is compiled already; pass it uncompiled, or leave compile out"]
    blocks = called_blocks(model, partition)
    if blocks and (options.scope == "blocks" or (options.scope == "auto" and (ranks > 1 or checkpoints))):
        return Compilation(blocks, options), []
    if options.scope != "blocks" and partition is None:
        return Compilation(("",), options), []
    return None, [
        f"compile: {type(model).__name__} has no repeated blocks that could be compiled (two or more modules of one "
        "class, with modules of their own, in a ModuleList or Sequential); "
        + ("use scope='model'" if partition is None else "leave compile out, or the pipeline")
    ]


def called_blocks(model: nn.Module, partition: Partition | None) -> tuple[str, ...]:
    """The repeated blocks of `model`, without those that no stage of a pipeline calls."""
    blocks = tuple(find_blocks(model))
    if partition is None:
        return blocks
    passed_by = {name for name, _ in partition.not_called(model)}
    return tuple(name for name in blocks if name not in passed_by)


def find_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the repeated blocks: modules of one class, with submodules of their own, that stand next to each other
    in a ModuleList or Sequential. Where such lists are nested, the blocks are the outermost modules that are not lists
    of blocks themselves."""
    children = {name: model.get_submodule(name) for name in children_of(model)}
    within = {name: list(find_blocks(child)) for name, child in children.items()}
    kinds: Counter[type[nn.Module]] = Counter()
    if isinstance(model, _ROWS):
        kinds.update(type(child) for name, child in children.items() if _may_be_block(child, within[name]))
    for name, child in children.items():
        if _may_be_block(child, within[name]) and kinds[type(child)] > 1:
            yield name
        else:
            yield from (f"{name}.{inner}" for inner in within[name])


def find_device_problem(options: CompileConfig, device: torch.device) -> str | None:
    """Why the backend cannot generate code for this device."""
    if options.backend != "inductor":
        return None
    if device.type == "cuda":
        if find_spec("triton") is not None:
            return None
        return (
            f"compile: backend='inductor' needs triton for {device}, which is not installed; install triton, use "
            "another backend ('aot_eager' generates no code), or leave compile out"
        )
    compiler = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))  # as inductor does
    if shutil.which(compiler) is not None:
        return None
    return (
        f"compile: backend='inductor' needs a C++ compiler for the CPU, and {compiler!r} was not found; install it, or "
        "name one in the environment variable CXX; or use another backend ('aot_eager' generates no code), or leave "
        "compile out"
    )


def _may_be_block(module: nn.Module, within: list[str]) -> bool:
    """Not a single layer, not a list or dict that nobody calls, and not a row of blocks."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(True for _ in module.children()) and not (isinstance(module, _ROWS) and within)


# -- in place --------------------------------------------------------------------------------------------------------


def compile_in_place(module: nn.Module, recompiles: int, **options: Any) -> None:
    """`module.compile(**options)` with the differences of `compiled`; also where `forward` is torch's own (Sequential,
    TransformerEncoderLayer), which torch before 2.15 silently does not compile."""
    call: Any = module._call_impl
    if type(module).forward.__module__.partition(".")[0] == "torch":
        inner = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

    module._compiled_call_impl = compiled(call, recompiles, **options)


def compiled(call: Callable[..., Any], recompiles: int, **options: Any) -> Callable[..., Any]:
    """`torch.compile(call, **options)` with two differences: hooks that come and go on modules within are noticed; and
    torch's limit on variants of one piece of code (8, for all modules that share it together) is `recompiles` times as
    high, after which calls run uncompiled."""
    from torch._dynamo import config as dynamo_config

    # torch reads these when it compiles, in one of the calls, and torch.compile has no arguments for them.
    limit = dynamo_config.recompile_limit * recompiles
    within = dynamo_config.patch(recompile_limit=limit, skip_nnmodule_hook_guards=False)
    result: Callable[..., Any] = within(torch.compile(call, **options))
    return result


def uncompile(module: nn.Module) -> None:
    """Undo `compile_in_place`."""
    module._compiled_call_impl = None
