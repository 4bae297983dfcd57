"""torchvision: the blocks of its Vision and Swin Transformers."""

from __future__ import annotations

from typing import Any

from ..tensor.plans import LayerPlan
from .torch_nn import find_activation_problem


def _find_problem(block: Any) -> str | None:
    kinds = [type(layer).__name__ for layer in block.mlp]
    if len(kinds) != 5 or kinds[0] != "Linear" or kinds[3] != "Linear":
        return f"its mlp is made of {', '.join(kinds)}; leave it whole (parallel.tensor.plan = {{pattern: style}})"
    return find_activation_problem(block.mlp[1], block)


def _mlp_of(*layers: str) -> LayerPlan:
    return LayerPlan(layers=layers, styles={"mlp.0": "colwise", "mlp.3": "rowwise"}, find_problem=_find_problem)


VIT_BLOCK = _mlp_of("torchvision.models.vision_transformer.EncoderBlock")
SWIN_BLOCK = _mlp_of(
    "torchvision.models.swin_transformer.SwinTransformerBlock",
    "torchvision.models.swin_transformer.SwinTransformerBlockV2",
)
"""Its attention reads its layers' weights without calling them, and stays whole."""
