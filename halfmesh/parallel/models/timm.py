"""Plans for timm: the Vision Transformer and its layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..pipeline.partition import BlockPartition
from ..tensor.plans import LayerPlan, elementwise

# -- layers over tensor ranks ----------------------------------------------------------------------------------------


def _find_norm(layer: Any) -> str | None:
    return None if isinstance(layer.norm, nn.Identity) else "it has a norm over all features between its sharded layers"


def _find_mlp_problem(mlp: Any) -> str | None:
    return _find_norm(mlp) or elementwise("act")(mlp)


def _mlp(name: str, **styles: str) -> LayerPlan:
    return LayerPlan((f"timm.layers.mlp.{name}",), styles, {"": "region", "drop2": "sequence"}, _find_mlp_problem)


TIMM_MLP = _mlp("Mlp", fc1="colwise", fc2="rowwise")
TIMM_GLU_MLP = _mlp("GluMlp", fc1="fused_colwise(2)", fc2="rowwise")
TIMM_SWIGLU = _mlp("SwiGLU", fc1_g="colwise", fc1_x="colwise", fc2="rowwise")
TIMM_ATTENTION = LayerPlan(
    ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"),
    {"": "heads(num_heads, attn_dim)", "qkv": "fused_colwise(3)", "proj": "rowwise"}
    | {"gate": "colwise", "[qk]_norm": "partial"},
    {"": "region", "proj_drop": "sequence"},
    _find_norm,
)
_VIT = "timm.models.vision_transformer"
TIMM_BLOCK = LayerPlan((f"{_VIT}.Block",), sequence={"norm?": "sequence", "ls?": "sequence"})
TIMM_VIT = LayerPlan((f"{_VIT}.VisionTransformer",), sequence={"blocks.0": "sequence_begin", "norm": "sequence_end"})

# -- stages ----------------------------------------------------------------------------------------------------------

TIMM_VIT_STAGES = BlockPartition(
    layers=(f"{_VIT}.VisionTransformer", "timm.models.deit.VisionTransformerDistilled"),
    methods=("forward_features", "forward_head", "pool"),
    blocks="blocks",
    begin=lambda model, x: model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))),
    end=lambda model, x: model.forward_head(model.norm(x)),
    end_uses=("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist"),
)
