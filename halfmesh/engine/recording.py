"""Records what is done to tensors that have a shape and no memory, so that their values can be made later, one by one.

Every random tensor has its own seed, drawn while the model is built from the generator that would have drawn the
numbers. So the values depend on the user's `torch.manual_seed`, and not on which of them are made, in which order or
where. They are not those of an ordinary build, which draws all of them from one generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import InputError
from ..utils.tensors import digest, leaves_of, map_tensors, tensors_of
from ..utils.torch_private import DATA_NEEDED, FakeTensorMode

_UNSET = ("aten::empty", "aten::new_empty")  # operators that make memory without writing to it


@dataclass(frozen=True)
class View:
    """A tensor of a recording: which elements of which memory. Memories are numbered in the order of their making."""

    recording: Recording = field(repr=False)
    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def value(self) -> torch.Tensor:
        """The full value, in separate memory."""
        return self.recording.value(self)


@dataclass(frozen=True)
class Constant:
    """A tensor with values, from outside the recording, which must not change until it is used."""

    tensor: torch.Tensor = field(repr=False)
    digest: bytes

    def value(self) -> torch.Tensor:
        if digest(self.tensor) != self.digest:
            raise InputError(
                f"a tensor of shape {tuple(self.tensor.shape)}, from which the deferred model takes weights, was "
                "changed after the model was built; do not change it before initialize returns, or copy it"
            )
        return self.tensor


@dataclass(frozen=True)
class Drawn:
    """A generator, which is seeded for each operator."""

    device: torch.device


@dataclass
class Op:
    """One operator that made memory, or wrote to it. Its text is equal on all ranks that do the same."""

    function: Any
    args: Any
    kwargs: Any
    makes: list[tuple[int, View]]  # the new tensors among the results, by their index
    reads: set[int] = field(repr=False)
    seed: int | None = field(repr=False)  # none if it draws nothing
    default_dtype: torch.dtype

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run it again on the memories in `storages`, and add those that it makes."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Drawn):
                return torch.Generator(leaf.device).manual_seed(self.seed or 0)
            return leaf.of(storages[leaf.memory]) if isinstance(leaf, View) else leaf.value()

        args, kwargs = map_tensors(value, (self.args, self.kwargs), (View, Constant, Drawn))
        devices = {storage.device for storage in storages.values()} | {kwargs.get("device")}
        cuda = [d for d in devices if isinstance(d, torch.device) and d.type == "cuda"]
        with default_dtype(self.default_dtype), torch.random.fork_rng(cuda, enabled=self.seed is not None):
            if self.seed is not None:
                torch.default_generator.manual_seed(self.seed)  # `torch.manual_seed` would seed every device, for good
                for device in cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(self.seed)
            results = tensors_of(self.function(*args, **kwargs))
        for index, view in self.makes:
            if self.function.name().startswith(_UNSET):
                results[index].zero_()  # or ranks would start from different leftovers
            storages[view.memory] = results[index].untyped_storage()


class Recording(FakeTensorMode):
    """A mode in which tensors have no memory. What is done to them is recorded, also after the mode was left.

    Attributes:
        ops: what was recorded.
        is_over: a model of this recording has got its values; other tensors of it will never have any.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ops: list[Op] = []
        self.is_over = False
        self._writers: dict[int, list[int]] = {}  # of each memory, the numbers of operators
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # or numbers would be given twice
        self._answers = hashlib.sha256()
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:  # an operator that is made of others
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            return self._take(func, types, args, dict(kwargs or {}))
        finally:
            self._is_inside = False
            # It has weak references to tensors, with which `torch.utils.swap_tensors` rejects them.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def __deepcopy__(self, memo: Any) -> Recording:
        return self  # copies of a tensor are of the same recording

    def digest(self) -> str:
        """Equal on ranks that will make the same values from the same seeds."""
        known = self._answers.copy()
        for op in self.ops:
            known.update(f"{op} {op.seed is None}".encode())
        return known.hexdigest()

    @torch.inference_mode(False)
    @torch.no_grad()
    def value(self, view: View) -> torch.Tensor:
        """The value of the tensor of this recording that was at `view`, in separate memory."""
        left, needed = [(view.memory, len(self.ops))], set[int]()  # memories, and the operators before which they count
        while left:
            memory, before = left.pop()
            for number in self._writers[memory]:
                if number < before and number not in needed:
                    needed.add(number)
                    left += [(read, number) for read in self.ops[number].reads]
        storages: dict[int, torch.UntypedStorage] = {}
        with ExitStack() as scopes:
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                scopes.enter_context(torch.autocast(kind, enabled=False))  # as it was recorded, which is below autocast
            for number in sorted(needed):
                self.ops[number].run(storages)
        return view.of(storages[view.memory])

    def view(self, tensor: torch.Tensor) -> View:
        """Where a tensor of this recording lies."""
        key, shape = id(tensor.untyped_storage()), tuple(tensor.shape)
        if key not in self._numbers or tensor.is_conj() or tensor.is_neg():
            raise _unknown(shape)
        return View(self, self._numbers[key], tensor.dtype, shape, tuple(tensor.stride()), int(tensor.storage_offset()))

    # -- recording ---------------------------------------------------------------------------------------------

    def _take(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = tensors_of((args, kwargs))
        ours = [t for t in found if recording_of(t) is self]
        if found and not ours:
            return func(*args, **kwargs)
        if ours and self.is_over:
            raise InputError(
                f"a tensor of shape {tuple(ours[0].shape)} has no value: it was made under halfmesh.deferred_init() "
                "and not passed to initialize; make criteria, data and copies of a model outside of it"
            )
        if leaves_of((args, kwargs), torch.UntypedStorage):
            raise _unknown(tuple(found[0].shape))
        written = tensors_of(_written(func, args, kwargs))
        if any(recording_of(t) is not self for t in written):
            return func(*self._with_values(args), **self._with_values(kwargs))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_NEEDED:
            with torch.no_grad():
                result = func(*self._with_values(args), **self._with_values(kwargs))
            self._answers.update(repr(map_tensors(lambda tensor: tensor.tolist(), result)).encode())
            return result
        self._note(func, args, kwargs, written, result)
        return result

    def _with_values(self, tree: Any) -> Any:
        return map_tensors(lambda t: self.view(t).value() if recording_of(t) is self else t, tree)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Any], result: Any) -> None:
        makes: list[tuple[int, View]] = []
        for index, tensor in enumerate(tensors_of(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._numbers:
                self._numbers[id(storage)] = len(self._alive)
                self._alive.append(storage)
                makes.append((index, self.view(tensor)))
        if not makes and not written:
            return  # a view, or an operator that needs the shape only
        described = self._describe(args), self._describe(kwargs)
        writes = {view.memory for _, view in makes} | {self.view(tensor).memory for tensor in written}
        reads, seed = {view.memory for view in leaves_of(described, View)}, None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = leaves_of((args, kwargs), torch.Generator)
            seed = int(torch.randint(2**62, (), generator=generators[0] if generators else None, device="cpu"))
        for memory in writes:
            self._writers.setdefault(memory, []).append(len(self.ops))
        self.ops.append(Op(func, *described, makes, reads, seed, torch.get_default_dtype()))

    def _describe(self, tree: Any) -> Any:
        def describe(leaf: Any) -> View | Constant | Drawn:
            if isinstance(leaf, torch.Generator):
                return Drawn(leaf.device)
            if recording_of(leaf) is self:
                return self.view(leaf)
            is_small = leaf.numel() * leaf.element_size() <= 2**20  # memory that the model may use again
            return Constant(leaf.detach().clone() if is_small else leaf, digest(leaf))

        return map_tensors(describe, tree, (torch.Tensor, torch.Generator))


def _unknown(shape: tuple[int, ...]) -> InputError:
    return InputError(
        f"a tensor of shape {shape} got its memory in a way that deferred_init cannot record (torch.load, "
        "`tensor.data = ...`); load after the model is built, or build it without deferred_init"
    )


def recording_of(tensor: object) -> Recording | None:
    """The recording of a `tensor` without memory; None for any other tensor."""
    mode = getattr(tensor, "fake_mode", None) if isinstance(tensor, torch.Tensor) else None
    return mode if isinstance(mode, Recording) else None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A scope with this default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those arguments of an operator that it writes to."""
    declared = function._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [value for arg, value in given if arg.alias_info is not None and arg.alias_info.is_write]
