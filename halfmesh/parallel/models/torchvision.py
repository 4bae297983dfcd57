"""torchvision: the MLPs of its Vision and Swin Transformers."""

from __future__ import annotations

from ..tensor.plans import LayerPlan

_MLP = {"mlp.0": "colwise", "mlp.3": "rowwise"}

VIT_BLOCK = LayerPlan(
    layers=("torchvision.models.vision_transformer.EncoderBlock",),
    styles=_MLP,
)
SWIN_BLOCK = LayerPlan(
    layers=(
        "torchvision.models.swin_transformer.SwinTransformerBlock",
        "torchvision.models.swin_transformer.SwinTransformerBlockV2",
    ),
    styles=_MLP,
)
"""Its attention reads the weights of its layers without calling them, and stays unsharded."""
