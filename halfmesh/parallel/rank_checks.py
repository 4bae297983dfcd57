"""Checks that ranks have the same values, and make the same calls. A failed one raises on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.env import list_ranks
from ..errors import InputError
from ..utils.tensors import dtype_name, tensors_of
from ..utils.torch_private import foreach_norms, has_no_memory
from .comm import gather_objects

ADVICE = (
    "freeze and unfreeze the same parameters on every rank; draw what to freeze with the same seed on all of them, as "
    "in random.Random(0)"
)

# -- values --------------------------------------------------------------------------------------------------------


def digest(tree: Any) -> bytes:
    """The digest of dtypes, shapes and bits of the tensors in `tree`; without tensors, of its repr (nan equals nan)."""
    found, tensors = hashlib.sha256(), tensors_of(tree)
    for tensor in tensors:
        add_tensor(found, tensor)
    if not tensors:
        found.update(repr(tree).encode())
    return found.digest()[:16]


def add_tensor(found: Any, tensor: torch.Tensor) -> None:
    """Add `tensor` to a digest of hashlib; of a sparse, a nested one or one without memory only dtype and shape."""
    found.update(describe_form(tensor).encode())
    if _has_values(tensor) and tensor.numel():
        found.update(as_bytes(tensor).numpy())


def _has_values(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has elements in memory that can be compared one by one."""
    return tensor.layout == torch.strided and not tensor.is_nested and not has_no_memory(tensor)


def describe_form(tensor: torch.Tensor) -> str:
    """The layout, dtype and shape: "float32 of shape [2, 3]"."""
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} "
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{layout}{dtype_name(tensor.dtype)} of shape {shape}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as one dim of bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_on_ranks(tree: Any, group: dist.ProcessGroup | None = None, what: str = "") -> bool:
    """Return True if all ranks of `group` (None: all ranks) have the same `tree`, by `digest`. All of them together.

    Args:
        what: raise InputError with this message where they do not; "{ranks}" in it are those that differ from the first
            rank of the group.
    """
    everyone = gather_objects(digest(tree), group)
    others = [index for index, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others and what:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise InputError(what.replace("{ranks}", list_ranks(ranks[index] for index in others)))
    return not others


@torch.no_grad()
def norms(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of each tensor, in float64 [n] on `device`; -1 for nan, and 0 for all but plain tensors of floats."""
    held = list(tensors)
    plain = [type(t.detach()) is torch.Tensor and t.is_floating_point() for t in held]
    found = iter(foreach_norms([t.detach() for t, is_plain in zip(held, plain, strict=True) if is_plain]))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero, *(next(found).to(device) if is_plain else zero for is_plain in plain)])[1:].nan_to_num(-1)


# -- batches of ranks that compute together ------------------------------------------------------------------------


def is_checked(number: int) -> bool:
    """Return True if call `number` is checked: the first, the tenth, the hundredth and so on."""
    return str(number).rstrip("0") == "1"


class SameCalls:
    """Compares the model's inputs and outputs over the ranks of a group: in the first call, inputs also in the tenth,
    the hundredth and so on; training and evaluation count separately. Ranks with different inputs would silently mix
    them, and an output that is sharded is not the model's.

    Args:
        group: the ranks.
        what: their name in messages ("tensor group").
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._inputs_seen: Counter[tuple[bool, str]] = Counter()
        self._outputs_seen: set[bool] = set()

    @torch.compiler.disable
    @torch.no_grad()
    def are_same(self, tree: Any, of: str, training: bool = True) -> bool:
        """Return True if all ranks have the same tensors in `tree`, or if this call, of its kind, is not checked."""
        self._inputs_seen[training, of] += 1
        is_due = is_checked(self._inputs_seen[training, of])
        return not is_due or same_on_ranks(tensors_of(tree), self._group)

    def compare_inputs(self, training: bool, args: Any, kwargs: Any, of: str = "inputs") -> None:
        """Raise InputError on all ranks if the inputs differ; `of`: their name in messages."""
        if not self.are_same((args, kwargs), of, training):
            raise InputError(
                f"the {self._group.size()} ranks of a {self._what} were given different {of}, but they compute one "
                "batch together; iterate engine.dataloader, or shard your loader by engine.context.dp_rank"
            )

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError on all ranks if outputs differ by more than rounding."""
        if training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        tensors = [tensor for tensor in tensors_of(output) if not hasattr(tensor, "to_local")]  # sharded on purpose
        chunks = [chunk for t in tensors if _has_values(t) for chunk in (t, *t.detach().reshape(-1).chunk(7))]
        shapes, mine = [tuple(tensor.shape) for tensor in tensors], norms(chunks, torch.device("cpu")).tolist()
        everyone = gather_objects((shapes, mine), self._group)
        is_near = partial(math.isclose, rel_tol=2e-2, abs_tol=1e-6)  # equal up to rounding in bf16
        if not all(others == shapes and all(map(is_near, mine, theirs)) for others, theirs in everyone):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is sharded. Give the last "
                "layer the style 'colwise_gather'; do not return what is between sharded layers (attention weights)"
            )
