"""Collectives that autograd goes backward through, against what one process computes from all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from halfmesh.parallel import collectives
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import refusal

NAMES = ("copy_in", "sum_out", "split", "gather", "gather_in", "sum_and_split")
WHOLE_INPUT = ("copy_in", "split")
CALLS = {  # forward, backward
    "copy_in": (None, "all_reduce"),
    "sum_out": ("all_reduce", None),
    "split": (None, "all_gather_into_tensor"),
    "gather": ("all_gather_into_tensor", None),
    "gather_in": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "sum_and_split": ("reduce_scatter_tensor", "all_gather_into_tensor"),
}


def integers(shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Small ones, whose sums every dtype holds exactly."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(name: str, xs: list[torch.Tensor], grads: list[torch.Tensor], dim: int, rank: int):
    """Output and gradient on one rank, from the inputs and the outputs' gradients of all."""
    size = len(xs)
    part = {
        "copy_in": lambda: (xs[rank], sum(grads)),
        "sum_out": lambda: (sum(xs), grads[rank]),
        "split": lambda: (xs[rank].chunk(size, dim)[rank], torch.cat(grads, dim)),
        "gather": lambda: (torch.cat(xs, dim), grads[rank].chunk(size, dim)[rank]),
        "gather_in": lambda: (torch.cat(xs, dim), sum(grads).chunk(size, dim)[rank]),
        "sum_and_split": lambda: (sum(xs).chunk(size, dim)[rank], torch.cat(grads, dim)),
    }
    return part[name]()


def run(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    call: Callable[..., torch.Tensor] = getattr(collectives, name)
    assert dist.group.WORLD is not None
    return call(x, dist.group.WORLD) if name in ("copy_in", "sum_out") else call(x, dim, dist.group.WORLD)


def layouts(shape: tuple[int, ...]):
    """How a tensor of `shape` can lie in memory."""
    yield "contiguous", lambda t: t
    yield "transposed", lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)
    yield "strided", lambda t: torch.stack([t, t], -1)[..., 0]


def cells():
    """Shape, dim, dtype, layout."""
    for shape, dims in (((6,), (0, -1)), ((6, 12), (0, 1, -1, -2)), ((2, 6, 3), (1, -2))):
        for dim in dims:
            yield from ((shape, dim, torch.float32, layout) for layout in layouts(shape))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield from (((6, 12), dim, dtype, layout) for dim, layout in zip((0, 1), layouts((6, 12)), strict=False))


def compare_all(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name in NAMES:
        for shape, dim, dtype, (layout, lay) in cells():
            if name in ("copy_in", "sum_out") and dim != 0:
                continue  # they have no dim
            seeds = [1] * world_size if name in WHOLE_INPUT else range(world_size)
            xs = [integers(shape, seed, dtype) for seed in seeds]
            outs = [expected(name, xs, xs, dim, r)[0] for r in range(world_size)]
            grads = [integers(out.shape, 10 + r, dtype) for r, out in enumerate(outs)]
            x = lay(xs[rank]).detach().requires_grad_()
            out = run(name, x * 1, dim)
            out.backward(lay(grads[rank]))
            want, want_grad = expected(name, xs, grads, dim, rank)
            assert x.grad is not None
            exact = torch.equal(out, want) and torch.equal(x.grad, want_grad)
            if not (exact and out.dtype == x.grad.dtype == dtype):
                wrong.append(f"{name} {shape} {dim} {dtype} {layout}")
    return wrong


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_forward_and_backward(size):
    assert run_ranks(compare_all, size) == [[]] * size


@contextmanager
def counted(calls: list[tuple[str, int]]):
    """Collects the collectives of torch.distributed that run, with the bytes handed to them."""
    names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "barrier", "scatter"))]
    plain = {name: getattr(dist, name) for name in names}

    def watch(name):
        def call(*args, **kwargs):
            sent = args[1] if name in ("all_gather_into_tensor", "reduce_scatter_tensor") else args[0]
            calls.append((name, sent.numel() * sent.element_size()))
            return plain[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, watch(name))
    yield
    for name in names:
        setattr(dist, name, plain[name])


def count_calls(rank: int, world_size: int) -> dict:
    found = {}
    for name in NAMES:
        x = torch.ones(4, 6, dtype=torch.float16, requires_grad=True)
        forward: list = []
        backward: list = []
        with counted(forward):
            out = run(name, x * 1, 1)
        with counted(backward):
            out.sum().backward()
        found[name] = forward, backward
        with torch.no_grad(), counted(again := []):
            assert torch.equal(run(name, torch.ones(4, 6, dtype=torch.float16), 1), out)
        assert again == forward
    return found


@pytest.mark.distributed
def test_one_call_each_with_as_many_bytes_as_there_are():
    small, whole, large = 4 * 3 * 2, 4 * 6 * 2, 4 * 12 * 2
    sent = {
        "copy_in": (0, whole),
        "sum_out": (whole, 0),
        "split": (0, small),
        "gather": (whole, 0),
        "gather_in": (whole, large),
        "sum_and_split": (whole, small),
    }
    for found in run_ranks(count_calls, 2):
        for name, (forward, backward) in found.items():
            assert forward == [(CALLS[name][0], sent[name][0])] * (CALLS[name][0] is not None), name
            assert backward == [(CALLS[name][1], sent[name][1])] * (CALLS[name][1] is not None), name


def what_others_hold(rank: int, world_size: int) -> dict:
    """Which of the tensors that go in are changed, and what cannot be done."""
    found = {}
    for name in NAMES:
        x = torch.full((4, 4), float(rank + 1))
        kept = x.clone()
        run(name, x, 1)
        found[name] = torch.equal(x, kept)
    # The gradient that arrives at a backward may be held by others, too.
    for name in NAMES:
        x = torch.ones(4, 4, requires_grad=True)
        out = run(name, x * 1, 1)
        grad = torch.full_like(out, float(rank + 1))
        kept = grad.clone()
        out.backward(grad)
        found[name, "grad"] = torch.equal(grad, kept)
    # A part shares no memory with the whole, which may be freed or changed.
    whole = torch.ones(4, 4)
    run("split", whole, 0).fill_(7.0)
    found["part"] = bool((whole == 1).all())
    strided = torch.ones(4, 4).t()[:, ::2]
    run("sum_out", strided, 0)
    found["strided sum_out"] = bool((strided == 1).all())
    x = torch.ones(4, 4, requires_grad=True)
    once = [torch.autograd.grad(run(n, x * x, 1).pow(2).sum(), x, create_graph=True)[0] for n in NAMES]
    found["twice"] = [refusal(g.sum().backward) for g in once]
    return found


@pytest.mark.distributed
def test_nobody_elses_tensor_is_changed():
    for found in run_ranks(what_others_hold, 2):
        twice = found.pop("twice")
        assert {key for key, same in found.items() if not same} == {"sum_out"}  # it says that it uses it up
        assert all("marked with @once_differentiable" in message for message in twice), twice


def sum_of_intermediates(rank: int, world_size: int) -> bool:
    """A sum in place of what a linear layer put out, whose backward needs its input only."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 4), torch.nn.Parameter(torch.randn(world_size, 5, 4))
    whole = torch.nn.functional.linear(x, weight.sum(0)).tanh()
    (expected,) = torch.autograd.grad(whole.sum(), weight)
    mine = collectives.sum_out(torch.nn.functional.linear(x, weight[rank]), dist.group.WORLD)
    (grad,) = torch.autograd.grad(mine.tanh().sum(), weight)
    torch.testing.assert_close(grad[rank], expected[rank])
    needed = collectives.sum_out(weight.tanh(), dist.group.WORLD)  # whose backward needs what it put out
    assert "modified by an inplace operation" in refusal(needed.sum().backward)
    return bool(torch.allclose(mine.tanh(), whole))


@pytest.mark.distributed
def test_a_sum_in_place_goes_backward_through_a_linear_layer():
    assert run_ranks(sum_of_intermediates, 2) == [True, True]
