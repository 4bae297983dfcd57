"""The key `activation_checkpoint`: which modules are recomputed in backward, and whether that works here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from .compilation import Compilation, called_blocks
from .errors import shorten
from .parallel.activations.checkpoint import Checkpointed
from .parallel.activations.offload import Offload
from .parallel.tensor.plans import generalise, near_names

if TYPE_CHECKING:
    from .config.activations import CheckpointConfig
    from .parallel.pipeline.partition import Partition

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes by which Hugging Face's and timm's modules checkpoint themselves."""


@dataclass(frozen=True)
class Activations:
    """The modules whose activations are recomputed.

    Attributes:
        names: of the modules; none contains another.
        options: the config's.
    """

    names: tuple[str, ...]
    options: CheckpointConfig

    def apply(self, model: nn.Module, offload: Offload | None, is_here: Callable[[str], bool]) -> list[Checkpointed]:
        """Wrap, in place, the modules of `model` that this rank computes.

        Args:
            offload: moves what is saved to the host; None: nothing is moved.
            is_here: whether this rank computes the module of this name.

        Returns:
            The replacements of their forwards; `remove` undoes them.
        """
        saving = nullcontext if offload is None else offload.inputs
        modules = dict.fromkeys(model.get_submodule(name) for name in self.names if is_here(name))
        return [Checkpointed(module, self.options.selective, saving) for module in modules]


def resolve(
    model: nn.Module, options: CheckpointConfig, partition: Partition | None, compiled: Compilation | None
) -> tuple[Activations | None, list[str]]:
    """The modules of `model` to recompute, or every reason why that is not possible.

    Args:
        partition: how a pipeline splits the model, if one does.
        compiled: its compiled modules.
    """
    problems = list(_find_own(model))
    if options.patterns:
        names, more = _find_matches(model, options.patterns, partition)
        problems += more
    else:
        blocks = called_blocks(model, partition)
        names = list(dict.fromkeys(blocks))[:: options.every]
        if not names:
            problems.append(_no_blocks(model, partition))
    inside = [name for name in names if compiled is not None and _is_within(name, compiled.names)]
    if inside:
        problems.append(
            f"activation_checkpoint: {shorten(inside)} would be inside compiled code, which is entered and left as a "
            "whole; choose whole blocks ('full', or patterns of blocks), or leave compile out"
        )
    return (None, problems) if problems else (Activations(tuple(names), options), [])


def _find_matches(
    model: nn.Module, patterns: Sequence[str], partition: Partition | None
) -> tuple[list[str], list[str]]:
    """Names of the outermost modules that match; and what is wrong."""
    called = {name: module for name, module in model.named_modules() if name and _is_called(module)}
    passed_by = _not_called(model, partition)
    found: set[str] = set()
    problems: list[str] = []
    for pattern in patterns:
        names = {name for name in called if fnmatchcase(name, pattern)}
        if not names:
            rows = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
            why = f"only {shorten(rows)}, which is never called as a whole" if rows else "no module"
            near = near_names(f"{pattern}.*" if rows else pattern, called)
            problems.append(f"activation_checkpoint: the pattern {pattern!r} matches {why}{near}")
        if names and names <= passed_by:
            problems.append(
                f"activation_checkpoint: the pattern {pattern!r} matches {shorten(sorted(names))}, which is not called "
                "as a whole by a stage of the pipeline; name modules below it"
            )
        found |= names - passed_by
    return [name for name in called if name in found and not _is_below(name, found)], problems


def _no_blocks(model: nn.Module, partition: Partition | None) -> str:
    passed_by = _not_called(model, partition)
    called = (name for name, module in model.named_modules() if _is_called(module) and name not in passed_by)
    general = list(dict.fromkeys(generalise(name) for name in called if name))
    whole = "" if partition is None else " that a stage of the pipeline calls as a whole"
    example = general[0] if general else "encoder"
    return (
        f"activation_checkpoint: {type(model).__name__} has no repeated blocks{whole} (two or more modules of one "
        "class, with modules of their own, in a ModuleList or Sequential); name the modules: activation_checkpoint = "
        f"dict(patterns=[{example!r}]); it has {shorten(general, 12)}"
    )


def _find_own(model: nn.Module) -> Iterator[str]:
    """Modules that would be recomputed twice."""
    own = [n or "the model" for n, m in model.named_modules() if any(getattr(m, flag, None) is True for flag in _FLAGS)]
    if own:
        yield (
            f"activation_checkpoint: the model already checkpoints itself ({shorten(own)}), and would recompute these "
            "twice; switch that off with model.gradient_checkpointing_disable() (Hugging Face) or "
            "model.set_grad_checkpointing(False) (timm), or leave activation_checkpoint out"
        )


def _not_called(model: nn.Module, partition: Partition | None) -> set[str]:
    """The modules that no stage of a pipeline calls as a whole."""
    return set() if partition is None else {name for name, _ in partition.not_called(model)}


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_below(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))


def _is_within(name: str, compiled: Sequence[str]) -> bool:
    return "" in compiled or _is_below(name, set(compiled))
