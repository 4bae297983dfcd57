"""The tensor plans that halfmesh brings: timm's Vision Transformer, torch's transformer layers, Hugging Face models.

Classes are named, not imported: none of these packages has to be there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..tensor.plans import LayerPlan


def _scaled_norm(attention: nn.Module) -> str | None:
    if not isinstance(attention.norm, nn.Identity):
        return "its norm works on the features of all heads (scale_norm=True), which are divided; build it without"
    return None


TIMM_ATTENTION = LayerPlan(
    layers=("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"),
    styles={
        "": "heads(num_heads, attn_dim)",
        "qkv": "fused_colwise(3)",
        "gate": "colwise",
        "q_norm": "partial",
        "k_norm": "partial",
        "proj": "rowwise",
    },
    sequence={"": "region", "proj_drop": "sequence"},
    find_problem=_scaled_norm,
)

_LINEAR_MLP = "build the model with those (timm's ConvNeXt: conv_mlp=False), or leave tensor at 1"
_NORM_PROBLEM = "its norm works on all hidden features, which are divided; build it without (norm_layer=None)"


def _hidden_norm(mlp: Any) -> str | None:
    if getattr(mlp, "fc1", None) is not None and not isinstance(mlp.fc1, nn.Linear):
        return f"its layers are {type(mlp.fc1).__name__}, and Linear ones can be divided; {_LINEAR_MLP}"
    return looks_aside(mlp.act, mlp) if isinstance(mlp.norm, nn.Identity) else _NORM_PROBLEM


def _activation(layer: Any) -> str | None:
    return looks_aside(layer.activation, layer)


def looks_aside(activation: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module) -> str | None:
    """Why `activation` cannot work on some of the features only."""
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


TIMM_MLP = LayerPlan(
    layers=("timm.layers.mlp.Mlp",),
    styles={"fc1": "colwise", "fc2": "rowwise"},
    sequence={"": "region", "drop2": "sequence"},
    find_problem=_hidden_norm,
)
TIMM_GLU_MLP = LayerPlan(
    layers=("timm.layers.mlp.GluMlp",),
    styles={"fc1": "fused_colwise(2)", "fc2": "rowwise"},
    sequence={"": "region", "drop2": "sequence"},
    find_problem=_hidden_norm,
)
TIMM_SWIGLU = LayerPlan(
    layers=("timm.layers.mlp.SwiGLU",),
    styles={"fc1_g": "colwise", "fc1_x": "colwise", "fc2": "rowwise"},
    sequence={"": "region", "drop2": "sequence"},
    find_problem=_hidden_norm,
)
TIMM_BLOCK = LayerPlan(
    layers=("timm.models.vision_transformer.Block",),
    sequence={"norm1": "sequence", "ls1": "sequence", "norm2": "sequence", "ls2": "sequence"},
)
TIMM_VIT = LayerPlan(
    layers=("timm.models.vision_transformer.VisionTransformer",),
    sequence={"blocks.0": "sequence_begin", "norm": "sequence_end"},
)

TORCH_ATTENTION = LayerPlan(
    layers=("torch.nn.modules.activation.MultiheadAttention",),
    styles={"": "attention", "out_proj": "rowwise"},
)
TORCH_ENCODER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerEncoder",),
    styles={"": "off(use_nested_tensor)"},
)
TORCH_ENCODER_LAYER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerEncoderLayer",),
    styles={"": "off(activation_relu_or_gelu)", "linear1": "colwise", "linear2": "rowwise"},  # no fused evaluation
    find_problem=_activation,
)
TORCH_DECODER_LAYER = LayerPlan(
    layers=("torch.nn.modules.transformer.TransformerDecoderLayer",),
    styles={"linear1": "colwise", "linear2": "rowwise"},
    find_problem=_activation,
)


class HuggingFacePlan:
    """The `tp_plan` that a Hugging Face model brings, in halfmesh's styles."""

    STYLES: Mapping[str, str | None] = {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_rep": "colwise_gather",
        "colwise_gather_output": "colwise_gather",
        "rowwise_rep": "rowwise_split",
        "rowwise_split_input": "rowwise_split",
        "embedding_rowwise": "vocab",
        "embedding_colwise": "embedding_gather",
        "replicated_with_grad_allreduce": "partial",
        "mla_kv_a_proj": "latent_keys({config.qk_rope_head_dim})",
        "replicate": None,
        "all_reduce": None,
        "local_params": None,  # its parameters have entries of their own
    }
    SEQUENCE: Mapping[str, str] = {
        "layers.0": "sequence_begin",
        "layers.*.input_layernorm": "sequence",
        "layers.*.post_attention_layernorm": "sequence",
        "layers.*.self_attn": "region(hidden_states)",
        "layers.*.mlp": "region(x)",
        "norm": "sequence_end",
    }
    """For decoders with the modules of Llama's; where others differ, the checks of the plan say so."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        plan = getattr(model, "tp_plan", None)
        config = getattr(model, "config", None)
        if not isinstance(plan, Mapping) or config is None:
            return
        names = [name for name, _ in model.named_modules()]
        for pattern, theirs in plan.items():
            if _is_of_experts(pattern):
                continue
            if theirs not in self.STYLES:
                raise InputError(
                    f"the model's tp_plan gives {pattern!r} the style {theirs!r}, which halfmesh does not have; choose "
                    "the layers yourself (parallel.tensor.plan = {pattern: style})"
                )
            style = self.STYLES[theirs]
            if style is not None:
                style = style.format(config=config.get_text_config()) if "{" in style else style
                yield from ((name, style) for name in names if fnmatchcase(name, pattern))
                for name, param in model.named_parameters() if style == "colwise" else ():
                    if fnmatchcase(name, pattern) and param.dim() == 1:  # of an attention: a number for each head
                        owner, _, own = name.rpartition(".")
                        yield owner, f"rows({own})"
        for name in ("num_attention_heads", "num_key_value_heads"):  # attention takes their number from the shape
            if plan and _counts(config, name):
                yield "", f"config_heads({name})"
        if plan and sequence_parallel:
            base = getattr(model, "base_model_prefix", "")
            prefix = f"{base}." if base in names else ""
            for pattern, style in self.SEQUENCE.items():
                yield from ((name, style) for name in names if fnmatchcase(name, prefix + pattern))


def _is_of_experts(pattern: str) -> bool:
    """Whether it names modules that have the parameters of all experts, which stay whole."""
    return "experts" in pattern.split(".")


def _counts(config: object, name: str) -> bool:
    try:
        return isinstance(getattr(config, name, None), int)
    except RuntimeError as error:  # a config whose layers differ
        raise InputError(
            f"the model's config does not say one {name} for all layers ({error}); choose the layers yourself "
            "(parallel.tensor.plan = {pattern: style})"
        ) from error


HUGGING_FACE = HuggingFacePlan()
