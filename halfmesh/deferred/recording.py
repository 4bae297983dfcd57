"""What was done to tensors that have a shape and no memory, so that their values can be made later, one by one.

Every tensor of random numbers has a seed of its own. It is drawn, while the model is built, from the generator that
would have drawn the numbers. So the values follow from the user's `torch.manual_seed`, and not from which of them are
made, in which order, or where. They are not those of an ordinary build, which draws all of them from one generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_private
from ..errors import InputError
from ..tree import map_tensors


@dataclass(frozen=True)
class _View:
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
class _Constant:
    """A tensor with values, from outside."""

    tensor: torch.Tensor
    version: int


@dataclass
class _Op:
    """One operator that made memory, or wrote to it. Memories are numbered in the order in which they were made."""

    function: Any
    args: Any
    kwargs: Any
    makes: list[tuple[int, _View]] = field(default_factory=list)
    """Places among the results, and what is new there."""
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    seed: int | None = None

    def describe(self) -> str:
        """The same on all ranks that do the same."""
        return repr((str(self.function), self.seed is None, _plain((self.args, self.kwargs)), self.makes))


class Recording(torch_private.FakeMode):
    """A mode in which tensors have no memory. What is done to them is written down, also after the mode was left.

    Args:
        from_rank0: values will not be made from it where rank 0 has them.
    """

    def __init__(self, from_rank0: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.from_rank0 = from_rank0
        self._ops: list[_Op] = []
        self._writers: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # or numbers would be given twice
        self._answers = hashlib.sha256()
        self._is_inside = False
        self._latest: _Memories | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:  # an operator that is made of others
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            return self._take(func, types, args, dict(kwargs or {}))
        finally:
            self._is_inside = False
            torch_private.forget_fakes(self)

    def __deepcopy__(self, memo: Any) -> Recording:
        return self  # copies of a tensor are of the same recording

    def exit_build(self) -> None:
        """The build is over: what was kept to answer its questions is not needed any more."""
        self._latest = None

    def digest(self) -> str:
        """The same where all values will be the same, if the seeds are."""
        known = self._answers.copy()
        for op in self._ops:
            known.update(op.describe().encode())
        for constant in {id(c): c for op in self._ops for c in _constants((op.args, op.kwargs))}.values():
            data = constant.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            known.update(data.numpy().data)
        return known.hexdigest()

    @property
    def seeds(self) -> list[int | None]:
        """Of each operator; None of those that draw nothing."""
        return [op.seed for op in self._ops]

    @seeds.setter
    def seeds(self, seeds: Sequence[int | None]) -> None:
        for op, seed in zip(self._ops, seeds, strict=True):
            op.seed = seed

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor of this recording, in memory of its own."""
        return self.value_of(self.view(tensor))

    @torch.no_grad()
    def value_of(self, view: _View) -> torch.Tensor:
        """The value of what `view` has said of a tensor of this recording."""
        return view.of(self._memories({view.memory}).storages[view.memory])

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether random numbers are in the value of a tensor of this recording."""
        return any(
            self._ops[number].seed is not None for number in self._needed({self.view(tensor).memory}, None) or ()
        )

    def view(self, tensor: torch.Tensor) -> _View:
        """Where a tensor of this recording lies."""
        key = torch_private.storage_id(tensor)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _View(self._numbers[key], tensor.dtype, shape, stride, int(tensor.storage_offset()))

    # -- recording ---------------------------------------------------------------------------------------------

    def _take(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = _tensors((args, kwargs))
        ours = [t for t in found if torch_private.fake_mode_of(t) is self]
        if found and not ours:
            return func(*args, **kwargs)
        written = _tensors(torch_private.written_arguments(func, args, kwargs))
        if any(torch_private.fake_mode_of(t) is not self for t in written):
            return func(*self._with_values(args), **self._with_values(kwargs))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except torch_private.DATA_NEEDED:
            return self._answer(func, args, kwargs)
        self._note(func, args, kwargs, written, result)
        return result

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What somebody asks of values, which are made for it."""
        with torch.no_grad():
            result = func(*self._with_values(args), **self._with_values(kwargs))
        self._answers.update(repr(_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, result)).encode())
        return result

    def _with_values(self, tree: Any) -> Any:
        def value(tensor: torch.Tensor) -> torch.Tensor:
            if torch_private.fake_mode_of(tensor) is not self:
                return tensor
            view = self.view(tensor)
            self._latest = self._memories({view.memory}, self._latest)
            return view.of(self._latest.storages[view.memory])

        return map_tensors(value, tree)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], written: Iterable[Any], result: Any) -> None:
        made: list[tuple[int, torch.Tensor]] = []
        known = set(self._numbers)
        for place, tensor in enumerate(_tensors(result)):
            if torch_private.storage_id(tensor) not in known:
                known.add(self._number(tensor))
                made.append((place, tensor))
        if not made and not written:
            return  # a view, or a question that was answered by the shape
        op = _Op(func, self._described(args), self._described(kwargs))
        op.makes = [(place, self.view(tensor)) for place, tensor in made]
        op.writes = {view.memory for _, view in op.makes} | {self.view(tensor).memory for tensor in written}
        op.reads = {view.memory for view in _views((op.args, op.kwargs))}
        if torch_private.draws(func):
            generators = _find((args, kwargs), torch.Generator)
            op.seed = int(torch.randint(2**62, (), generator=generators[0] if generators else None, device="cpu"))
        for memory in op.writes:
            self._writers.setdefault(memory, []).append(len(self._ops))
        self._ops.append(op)

    def _number(self, tensor: torch.Tensor) -> int:
        key = torch_private.storage_id(tensor)
        self._numbers[key] = len(self._alive)
        self._alive.append(tensor.untyped_storage())
        return key

    def _described(self, tree: Any) -> Any:
        def describe(tensor: torch.Tensor) -> Any:
            if torch_private.fake_mode_of(tensor) is self:
                return self.view(tensor)
            return _Constant(tensor, tensor._version)

        return map_tensors(describe, tree)

    # -- making values -----------------------------------------------------------------------------------------

    def _memories(self, wanted: Collection[int], latest: _Memories | None = None) -> _Memories:
        """Memories with all that was written to them.

        Args:
            latest: some that were made before, which may be written to.
        """
        if latest is not None:
            needed = self._needed(wanted, latest)
            if needed is not None:
                return self._run(needed, latest)
        return self._run(self._needed(wanted, None) or [], _Memories({}, 0), keep=wanted if latest is None else None)

    def _needed(self, wanted: Collection[int], latest: _Memories | None) -> list[int] | None:
        """The numbers of the operators by which `wanted` come about; None if `latest` is of no use for them."""
        bounds: dict[int, int] = {}
        left = [(memory, len(self._ops)) for memory in wanted]
        needed: set[int] = set()
        while left:
            memory, before = left.pop()
            if bounds.get(memory, 0) >= before:
                continue
            bounds[memory] = before
            has = latest is not None and memory in latest.storages
            for number in self._writers[memory]:
                if number >= before or (has and latest is not None and number < latest.upto):
                    continue
                if number not in needed:
                    needed.add(number)
                    left += [(read, number) for read in self._ops[number].reads]
        if latest is not None:
            for number in needed:
                op = self._ops[number]
                if number < latest.upto and not latest.storages.keys().isdisjoint(op.reads | op.writes):
                    return None  # it would see what was written later
        return sorted(needed)

    def _run(self, numbers: Sequence[int], memories: _Memories, keep: Collection[int] | None = None) -> _Memories:
        storages = dict(memories.storages)
        last = {memory: number for number in numbers for memory in self._ops[number].reads | self._ops[number].writes}
        for number in numbers:
            op = self._ops[number]
            self._do(op, storages)
            if keep is not None:
                for memory in (op.reads | op.writes).difference(keep):
                    if last[memory] == number:
                        del storages[memory]
        return _Memories(storages, len(self._ops))

    def _do(self, op: _Op, storages: dict[int, torch.UntypedStorage]) -> None:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return leaf.of(storages[leaf.memory])
            if isinstance(leaf, torch.Generator):
                return torch.Generator(leaf.device).manual_seed(op.seed or 0)
            if not isinstance(leaf, _Constant):
                return leaf
            if leaf.tensor._version != leaf.version:
                raise InputError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)}, from which weights of the deferred model are made, "
                    "was changed after the model was built; leave it as it is until initialize has returned, or copy it"
                )
            return leaf.tensor

        args, kwargs = _map(value, op.args), _map(value, op.kwargs)
        devices = {storage.device for storage in storages.values()} | {kwargs.get("device")}
        cuda = [d for d in devices if isinstance(d, torch.device) and d.type == "cuda"]
        with torch.random.fork_rng(cuda, enabled=op.seed is not None):
            if op.seed is not None:
                torch.manual_seed(op.seed)
            results = _tensors(op.function(*args, **kwargs))
        for place, view in op.makes:
            result = results[place]
            if (tuple(result.shape), result.stride()) != (view.shape, view.stride):
                raise InputError(
                    f"{op.function} laid {tuple(result.shape)} out otherwise than was foreseen while the deferred "
                    "model was built; build it as usual, and pass the model itself"
                )
            if torch_private.leaves_unset(op.function):
                result.zero_()  # or ranks would start from different leftovers
            storages[view.memory] = result.untyped_storage()


@dataclass
class _Memories:
    """Real ones, with all that the first `upto` operators wrote to them."""

    storages: dict[int, torch.UntypedStorage]
    upto: int


def recording_of(tensor: object) -> Recording | None:
    """The recording in which `tensor` was made, which has no memory; None of any other."""
    mode = torch_private.fake_mode_of(tensor) if isinstance(tensor, torch.Tensor) else None
    return mode if isinstance(mode, Recording) else None


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of each leaf of arguments or results."""
    if isinstance(tree, (list, tuple)):
        items = [_map(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {name: _map(function, item) for name, item in tree.items()}
    return function(tree)


def _find(tree: Any, kind: type) -> list[Any]:
    found: list[Any] = []
    _map(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, tree)
    return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return _find(tree, torch.Tensor)


def _views(tree: Any) -> list[_View]:
    return _find(tree, _View)


def _constants(tree: Any) -> list[_Constant]:
    return _find(tree, _Constant)


def _plain(tree: Any) -> Any:
    """Arguments in words that say nothing about where they are in memory."""

    def word(leaf: Any) -> Any:
        if isinstance(leaf, _Constant):
            return "constant", tuple(leaf.tensor.shape), str(leaf.tensor.dtype)
        return "generator" if isinstance(leaf, torch.Generator) else leaf

    return _map(word, tree)
