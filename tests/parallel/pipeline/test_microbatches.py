"""How batches are split, and into how many parts."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.boundary import tensors_of
from halfmesh.parallel.pipeline.microbatches import Splitter, choose_count, parameter_names
from halfmesh.parallel.pipeline.pieces import Call

X = torch.arange(12.0).view(6, 2)
Y = torch.arange(6)
Pair = namedtuple("Pair", "left right")


class Net(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, scale: Any = 1.0) -> Any:
        return x


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


def splitter(what: Any = None, *non_split: str) -> Splitter:
    return Splitter(what or Net(), non_split, "engine(...)")


def test_parts_are_the_rows_in_order():
    call = Call((X,), {"scale": Y})
    assert splitter().batch_size(call) == 6
    parts = splitter().split(call, 3, 6)
    assert len(parts) == 3
    assert torch.equal(torch.cat([part.args[0] for part in parts]), X)
    assert torch.equal(torch.cat([part.kwargs["scale"] for part in parts]), Y)
    assert [len(part.args[0]) for part in parts] == [2, 2, 2]
    assert all(list(part.kwargs) == ["scale"] for part in parts)


def test_nested_inputs():
    tree = {"pair": Pair(X, [Y, None]), "batch": Batch(X, ["a", "b"]), "word": "w", "number": 3}
    (first, second) = splitter().split(Call((tree,)), 2, 6)
    for part, rows in ((first, slice(0, 3)), (second, slice(3, 6))):
        (found,) = part.args
        assert type(found["pair"]) is Pair
        assert torch.equal(found["pair"].left, X[rows])
        assert torch.equal(found["pair"].right[0], Y[rows])
        assert found["pair"].right[1] is None
        assert torch.equal(found["batch"].x, X[rows])
        assert found["batch"].names == ["a", "b"]
        assert (found["word"], found["number"]) == ("w", 3)
    assert torch.equal(tree["batch"].x, X), "the batch itself is left alone"


@pytest.mark.parametrize("kwargs", [True, False])
def test_arguments_that_are_not_split(kwargs):
    mask = torch.ones(9, 9)
    call = Call((X,), {"mask": mask}) if kwargs else Call((X, mask))
    known = splitter(None, "mask")
    assert known.batch_size(call) == 6
    for part in known.split(call, 2, 6):
        assert (part.kwargs["mask"] if kwargs else part.args[1]) is mask


def test_tensors_without_dims_go_into_every_part():
    scale = torch.tensor(2.0)
    assert splitter().batch_size(Call((scale, X))) == 6
    assert all(part.args[0] is scale for part in splitter().split(Call((scale, X)), 2, 6))
    assert splitter().batch_size(Call((scale, 3, "word"))) is None
    assert splitter().batch_size(Call()) is None
    assert splitter(None, "x").batch_size(Call((X,))) is None


def test_other_numbers_of_rows():
    mask = torch.ones(5, 5)
    message = r"engine\(...\): mask has 5 rows, and x has 6; arguments are split .*non_split=\('mask',\)"
    for call in (Call((X, mask)), Call((X,), {"mask": mask}), Call((X,), {"mask": [mask, X]})):
        with pytest.raises(InputError, match=message):
            splitter().batch_size(call)
    with pytest.raises(
        InputError, match=r"mask has 5 rows, and the batch has 6; name arguments without a batch dim in"
    ):
        splitter().split(Call((X, mask)), 2, 6)
    with pytest.raises(InputError, match=r"argument 4 has 5 rows"):
        splitter(lambda *args: 0).batch_size(Call((X, X, X, mask)))


def test_rows_within_one_argument():
    with pytest.raises(InputError, match="x has 5 rows, and x has 6"):
        splitter().batch_size(Call(([X, torch.ones(5)],)))


def some(x, mask, *rest, key, **others):
    return x


def test_names_of_functions_that_take_anything():
    known = splitter(some, "mask", "key", "extra")
    whole = torch.ones(7)
    call = Call((X, whole, Y), {"key": whole, "extra": whole, "other": Y})
    assert known.batch_size(call) == 6
    (part, _) = known.split(call, 2, 6)
    assert part.args[1] is part.kwargs["key"] is part.kwargs["extra"] is whole
    assert [len(t) for t in (part.args[0], part.args[2], part.kwargs["other"])] == [3, 3, 3]


def test_parameter_names():
    assert parameter_names(Net()) == ["x", "mask", "scale"]
    assert parameter_names(some) == ["x", "mask", "*rest", "key", "**others"]
    assert parameter_names(nn.functional.cross_entropy)[:2] == ["input", "target"]
    assert parameter_names(torch.add) == ["*args", "**kwargs"], "a built-in has no signature"


def test_callable_objects():
    class Loss:
        def __call__(self, output: Any, table: Any) -> Any:
            return output

    (part, _) = splitter(Loss(), "table").split(Call((X, Y[:5])), 2, 6)
    assert torch.equal(part.args[1], Y[:5])


def test_parts_share_memory_and_keep_their_graph():
    x = X.clone().requires_grad_()
    (first, second) = splitter().split(Call((x,)), 2, 6)
    assert first.args[0].data_ptr() == x.data_ptr()
    (first.args[0].sum() + 2 * second.args[0].sum()).backward()
    assert x.grad.tolist() == [[1, 1]] * 3 + [[2, 2]] * 3
    assert len(tensors_of(first.args)) == 1


def anything(count: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("rows", "most", "fits", "expected"),
    [
        (8, 2, anything, 4),
        (6, 2, anything, 3),
        (6, 1.5, anything, 6),  # a third of a row is none
        (10, 2.5, anything, 5),
        (7, 2, anything, 7),
        (62, 8, anything, 31),  # not 2 of 31, which need more memory
        (3, 8, anything, 1),
        (3, 8, lambda n: n >= 2, 3),
        (6, 3, lambda n: n >= 4, 6),
        (3, 1, lambda n: n >= 4, None),
        (12, 3, lambda n: n % 4 == 0, 4),
        (12, 1, lambda n: n in (4, 6), 6),  # as many as fit
        (10, 3, lambda n: n % 4 == 0, None),
        (2, 1, lambda n: n % 2 == 0, 2),
    ],
)
def test_choose_count(rows, most, fits, expected):
    assert choose_count(rows, most, fits) == expected
