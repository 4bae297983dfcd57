"""The tensor plans for models of torchvision, and of transformers where they bring none: GPT-2, BERT and T5.

Classes are named, not imported: none of these packages has to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..tensor.plans import LayerPlan
from .layer_plans import looks_aside

# -- torchvision -----------------------------------------------------------------------------------------------------


def _find_mlp_problem(block: Any) -> str | None:
    kinds = [type(layer).__name__ for layer in block.mlp]
    if len(kinds) != 5 or kinds[0] != "Linear" or kinds[3] != "Linear":
        return f"its mlp is made of {', '.join(kinds)}; leave it whole (parallel.tensor.plan = {{pattern: style}})"
    return looks_aside(block.mlp[1], block)


_MLP = {"mlp.0": "colwise", "mlp.3": "rowwise"}
TORCHVISION_VIT_BLOCK = LayerPlan(
    layers=("torchvision.models.vision_transformer.EncoderBlock",), styles=_MLP, find_problem=_find_mlp_problem
)
TORCHVISION_SWIN_BLOCK = LayerPlan(
    layers=(
        "torchvision.models.swin_transformer.SwinTransformerBlock",
        "torchvision.models.swin_transformer.SwinTransformerBlockV2",
    ),
    styles=_MLP,
    find_problem=_find_mlp_problem,
)
"""Its attention reads its layers' weights without calling them, and stays whole."""

# -- transformers ----------------------------------------------------------------------------------------------------


def _find_activation_problem(name: str) -> Callable[[Any], str | None]:
    """For a layer that has its activation under this name."""

    def find(layer: Any) -> str | None:
        activation = layer
        for part in name.split("."):
            activation = getattr(activation, part)
        return looks_aside(activation, layer)

    return find


def _find_gpt2_problem(attention: Any) -> str | None:
    if attention.is_cross_attention:
        return "it is a cross-attention, which this plan does not know; build the model with add_cross_attention=False"
    return None


GPT2_ATTENTION = LayerPlan(
    layers=("transformers.models.gpt2.modeling_gpt2.GPT2Attention",),
    styles={"": "heads(num_heads, split_size)", "c_attn": "fused_colwise(3)", "c_proj": "rowwise"},
    find_problem=_find_gpt2_problem,
)
GPT2_MLP = LayerPlan(
    layers=("transformers.models.gpt2.modeling_gpt2.GPT2MLP",),
    styles={"c_fc": "colwise", "c_proj": "rowwise"},
    find_problem=_find_activation_problem("act"),
)


def _bert_kinds(name: str) -> tuple[str, ...]:
    """BERT's class of this name, and those of models with the same modules."""
    models = {"bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "electra": "Electra"}
    return tuple(f"transformers.models.{m}.modeling_{m}.{prefix}{name}" for m, prefix in models.items())


def _find_bert_problem(layer: Any) -> str | None:
    if getattr(layer, "is_cross_attention", False):
        return "it is a cross-attention, which this plan does not know; build the model without"
    return None


BERT_ATTENTION = LayerPlan(
    layers=_bert_kinds("Attention"),
    styles={
        "self": "heads(num_attention_heads, all_head_size)",
        "self.query": "colwise",
        "self.key": "colwise",
        "self.value": "colwise",
        "output.dense": "rowwise",
    },
    find_problem=_find_bert_problem,
)
BERT_LAYER = LayerPlan(
    layers=_bert_kinds("Layer"),
    styles={"intermediate.dense": "colwise", "output.dense": "rowwise"},
    find_problem=_find_activation_problem("intermediate.intermediate_act_fn"),
)

T5_ATTENTION = LayerPlan(
    layers=("transformers.models.t5.modeling_t5.T5Attention",),
    styles={
        "": "heads(n_heads, inner_dim)",
        "q": "colwise",
        "k": "colwise",
        "v": "colwise",
        "relative_attention_bias": "embedding_features",
        "o": "rowwise",
    },
)
T5_MLP = LayerPlan(
    layers=("transformers.models.t5.modeling_t5.T5DenseActDense",),
    styles={"wi": "colwise", "wo": "rowwise"},
    find_problem=_find_activation_problem("act"),
)
T5_GATED_MLP = LayerPlan(
    layers=("transformers.models.t5.modeling_t5.T5DenseGatedActDense",),
    styles={"wi_0": "colwise", "wi_1": "colwise", "wo": "rowwise"},
    find_problem=_find_activation_problem("act"),
)
