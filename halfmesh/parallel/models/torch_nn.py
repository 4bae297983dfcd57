"""torch.nn: its transformer layers, and nn.Sequential as stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..._torch import call_hooks
from ..modules import comes_from
from ..pipeline.pieces import Call, Piece, children_of
from ..tensor.plans import LayerPlan


def find_activation_problem(activation: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module) -> str | None:
    """Why `activation` of `layer` cannot work on some of the features only, if it cannot."""
    param = next(layer.parameters())
    features = torch.linspace(-2, 2, 8, dtype=param.dtype, device="cpu" if param.is_meta else param.device)
    if isinstance(activation, nn.Module):
        activation = copy.deepcopy(activation).eval()  # some draw random numbers in training
        if param.is_meta:  # any values will do
            activation.to_empty(device="cpu")
            for own in (*activation.parameters(), *activation.buffers()):
                nn.init.constant_(own, 0.25)
    try:
        with torch.no_grad():
            whole, parts = activation(features), [activation(part) for part in features.chunk(2)]
    except Exception as error:
        return (
            f"its activation cannot be tried out on some of the features ({error}), and they are divided; use another"
        )
    if whole.shape != features.shape or not torch.allclose(whole, torch.cat(parts)):
        return "its activation looks at several features at once (softmax), which are divided; use one that does not"
    return None


def check_activation(name: str) -> Callable[[Any], str | None]:
    """`find_problem` of a layer that has its activation under this name."""

    def find(layer: Any) -> str | None:
        activation = layer
        for part in name.split("."):
            activation = getattr(activation, part)
        return find_activation_problem(activation, layer)

    return find


ATTENTION = LayerPlan(
    layers=("torch.nn.modules.activation.MultiheadAttention",),
    styles={"": "attention", "out_proj": "rowwise"},
)
ENCODER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerEncoder",),
    styles={"": "off(use_nested_tensor)"},
)
ENCODER_LAYER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerEncoderLayer",),
    styles={"": "off(activation_relu_or_gelu)", "linear1": "colwise", "linear2": "rowwise"},  # no fused evaluation
    find_problem=check_activation("activation"),
)
DECODER_LAYER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerDecoderLayer",),
    styles={"linear1": "colwise", "linear2": "rowwise"},
    find_problem=check_activation("activation"),
)


class SequentialPartition:
    """Any nn.Sequential, before each of its modules, and before those of the nn.Sequentials that it is made of."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        if not comes_from(model, (nn.Sequential,)):
            return None
        return [self._piece(name, first=index == 0) for index, name in enumerate(self._rows(model, ""))]

    def _rows(self, row: nn.Module, prefix: str) -> Iterator[str]:
        for name in children_of(row):
            child = row.get_submodule(name)
            opens = comes_from(child, (nn.Sequential,)) and len(list(child.children())) > 0
            if opens and not call_hooks(child):  # which run when it is called as a whole
                yield from self._rows(child, f"{prefix}{name}.")
            else:
                yield prefix + name

    def _piece(self, name: str, first: bool) -> Piece:
        def run(model: nn.Module, call: Call, activations: Any) -> Any:
            module = model.get_submodule(name)
            return module(*call.args, **call.kwargs) if first else module(activations)

        return Piece(name, (name,), run)


SEQUENTIAL_STAGES = SequentialPartition()
