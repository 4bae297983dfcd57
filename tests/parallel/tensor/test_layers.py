"""Divided layers: what they send for one input, and inputs that they reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.test_tensor import MLP, PROJECTIONS, SEQUENCE, VOCAB, WORDS, Language, Projections, mlp, sequences
from tests.support.ranks import here, ranks_on, run_ranks
from tests.support.tensor_parity import divide, random, rejection

pytestmark = pytest.mark.distributed

WRONG_WORDS = (-1, WORDS, -WORDS) if ranks_on() == "gloo-cpu" else ()  # a GPU ends the process


def sums(call: Callable[[], Any]) -> int:
    """How many all-reduces `call` starts."""
    with pytest.MonkeyPatch.context() as patch:
        calls, plain = [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
        call()
    return len(calls)


def shared_inputs(rank: int, world_size: int) -> list[int]:
    engine, x = divide(Projections().double(), PROJECTIONS), random(3, 4)
    outputs: list[torch.Tensor] = []
    engine.backward(engine(x).sum())  # the first tries the plan out, too
    counts = [sums(lambda: outputs.append(engine(x))), sums(lambda: engine.backward(outputs[0].sum()))]
    both = engine(x) + engine(x)
    counts.append(sums(lambda: engine.backward(both.sum())))
    engine.model.before.requires_grad_(False)
    frozen_below = engine(x)
    return [*counts, sums(lambda: engine.backward(frozen_below.sum()))]


def test_layers_that_share_an_input_share_one_sum():
    assert run_ranks(shared_inputs, 2) == [[1, 1, 2, 0]] * 2


def wrong_inputs(rank: int, world_size: int) -> dict[str, str]:
    x, found = random(3, 4, dtype=torch.float32), {}
    found["whole features"] = rejection(lambda: divide(mlp(), {"4": "rowwise"})(x))
    found["sequence"] = rejection(lambda: divide(sequences(), SEQUENCE, True)(random(2, 5, 4).float()))
    plan = {name: style for name, style in SEQUENCE.items() if name != "1.*.norm"}
    engine = divide(sequences(), plan, True)
    output = engine(random(2, 6, 4).float())
    found["norms"] = rejection(lambda: engine.backward(output.square().sum()))
    for bad in WRONG_WORDS:
        engine = divide(Language(), VOCAB)
        found[f"word {bad}"] = rejection(lambda e=engine, bad=bad: e(here(torch.tensor([[1, bad]]))))
    x.requires_grad_()
    outer = divide(mlp(), MLP)(x)
    (grad,) = torch.autograd.grad(outer.square().sum(), x, create_graph=True)
    found["a gradient of a gradient"] = rejection(lambda: grad.sum().backward())
    return found


def test_inputs_that_cannot_be_right_are_rejected_on_every_rank():
    words = {
        "whole features": "expects this rank's 4 features, but its input has 8; give the layer before it the style",
        "sequence": "needs a sequence length that tensor=2 divides, and this one is 5; pad it to 6",
        "norms": "the gradients of 1.0.norm.weight, 1.0.norm.bias, 1.1.norm.weight, 1.1.norm.bias",
        **{f"word {bad}": "IndexError: index out of range in self" for bad in WRONG_WORDS},
        "a gradient of a gradient": "marked with @once_differentiable",
    }
    for found in run_ranks(wrong_inputs, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case
