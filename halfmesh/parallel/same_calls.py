"""Whether ranks that compute one batch together are given the same one."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InputError
from ..tensors import tensors_of
from .digests import add_tensor
from .objects import gather_objects, is_alone


def is_looked_at(number: int) -> bool:
    """Whether call `number` is one that is looked at: the first, the tenth, the hundredth and so on."""
    return str(number).rstrip("0") == "1"


class SameCalls:
    """Compares what goes into the model, and what comes out, over the ranks of a group: in the first call of each kind,
    and what goes in also in the tenth, the hundredth, and so on. Ranks that see different data would mix it up
    silently, and an output that is divided is not the model's.

    Args:
        group: the ranks.
        what: what messages call them ("tensor group").
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._alone = is_alone(group)
        self._inputs_seen: Counter[tuple[bool, str]] = Counter()
        self._outputs_seen: set[bool] = set()

    @torch.compiler.disable
    @torch.no_grad()
    def compare_inputs(self, training: bool, args: Any, kwargs: Any, of: str = "inputs") -> None:
        """Raise InputError if they differ; on all ranks. `of` is what messages call them."""
        if self._alone:
            return
        self._inputs_seen[training, of] += 1
        looks = is_looked_at(self._inputs_seen[training, of])
        if looks and len(set(self._everyone(_digest((args, kwargs))))) > 1:
            raise InputError(
                f"the {self._group.size()} ranks of a {self._what} were given different {of}, but they compute one "
                "batch together; iterate engine.dataloader, or shard a loader of your own by engine.context.dp_rank of "
                "engine.context.dp_size, and seed alike what the loop itself draws (mixup)"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError if they differ by more than rounding; on all ranks."""
        if self._alone or training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        mine = [(tuple(tensor.shape), _norm(tensor)) for tensor in tensors_of(output)]
        everyone = self._everyone(mine)
        if any(not _alike(mine, theirs) for theirs in everyone):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is divided. Give the last "
                "layer the style 'colwise_gather' if it has 'colwise'; do not return what is between divided layers "
                "(hidden states under sequence_parallel, attention weights)"
            )

    def _everyone(self, mine: Any) -> list[Any]:
        return gather_objects(mine, self._group)


def are_same(tree: Any, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` gave the same tensors. False where there are none."""
    if is_alone(group):
        return False
    everyone = gather_objects(_digest(tree), group)
    return len(set(everyone)) == 1 and everyone[0] != _digest(())


def _digest(tree: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors_of(tree):
        add_tensor(digest, tensor)
    return digest.hexdigest()


def _norm(tensor: torch.Tensor) -> tuple[float, ...]:
    """Norms of a tensor and of its halves, by which two are told apart."""
    if tensor.layout != torch.strided or not tensor.is_floating_point():
        return ()
    flat = tensor.detach().reshape(-1).float()
    return tuple(float(torch.linalg.vector_norm(part)) for part in (flat, *flat.chunk(7)))


def _alike(mine: list[Any], theirs: list[Any]) -> bool:
    """Whether shapes are equal, and norms but for rounding (in bf16, and of what an overflow has left)."""
    if [shape for shape, _ in mine] != [shape for shape, _ in theirs]:
        return False
    pairs = [pair for (_, a), (_, b) in zip(mine, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return all(math.isclose(a, b, rel_tol=2e-2, abs_tol=1e-6) for a, b in pairs if math.isfinite(a + b))
