"""Recorded operators, which can be run again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import InputError
from ...utils.tensors import map_tensors, tensors_of


@dataclass(frozen=True)
class View:
    """A tensor among the arguments of an operator: which part of which memory."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Constant:
    """A tensor with values, from outside the recording. A large one is not copied, and must not change until it is
    used."""

    tensor: torch.Tensor
    digest: str
    is_copy: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        is_copy = tensor.numel() * tensor.element_size() <= _COPIED_BYTES
        return cls(tensor.detach().clone() if is_copy else tensor, _digest(tensor), is_copy)

    def value(self) -> torch.Tensor:
        if not self.is_copy and _digest(self.tensor) != self.digest:
            raise InputError(
                f"a tensor of shape {tuple(self.tensor.shape)}, from which weights of the deferred model are made, was "
                "changed after the model was built; leave it as it is until initialize has returned, or copy it"
            )
        return self.tensor


_COPIED_BYTES = 2**20


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()


@dataclass
class Op:
    """One operator that made memory, or wrote to it. Memories are numbered in the order in which they were made."""

    function: Any
    args: Any
    kwargs: Any
    makes: list[tuple[int, View]] = field(default_factory=list)
    """Places among the results, and what is new there."""
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    seed: int | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def describe(self) -> str:
        """A text that is equal on all ranks that do the same."""
        arguments = map_tensors(_plain, (self.args, self.kwargs), (Constant, torch.Generator))
        return repr((str(self.function), self.seed is None, arguments, self.makes, self.default_dtype))

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """The default dtype is that of the recording; autocast is off, as it was below it."""
        now = torch.get_default_dtype()
        with ExitStack() as scopes:
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                scopes.enter_context(torch.autocast(kind, enabled=False))
            torch.set_default_dtype(self.default_dtype)
            scopes.callback(torch.set_default_dtype, now)
            yield

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run it again on the memories in `storages`, and add those that it makes."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return leaf.of(storages[leaf.memory])
            if isinstance(leaf, Constant):
                return leaf.value()
            return torch.Generator(leaf.device).manual_seed(self.seed or 0)

        args, kwargs = map_tensors(value, (self.args, self.kwargs), (View, Constant, torch.Generator))
        devices = {storage.device for storage in storages.values()} | {kwargs.get("device")}
        cuda = [d for d in devices if isinstance(d, torch.device) and d.type == "cuda"]
        with self.as_then(), torch.random.fork_rng(cuda, enabled=self.seed is not None):
            if self.seed is not None:
                _seed(self.seed, cuda)
            results = tensors_of(self.function(*args, **kwargs))
        for place, view in self.makes:
            result = results[place]
            if (tuple(result.shape), result.stride(), result.dtype) != (view.shape, view.stride, view.dtype):
                raise InputError(
                    f"{self.function} returned another shape or dtype than when the deferred model was built; build "
                    "the model as usual, and pass the model itself"
                )
            if self.function.name().startswith(_UNSET):
                result.zero_()  # or ranks would start from different leftovers
            storages[view.memory] = result.untyped_storage()


_UNSET = ("aten::empty", "aten::new_empty")
"""Operators that make memory without writing to it."""


def _seed(seed: int, cuda: Sequence[torch.device]) -> None:
    """Seed the generators that `fork_rng(cuda)` restores. `torch.manual_seed` would seed every device, for good."""
    torch.default_generator.manual_seed(seed)
    for device in cuda:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _plain(leaf: Any) -> Any:
    """A description without addresses."""
    if isinstance(leaf, torch.Generator):
        return "generator"
    return "constant", tuple(leaf.tensor.shape), str(leaf.tensor.dtype), leaf.digest
