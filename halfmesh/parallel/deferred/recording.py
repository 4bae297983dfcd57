"""What was done to tensors that have a shape and no memory, so that their values can be made later, one by one.

Every tensor of random numbers has a seed of its own. It is drawn, while the model is built, from the generator that
would have drawn the numbers. So the values follow from the user's `torch.manual_seed`, and not from which of them are
made, in which order, or where. They are not those of an ordinary build, which draws all of them from one generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..._torch import DATA_NEEDED, FakeTensorMode
from ...errors import InputError
from ...tensors import map_tensors, tensors_of
from .tape import Constant, Made, Op, Tape, View, find, map_leaves


class Recording(FakeTensorMode):
    """A mode in which tensors have no memory. What is done to them is written down, also after the mode was left.

    Args:
        from_rank0: values will not be made from it where rank 0 has them.
    """

    def __init__(self, from_rank0: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.from_rank0 = from_rank0
        self._tape = Tape()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # or numbers would be given twice
        self._answers = hashlib.sha256()
        self._is_inside = False
        self._is_over = False
        self._latest: Made | None = None

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

    def exit_build(self) -> None:
        """The build is over: what was kept to answer its questions is not needed any more."""
        self._latest = None

    def end(self) -> None:
        """A model of it has its values now: what still has none, gets none."""
        self._is_over = True

    def digest(self) -> str:
        """The same where all values will be the same, if the seeds are."""
        known = self._answers.copy()
        for op in self._tape.ops:
            known.update(op.describe().encode())
        return known.hexdigest()

    @property
    def seeds(self) -> list[int | None]:
        """Of each operator; None of those that draw nothing."""
        return [op.seed for op in self._tape.ops]

    @seeds.setter
    def seeds(self, seeds: Sequence[int | None]) -> None:
        for op, seed in zip(self._tape.ops, seeds, strict=True):
            op.seed = seed

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor of this recording, in memory of its own."""
        return self.value_of(self.view(tensor))

    @torch.inference_mode(False)
    @torch.no_grad()
    def value_of(self, view: View) -> torch.Tensor:
        """The value of what `view` has said of a tensor of this recording."""
        return view.of(self._tape.make(view.memory))

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether random numbers are in the value of a tensor of this recording."""
        return bool(self._tape.seeds_of(self.view(tensor).memory))

    def view(self, tensor: torch.Tensor) -> View:
        """Where a tensor of this recording lies."""
        key, shape = id(tensor.untyped_storage()), tuple(tensor.shape)
        if key not in self._numbers:
            raise _unknown(shape)
        if tensor.is_conj() or tensor.is_neg():
            raise InputError(
                f"a tensor of shape {shape} is a conjugated or negated view, which cannot be made later; build the "
                "model as usual, and pass the model itself"
            )
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
        self._refuse_odd(found)
        if find((args, kwargs), torch.UntypedStorage):
            raise _unknown(tuple(found[0].shape))
        if len({recording_of(t) for t in found} - {None}) > 1:
            args, kwargs = map_tensors(self._take_over, (args, kwargs))
        written = tensors_of(_written(func, args, kwargs))
        if any(_mode_of(t) is not self for t in written):
            return func(*self._with_values(args), **self._with_values(kwargs))
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_NEEDED:
            return self._answer(func, args, kwargs)
        self._refuse_odd(tensors_of(result))
        self._note(func, args, kwargs, written, result)
        return result

    def _refuse_odd(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout != torch.strided:
                kind = str(tensor.layout).removeprefix("torch.")
                raise InputError(
                    f"a tensor of shape {tuple(tensor.shape)} is {kind}, which cannot be made later; build the model "
                    "as usual, and pass the model itself"
                )

    def _take_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of another recording: its value."""
        other = recording_of(tensor)
        return tensor if other is None or other is self else other.value(tensor)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What somebody asks of values, which are made for it."""
        with torch.no_grad():
            result = func(*self._with_values(args), **self._with_values(kwargs))
        self._answers.update(
            repr(map_leaves(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, result)).encode()
        )
        return result

    def _with_values(self, tree: Any) -> Any:
        def value(tensor: torch.Tensor) -> torch.Tensor:
            if _mode_of(tensor) is not self:
                return tensor
            view = self.view(tensor)
            self._latest = self._tape.go_on(view.memory, self._latest)
            return view.of(self._latest.storages[view.memory])

        return map_tensors(value, tree)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], written: Iterable[Any], result: Any) -> None:
        made: list[tuple[int, torch.Tensor]] = []
        known = set(self._numbers)
        for place, tensor in enumerate(tensors_of(result)):
            if id(tensor.untyped_storage()) not in known:
                known.add(self._number(tensor))
                made.append((place, tensor))
        if not made and not written:
            return  # a view, or a question that was answered by the shape
        op = Op(func, self._described(args), self._described(kwargs))
        op.makes = [(place, self.view(tensor)) for place, tensor in made]
        op.writes = {view.memory for _, view in op.makes} | {self.view(tensor).memory for tensor in written}
        op.reads = {view.memory for view in find((op.args, op.kwargs), View)}
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = find((args, kwargs), torch.Generator)
            op.seed = int(torch.randint(2**62, (), generator=generators[0] if generators else None, device="cpu"))
        self._tape.add(op)

    def _number(self, tensor: torch.Tensor) -> int:
        key = id(tensor.untyped_storage())
        self._numbers[key] = len(self._alive)
        self._alive.append(tensor.untyped_storage())
        return key

    def _described(self, tree: Any) -> Any:
        def describe(tensor: torch.Tensor) -> Any:
            if _mode_of(tensor) is self:
                return self.view(tensor)
            return Constant.of(tensor)

        return map_tensors(describe, tree)


def _unknown(shape: tuple[int, ...]) -> InputError:
    return InputError(
        f"a tensor of shape {shape} got its memory in a way that cannot be written down (torch.load or safetensors "
        "while the model is built without memory, or `tensor.data = ...` of one with values); load before, or after it "
        "is built: model.load_state_dict"
    )


def recording_of(tensor: object) -> Recording | None:
    """The recording in which `tensor` was made, which has no memory; None of any other."""
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
