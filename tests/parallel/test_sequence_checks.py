"""Sequence parallelism needs a plan that knows all that lies where the sequence is divided."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from halfmesh.parallel.tensor_checks import resolve


def problems(model: nn.Module, plan: str | Mapping[str, str], sequence: bool = False) -> list[str]:
    return resolve(model, 2, plan, sequence)[1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.other = nn.MultiheadAttention(8, 4)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.tail = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x):
        return x


MLPS = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
SPAN = {"layers.0": "sequence_begin", "norm": "sequence_end"}
REGIONS = {"layers.*.mlp": "region", "layers.*.norm": "sequence", "layers.*.other": "partial"}
COMPLETE = {**MLPS, **SPAN, **REGIONS}


def without(name: str) -> dict[str, str]:
    return {pattern: style for pattern, style in COMPLETE.items() if pattern != name}


NO_SPAN = (
    "sequence_parallel=True, but no plan says where the sequence is divided ('sequence_begin') and where it is whole "
    "again ('sequence_end'); set sequence_parallel=False, or write a plan that does"
)


def test_where_the_sequence_is_divided():
    assert problems(Decoder(), COMPLETE, sequence=True) == []
    assert problems(Decoder(), without("layers.0"), sequence=True) == [NO_SPAN]
    assert problems(Decoder(), without("norm"), sequence=True) == [NO_SPAN]
    assert problems(Decoder(), MLPS, sequence=True) == [NO_SPAN]
    assert problems(Decoder(), MLPS) == []


def test_divided_layers_outside_a_region():
    found = problems(Decoder(), without("layers.*.mlp"), sequence=True)
    assert found[0] == (
        "layers.0.mlp.0 (colwise, from plan 'layers.*.mlp.0'): under sequence_parallel=True it has to be in a "
        "'region', which makes the sequence whole; give that style to the module around it"
    )
    names = [message.split()[0] for message in found[:4]]
    assert names == [f"layers.{i}.mlp.{j}" for j in (0, 2) for i in (0, 1)]
    # Beyond the divided sequence they need none.
    assert problems(Decoder(), {**COMPLETE, "tail.0": "colwise", "tail.1": "rowwise"}, sequence=True) == []
    assert problems(Decoder(), {**COMPLETE, "neck.0": "colwise", "neck.1": "rowwise"}, sequence=True) == []
    assert problems(Decoder(), {**COMPLETE, "tail.1": "colwise_gather"}, sequence=True) == []


@pytest.mark.parametrize("name", ["neck", "tail"])
def test_a_region_where_the_sequence_is_whole(name):
    plan = {**COMPLETE, f"{name}.0": "colwise", f"{name}.1": "rowwise", name: "region"}
    found = problems(Decoder(), plan, sequence=True)
    assert found[0] == (
        f"{name} (region, from plan {name!r}): it is not between 'sequence_begin' and 'sequence_end', in the order in "
        "which the model has its modules, so its sequence is whole already; set sequence_parallel=False, or write a "
        "plan without this"
    )


def test_attention_with_inputs_of_its_own():
    plan = {**COMPLETE, "layers.*.other": "attention", "layers.*.other.out_proj": "rowwise"}
    found = problems(Decoder(), plan, sequence=True)
    assert found[0] == (
        "layers.0.other (attention, from plan 'layers.*.other'): sequence_parallel=True does not know "
        "torch.nn.MultiheadAttention, whose keys and values are inputs of their own; set sequence_parallel=False"
    )
    assert problems(Decoder(), plan) == []


def test_parameters_that_nobody_mentions():
    found = problems(Decoder(), without("layers.*.norm"), sequence=True)
    assert found == [
        f"layers.{i}.norm.{name} is in a layer whose activations are divided along the sequence, and no plan says "
        "whether its gradient is; give its module the style 'sequence' (outside a region) or 'partial' (inside one)"
        for i in (0, 1)
        for name in ("weight", "bias")
    ]
    frozen = Decoder()
    for layer in frozen.layers:
        layer.norm.requires_grad_(False)
    assert problems(frozen, without("layers.*.norm"), sequence=True) == []


def test_regions():
    resolved, _ = resolve(Decoder(), 2, COMPLETE, True)
    assert resolved.regions == ["layers.0.mlp", "layers.1.mlp"]
    assert resolved.in_region("layers.0.mlp.2")
    assert resolved.in_region("layers.0.mlp")
    assert not resolved.in_region("layers.0.mlpx.2")
    assert not resolved.in_region("norm")
