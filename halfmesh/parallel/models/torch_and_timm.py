"""Plans for torch.nn (transformer layers, and nn.Sequential as stages), the MLPs of torchvision's Transformers, and
timm's Vision Transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from ...utils.torch_private import call_hooks
from ..pipeline.partition import BlockPartition, Call, Piece, children_of
from ..tensor.plans import LayerPlan, elementwise
from ..trial import comes_from

# -- torch.nn and torchvision ------------------------------------------------------------------------------------------

TORCH_ATTENTION = LayerPlan((nn.MultiheadAttention,), {"": "attention", "out_proj": "rowwise"})
TORCH_ENCODER = LayerPlan((nn.TransformerEncoder,), {"": "off(use_nested_tensor)"})
TORCH_LAYER = LayerPlan(
    (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    {"": "off(activation_relu_or_gelu)", "linear1": "colwise", "linear2": "rowwise"},  # no fused evaluation
    find_problem=elementwise("activation"),
)


class SequentialPartition:
    """Cuts any nn.Sequential before each of its modules, and before those of the nn.Sequentials in it."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        if not comes_from(model, (nn.Sequential,)):
            return None
        return [Piece(name, (name,), partial(_run, name, index == 0)) for index, name in enumerate(_rows(model, ""))]


def _rows(row: nn.Module, prefix: str) -> Iterator[str]:
    for name in children_of(row):
        child = row.get_submodule(name)
        opens = comes_from(child, (nn.Sequential,)) and len(list(child.children())) > 0
        if opens and not call_hooks(child):  # hooks run when the child itself is called
            yield from _rows(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _run(name: str, is_first: bool, model: nn.Module, call: Call, activations: Any) -> Any:
    module = model.get_submodule(name)
    return module(*call.args, **call.kwargs) if is_first else module(activations)


SEQUENTIAL_STAGES = SequentialPartition()


_BLOCKS = "vision_transformer.EncoderBlock", *(f"swin_transformer.SwinTransformerBlock{v}" for v in ("", "V2"))
TORCHVISION_BLOCK = LayerPlan(
    tuple(f"torchvision.models.{name}" for name in _BLOCKS), {"mlp.0": "colwise", "mlp.3": "rowwise"}
)
"""Swin's attention reads the weights of its layers without calling them, and stays unsharded."""


# -- timm --------------------------------------------------------------------------------------------------------------


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

TIMM_VIT_STAGES = BlockPartition(
    layers=(f"{_VIT}.VisionTransformer", "timm.models.deit.VisionTransformerDistilled"),
    methods=("forward_features", "forward_head", "pool"),
    blocks="blocks",
    begin=lambda model, x: model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))),
    end=lambda model, x: model.forward_head(model.norm(x)),
    end_uses=("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist"),
)
