"""What tensors hold, to the bit: digests of it, and how far two of them are apart."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

PIECE = 2**20
"""Elements that are looked at together: what is needed beside the tensors stays small."""


@torch.no_grad()
def digest(value: Any) -> bytes:
    """Of a tensor: its dtype, shape and bits. Of anything else: its repr, in which nan is equal to itself."""
    found = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        add_tensor(found, value)
    else:
        found.update(repr(value).encode())
    return found.digest()[:16]


def add_tensor(found: Any, tensor: torch.Tensor) -> None:
    """Take `tensor` into a digest of hashlib; of one that is sparse or nested only its form."""
    if tensor.layout != torch.strided or tensor.is_nested:
        found.update(f"{tensor.layout} {tensor.dtype}".encode())
        return
    found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if tensor.numel():
        found.update(_bytes(tensor).numpy())


def describe_difference(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """How `theirs` differs from `ours`, for messages: "differs by 1e-06 at most, in 1 of 64 elements, first at ..."."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"is {_form(theirs)}, not {_form(ours)}"
    if ours.layout != torch.strided or ours.is_nested:
        return f"is {theirs.layout}, not {ours.layout}"
    a, b = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (ours, theirs))
    count, first, largest = 0, -1, 0.0
    for start in range(0, len(a), PIECE):
        one, other = a[start : start + PIECE], b[start : start + PIECE]
        apart = (_bytes(one) != _bytes(other)).view(len(one), -1).any(1)
        if not apart.any():
            continue
        places = apart.nonzero().reshape(-1)
        first = start + int(places[0]) if first < 0 else first
        count += len(places)
        gap = (_wide(other[places]) - _wide(one[places])).abs().max().item()
        largest = gap if gap != gap else max(largest, gap)  # nan stays
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), ours.shape)]
    example = f"{b[first].item()!r} instead of {a[first].item()!r}"
    return f"differs by {largest:.6g} at most, in {count} of {len(a)} elements, first at {place}: {example}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
