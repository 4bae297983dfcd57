"""Layers that the plans know, and cannot divide."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.tensor_checks import resolve

SEVERAL = "its activation looks at several features at once (softmax), which are divided; use one that does not"
UNTRIED = "its activation cannot be tried out on some of the features ("


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (nn.functional.gelu, None),
        (nn.functional.relu, None),
        (nn.SiLU(), None),
        (nn.PReLU(), None),
        (nn.RReLU(), None),
        (nn.Sequential(nn.GELU(), nn.Dropout(0.5)), None),
        (nn.Softmax(-1), SEVERAL),
        (lambda x: x.softmax(-1), SEVERAL),
        (lambda x: x / x.norm(dim=-1, keepdim=True), SEVERAL),
        (lambda x: x.roll(1, -1), SEVERAL),
        (nn.GLU(), SEVERAL),
        (nn.LayerNorm(8), UNTRIED),
        (nn.PReLU(8), UNTRIED),
    ],
)
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_activations_that_look_at_several_features(kind: type[nn.Module], activation: Callable[..., Any], message: str):
    layer = kind(4, 2, 8, activation=activation)
    state = torch.get_rng_state()
    found = resolve(nn.Sequential(layer), 2)[1]
    if message is None:
        assert found == []
        assert torch.equal(torch.get_rng_state(), state)
    else:
        assert len(found) == 1
        assert found[0].startswith(f"0 ({kind.__name__}): {message}")


def test_an_activation_is_tried_in_the_layers_dtype():
    assert resolve(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8)).bfloat16(), 2)[1] == []


class Uneven:
    """A config whose layers have different numbers of heads."""

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("'num_attention_heads' is a per-layer attribute")


def test_a_config_without_one_number_of_heads():
    model = nn.Sequential(nn.Linear(4, 4))
    model.tp_plan = {"0": "colwise"}
    model.config = Uneven()
    assert resolve(model, 2)[1][0] == (
        "the model's config does not say one num_attention_heads for all layers ('num_attention_heads' is a per-layer "
        "attribute); choose the layers yourself (parallel.tensor.plan = {pattern: style})"
    )
    model.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=None)
    assert resolve(model, 2)[1] == [
        "the model (config_heads(num_attention_heads), from plan 'hugging_face'): 3 config.num_attention_heads are not "
        "divisible by tensor=2; tensor can be 1, 3"
    ]
    for plan in (None, {}, "colwise"):
        model.tp_plan = plan
        assert "no plan is registered for any layer of Sequential" in resolve(model, 2)[1][0]
