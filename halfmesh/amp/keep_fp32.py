"""Tensors that stay in fp32 when a model is cast: rotary frequencies, those the model names, those the config names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import nn

from ..errors import did_you_mean, shorten
from ..utils.tensors import parameter_names
from .recipe import HALF, Recipe

FREQUENCIES = ("*inv_freq", "*freqs", "inv_timescales", "bands", "periods")
"""Names of frequencies in transformers, timm and others: times a position they are an angle, which rounding moves by
radians. Such models compute angles in fp32, and cast sine and cosine to the dtype of what they rotate."""


def is_kept(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches the argument `name` of a call ("batch.t"), or one that contains it ("batch")."""
    heads = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    return any(fnmatchcase(head, pattern) for pattern in patterns for head in (*heads, name))


def kept_tensors(model: nn.Module, recipe: Recipe) -> Iterator[torch.Tensor]:
    """The parameters and buffers that `recipe` leaves in fp32."""
    yield from kept_by_name(model, recipe)
    # transformers and diffusers load these in fp32, and their code casts the other operand; the second also in bf16.
    keys = ["_keep_in_fp32_modules"] * (recipe.param_dtype == torch.float16) + ["_keep_in_fp32_modules_strict"]
    for module in model.modules() if _keeps(recipe) else ():
        words = {word for key in keys for word in getattr(module, key, None) or ()}
        pattern = "|".join(re.escape(word).replace(r"\*", ".*") for word in words)
        for name, tensor in named_tensors(module) if words else ():
            if re.search(rf"(^|\.)({pattern})($|\.)", name):
                yield tensor


def kept_by_name(model: nn.Module, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Those among them that match the config's patterns, or are frequencies that are not trained."""
    for name, tensor in named_tensors(model) if _keeps(recipe) else ():
        patterns = (*(recipe.keep_fp32 or ()), *(() if tensor.requires_grad else FREQUENCIES))
        if any(_matches(name, pattern) for pattern in patterns):
            yield tensor


def find_kept_problems(model: nn.Module, recipe: Recipe) -> Iterator[str]:
    """Patterns of the config that match nothing of `model`, where all of its arguments have names."""
    arguments, tensors = parameter_names(model), dict(named_tensors(model))
    for pattern in recipe.keep_fp32 or () if not any(name.startswith("*") for name in arguments) else ():
        head = pattern.partition(".")[0]
        is_argument = head != "*" and any(fnmatchcase(name, head) for name in arguments)
        if not is_argument and not any(_matches(name, pattern) for name in tensors):
            yield (
                f"keep_fp32: {pattern!r} is the name of no buffer, parameter or argument of the model's forward"
                f"{did_you_mean(pattern, [*arguments, *tensors])} (its arguments: {shorten(arguments)}; an entry of a "
                f"dict among them is written as '{arguments[0] if arguments else 'batch'}.key')"
            )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under each of their names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _keeps(recipe: Recipe) -> bool:
    return recipe.keep_fp32 is not None and recipe.param_dtype in HALF


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)
