"""The key `activation_checkpoint`: finds the modules to recompute in backward, and checks that they can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from ..errors import shorten
from ..parallel.tensor.plans import generalise, near_names
from .compilation import called_blocks, is_called, not_called

if TYPE_CHECKING:
    from ..config.schema import ActivationCheckpointConfig
    from ..parallel.pipeline.partition import Partition

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes by which Hugging Face's and timm's modules checkpoint themselves."""


def resolve(
    model: nn.Module, options: ActivationCheckpointConfig, partition: Partition | None, compiled: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """The names of the modules of `model` to recompute, none within another, or all problems.

    Args:
        partition: how a pipeline splits the model, if one does.
        compiled: the names of its compiled modules.
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
    inside = [name for name in names if "" in compiled or _is_below(name, set(compiled))]
    if inside:
        problems.append(
            f"activation_checkpoint: {shorten(inside)} would be inside compiled code, which is entered and left as a "
            "whole; choose whole blocks ('full', or patterns of blocks), or leave compile out"
        )
    return ((), problems) if problems else (tuple(names), [])


def _find_matches(
    model: nn.Module, patterns: Sequence[str], partition: Partition | None
) -> tuple[list[str], list[str]]:
    """The names of the outermost modules that match, and the problems."""
    called = {name: module for name, module in model.named_modules() if name and is_called(module)}
    passed_by = not_called(model, partition)
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
    passed_by = not_called(model, partition)
    called = (name for name, module in model.named_modules() if is_called(module) and name not in passed_by)
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


def _is_below(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))
