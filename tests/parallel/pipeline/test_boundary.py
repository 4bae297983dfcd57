"""What a stage sends is what the next one gets, with its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.boundary import Crossing, enter, from_wire, leave, tensors_of, tie, widen
from halfmesh.tree import map_tensors

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def crossing_of(tree: Any) -> Crossing:
    def meta(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)

    return Crossing(map_tensors(meta, tree))


def send(tensors: Any) -> list[torch.Tensor]:
    """What torch's stages make of tensors: a copy into a buffer that requires a gradient."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def round_trip(tree: Any) -> Any:
    crossing = crossing_of(tree)
    sent = tie(leave(tree, crossing), [])
    assert all(tensor.is_contiguous() for tensor in sent)
    assert all(tensor.is_floating_point() and tensor.requires_grad for tensor in sent)
    told = crossing.on_the_wire()
    assert [(t.shape, t.dtype) for t in told] == [(t.shape, t.dtype) for t in sent]
    return enter(send(sent), crossing)[0]


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        return torch.tensor([limits.min, limits.max, limits.tiny, 0.1, -0.0, float("inf"), float("nan")], dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, limits.max, 0, 1, limits.max // 3], dtype=dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *UNSIGNED, *FLOATS], ids=str)
def test_every_value_arrives(dtype):
    tensor = extremes(dtype)
    for shaped in (tensor, tensor[0], tensor[:0], tensor[None, :, None].expand(2, len(tensor), 3)):
        found = round_trip({"x": shaped})["x"]
        assert found.dtype == dtype
        assert found.shape == shaped.shape
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(found.detach().contiguous().view(bits), shaped.contiguous().view(bits))


def test_bits_that_are_not_numbers():
    """As floats these are signalling NaNs, which arithmetic would change."""
    words = torch.tensor([0x7F800001, -0x007FFFFF, 0x7FA00000], dtype=torch.int32)
    assert torch.equal(round_trip([words])[0], words)
    words = torch.tensor([0x7FF0000000000001, -0x000FFFFFFFFFFFFF])
    assert torch.equal(round_trip([words])[0], words)


@dataclass
class Output:
    hidden: torch.Tensor
    mask: torch.Tensor
    name: str = "n"


def test_trees():
    x = torch.randn(2, 3, requires_grad=True)
    tree = {"out": Output(x * 2, x > 0), "rest": [(x.argmax(1), None), 3, "word"], "twice": (x, x)}
    found = round_trip(tree)
    assert type(found["out"]) is Output
    assert found["out"].name == "n"
    assert found["rest"][1:] == [3, "word"]
    assert found["rest"][0][1] is None
    for one, other in zip(tensors_of(found), tensors_of(tree), strict=True):
        assert one.dtype == other.dtype
        assert one.requires_grad == other.requires_grad
        assert torch.equal(one, other)
    assert round_trip([]) == []


def test_tensors_that_are_not_contiguous():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    for shaped in (x.transpose(0, 2), x[:, ::2], x.to(memory_format=torch.channels_last), x[:1].expand(3, -1, -1, -1)):
        assert torch.equal(round_trip([shaped])[0], shaped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_strides_are_those_of_a_new_tensor(dtype):
    x = torch.ones(4, 3, 2).to(dtype)
    for odd in (
        x[:, :0],
        x[:1].transpose(0, 1)[:, :, :1].transpose(0, 2),
        x[0, 0, :1].expand(1, 1),
        x[:0].transpose(0, 1),
    ):
        (sent,) = leave([odd])
        assert sent.stride() == torch.empty(odd.shape).stride()
        assert torch.equal(from_wire(sent, dtype), odd)


def test_complex_tensors():
    x = torch.zeros(2, dtype=torch.complex64)
    for refused in (lambda: leave([x]), lambda: crossing_of([x]).on_the_wire()):
        with pytest.raises(InputError, match=r"complex tensors cannot be sent .* real and imaginary part alone"):
            refused()


@pytest.mark.parametrize(
    "found",
    [[torch.zeros(2, 4)], [torch.zeros(2, 3).double()], [torch.zeros(2, 3), torch.zeros(1)], []],
    ids=["shape", "dtype", "more", "fewer"],
)
def test_tensors_that_were_not_expected(found):
    with pytest.raises(
        InputError, match=r"a stage returned tensors of .* Shapes that depend on the data cannot be sent"
    ):
        leave(found, crossing_of([torch.zeros(2, 3)]))


def test_half_precision_is_widened():
    tree = {
        "a": torch.zeros(1).half(),
        "b": torch.zeros(1).bfloat16(),
        "c": torch.zeros(1).double(),
        "d": torch.ones(1) > 0,
    }
    dtypes = [t.dtype for t in widen(tree, torch.float32).values()]
    assert dtypes == [torch.float32, torch.float32, torch.float64, torch.bool]
    assert widen(tree, None) is tree


# -- gradients -------------------------------------------------------------------------------------------------------


def both(first: Any, second: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradient of x through two stages with a boundary, and all gradients that the boundary sends back."""
    tree = first(x)
    crossing = crossing_of(tree)
    sent = tie(leave(tree, crossing), [])
    received = send(sent)
    carry, anchors = enter(received, crossing)
    (result,) = tie([second(carry).reshape(1)], anchors)
    result.backward()
    assert all(tensor.grad is not None for tensor in received), "torch sends a gradient back for each"
    back = [tensor.grad for tensor in received]
    torch.autograd.backward(sent, back)
    return back


def leaf() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x * 2, lambda y: y.square().sum()),
        (lambda x: (x * 2, x > 0), lambda pair: (pair[0] * pair[1]).sum()),
        (lambda x: {"a": x.sin(), "unused": x.cos()}, lambda tree: tree["a"].sum()),
        (lambda x: (x, x), lambda pair: (pair[0] * pair[1]).sum()),
        (lambda x: x.t(), lambda y: (y * torch.arange(12.0).view(4, 3)).sum()),
        (lambda x: x * 2, lambda y: y.mul_(3).relu_().square().sum()),
        (
            lambda x: (x * 2, x.detach(), x.argmax(1)),
            lambda tree: (tree[0].mul_(2) * tree[1].add_(1)).sum() + tree[2].sum(),
        ),
        (lambda x: x * 2, lambda y: y.detach().sum().requires_grad_() * 1),
        (lambda x: x * 2, lambda y: y.sum() * 0 + torch.ones(1, requires_grad=True)),
        (lambda x: (x[:0], x), lambda pair: pair[0].sum() + pair[1].sum()),
    ],
    ids=["plain", "mask", "unused", "twice", "transposed", "in place", "no gradient", "detached", "zero", "empty"],
)
def test_gradients_are_those_without_a_boundary(first, second):
    one, other = leaf(), leaf()
    second(first(one)).backward()
    both(first, second, other)
    assert torch.equal(torch.zeros(3, 4) if one.grad is None else one.grad, other.grad)


def test_unused_tensors_and_those_without_gradients_send_zeros():
    back = both(lambda x: (x * 2, x * 3, x > 0, x.detach()), lambda tree: tree[0].sum(), leaf())
    assert [grad.abs().max().item() for grad in back] == [1, 0, 0, 0]
    assert [grad.shape for grad in back] == [(3, 4)] * 4


def test_what_was_received_is_left_alone():
    crossing = crossing_of([leaf() * 2, torch.zeros(3)])
    received = send([torch.ones(3, 4), torch.ones(3)])
    (needing, other), anchors = enter(received, crossing)
    assert needing.requires_grad
    assert not needing.is_leaf
    assert not other.requires_grad
    assert [anchor is received[1] for anchor in anchors] == [True, False]
    assert needing.data_ptr() == received[0].data_ptr(), "nothing is copied"


def test_tie_makes_results_require_gradients():
    plain, anchor = torch.ones(2), torch.ones(3, requires_grad=True)
    (tied,) = tie([plain], [anchor])
    assert tied.requires_grad
    tied.backward(torch.ones(2))
    assert anchor.grad.tolist() == [0, 0, 0]
    assert not plain.requires_grad
    (tied,) = tie([plain], [])
    tied.backward(torch.ones(2))
    with_grad = torch.ones(2, requires_grad=True) * 2
    assert tie([with_grad], [])[0] is with_grad
    assert tie([], []) == ()


def test_gradients_of_integers_do_not_flow():
    x = torch.arange(3)
    sent = tie(leave([x]), [])
    sent[0].backward(torch.full((3,), float("nan"), dtype=torch.float64))
    assert x.grad is None
    assert from_wire(sent[0].detach(), torch.int64).tolist() == [0, 1, 2]
