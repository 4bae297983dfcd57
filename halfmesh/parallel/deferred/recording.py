"""Records what is done to tensors that have a shape and no memory, so that their values can be made later, one by one.

Every random tensor has its own seed, drawn while the model is built from the generator that would have drawn the
numbers. So the values depend on the user's `torch.manual_seed`, and not on which of them are made, in which order or
where. They are not those of an ordinary build, which draws all of them from one generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import InputError
from ...utils.tensors import leaves_of, map_tensors, tensors_of
from ...utils.torch_private import DATA_NEEDED, FakeTensorMode
from .operations import Constant, Op, View


class Recording(FakeTensorMode):
    """A mode in which tensors have no memory. What is done to them is recorded, also after the mode was left."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._ops: list[Op] = []
        self._writers: dict[int, list[int]] = {}  # of each memory, the numbers of operators
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # or numbers would be given twice
        self._answers = hashlib.sha256()
        self._is_inside = False
        self._is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_inside:  # an operator that is made of others
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            return self._take(func, types, args, dict(kwargs or {}))
        finally:
            self._is_inside = False
            # It has weak references to tensors, with which `torch.utils.swap_tensors` refuses them.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def __deepcopy__(self, memo: Any) -> Recording:
        return self  # copies of a tensor are of the same recording

    def end(self) -> None:
        """A model of this recording gets its values now; other tensors of it will never have any."""
        self._is_over = True

    def digest(self) -> str:
        """Equal on ranks that will make the same values from the same seeds."""
        known = self._answers.copy()
        for op in self._ops:
            known.update(op.describe().encode())
        return known.hexdigest()

    @property
    def seeds(self) -> list[int | None]:
        """Of each operator; None for those that draw nothing."""
        return [op.seed for op in self._ops]

    @seeds.setter
    def seeds(self, seeds: Sequence[int | None]) -> None:
        for op, seed in zip(self._ops, seeds, strict=True):
            op.seed = seed

    @torch.inference_mode(False)
    @torch.no_grad()
    def value(self, view: View) -> torch.Tensor:
        """The value of the tensor of this recording that was at `view`, in memory of its own."""
        numbers = self._needed(view.memory)
        last = {memory: n for n in numbers for memory in self._ops[n].reads | self._ops[n].writes}
        storages: dict[int, torch.UntypedStorage] = {}
        for number in numbers:
            op = self._ops[number]
            op.run(storages)
            for memory in (op.reads | op.writes) - {view.memory}:
                if last[memory] == number:
                    del storages[memory]
        return view.of(storages[view.memory])

    def _needed(self, memory: int) -> list[int]:
        """The numbers of the operators that `memory` depends on."""
        bounds: dict[int, int] = {}
        left = [(memory, len(self._ops))]
        needed: set[int] = set()
        while left:
            current, before = left.pop()
            if bounds.get(current, 0) >= before:
                continue
            bounds[current] = before
            for number in self._writers[current]:
                if number < before and number not in needed:
                    needed.add(number)
                    left += [(read, number) for read in self._ops[number].reads]
        return sorted(needed)

    def view(self, tensor: torch.Tensor) -> View:
        """Where a tensor of this recording lies."""
        key, shape = id(tensor.untyped_storage()), tuple(tensor.shape)
        if key not in self._numbers or tensor.is_conj() or tensor.is_neg():
            raise _unknown(shape)
        return View(self._numbers[key], tensor.dtype, shape, tuple(tensor.stride()), int(tensor.storage_offset()))

    # -- recording ---------------------------------------------------------------------------------------------

    def _take(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = tensors_of((args, kwargs))
        ours = [t for t in found if _mode_of(t) is self]
        if found and not ours:
            return func(*args, **kwargs)
        if ours and self._is_over:
            raise InputError(
                f"a tensor of shape {tuple(ours[0].shape)} has no value: it was made under halfmesh.deferred_init(), "
                "and initialize, which gives values to parameters, buffers and attributes of modules, has not seen it; "
                "make copies of a model (an average of its weights), criteria and data outside, or after initialize"
            )
        if leaves_of((args, kwargs), torch.UntypedStorage):
            raise _unknown(tuple(found[0].shape))
        written = tensors_of(_written(func, args, kwargs))
        if any(_mode_of(t) is not self for t in written):
            return func(*self._with_values(args), **self._with_values(kwargs))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_NEEDED:
            return self._answer(func, args, kwargs)
        self._note(func, args, kwargs, written, result)
        return result

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operator that needs values, which are made for it."""
        with torch.no_grad():
            result = func(*self._with_values(args), **self._with_values(kwargs))
        self._answers.update(repr(map_tensors(lambda tensor: tensor.tolist(), result)).encode())
        return result

    def _with_values(self, tree: Any) -> Any:
        return map_tensors(lambda t: self.value(self.view(t)) if _mode_of(t) is self else t, tree)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Any], result: Any) -> None:
        made: list[tuple[int, torch.Tensor]] = []
        known = set(self._numbers)
        for place, tensor in enumerate(tensors_of(result)):
            if id(tensor.untyped_storage()) not in known:
                known.add(self._number(tensor))
                made.append((place, tensor))
        if not made and not written:
            return  # a view, or an operator that needs the shape only
        op = Op(func, self._described(args), self._described(kwargs))
        op.makes = [(place, self.view(tensor)) for place, tensor in made]
        op.writes = {view.memory for _, view in op.makes} | {self.view(tensor).memory for tensor in written}
        op.reads = {view.memory for view in leaves_of((op.args, op.kwargs), View)}
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = leaves_of((args, kwargs), torch.Generator)
            op.seed = int(torch.randint(2**62, (), generator=generators[0] if generators else None, device="cpu"))
        for memory in op.writes:
            self._writers.setdefault(memory, []).append(len(self._ops))
        self._ops.append(op)

    def _number(self, tensor: torch.Tensor) -> int:
        key = id(tensor.untyped_storage())
        self._numbers[key] = len(self._alive)
        self._alive.append(tensor.untyped_storage())
        return key

    def _described(self, tree: Any) -> Any:
        return map_tensors(lambda t: self.view(t) if _mode_of(t) is self else Constant.of(t), tree)


def _unknown(shape: tuple[int, ...]) -> InputError:
    return InputError(
        f"a tensor of shape {shape} got its memory in a way that cannot be recorded (torch.load or safetensors while "
        "the model is built without memory, `tensor.data = ...` of one with values, a conjugated view); load before, "
        "or after it is built (model.load_state_dict), or build the model as usual"
    )


def recording_of(tensor: object) -> Recording | None:
    """The recording of a `tensor` without memory; None for any other tensor."""
    mode = _mode_of(tensor)
    return mode if isinstance(mode, Recording) else None


def _mode_of(tensor: object) -> Any:
    """The mode in which `tensor` was made, if it has no memory."""
    return getattr(tensor, "fake_mode", None) if isinstance(tensor, torch.Tensor) else None


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those arguments of an operator that it writes to."""
    declared = function._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [value for arg, value in given if arg.alias_info is not None and arg.alias_info.is_write]
