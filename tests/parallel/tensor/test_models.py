"""Plans for models of timm and transformers: which styles are known, and what is rejected with its reason."""

from __future__ import annotations

import warnings

import pytest

from halfmesh.parallel.models.transformers import HuggingFacePlan
from tests.parity.test_tensor_models import BERT, GPT2, LLAMA, SWIN, T5, VIT
from tests.support.tensor_parity import rejected


@pytest.mark.slow
def test_tensor_plans_of_transformers_are_known():
    """Of all configs in the installed version that carry one; their experts stay whole."""
    hf = pytest.importorskip("transformers")
    known = set(HuggingFacePlan.STYLES)
    plans = {}
    for name in dir(hf):
        if name.endswith("Config") and isinstance(getattr(hf, name), type):
            plans[name] = getattr(getattr(hf, name), "base_model_tp_plan", None) or {}
    plans = {name: plan for name, plan in plans.items() if plan}
    assert len(plans) > 100
    unknown = {
        name: [pattern for pattern, style in plan.items() if style not in known and "experts" not in pattern.split(".")]
        for name, plan in plans.items()
    }
    assert not {name: patterns for name, patterns in unknown.items() if patterns}


def test_models_of_timm_that_cannot_be_divided():
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    for options, words in [
        (
            {"scale_attn_norm": True},
            "blocks.0.attn (Attention): it has a norm over all features between its",
        ),
        ({"scale_mlp_norm": True}, "blocks.0.mlp (Mlp): it has a norm over all features between its"),
        ({"num_heads": 1}, "blocks.0.attn (heads(num_heads, attn_dim), from plan 'timm_attention'): 1 num_heads"),
    ]:
        assert words in rejected(VisionTransformer(**{**VIT, **options}))
    assert "Convolutions cannot be sharded: if most of the model is convolutions, leave tensor at 1" in rejected(
        timm.create_model("resnet18")
    )
    swin = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    assert "sequence_parallel=True, but no plan says where" in rejected(swin, sequence_parallel=True)


def test_language_models_that_cannot_be_divided():
    hf = pytest.importorskip("transformers")
    warnings.filterwarnings("ignore")
    llama = {**LLAMA, "hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2}
    limited = hf.T5EncoderModel(hf.T5Config(**T5))
    limited.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.max_norm = 1.0
    cross = hf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    for model, words in [
        (hf.LlamaForCausalLM(hf.LlamaConfig(**llama)), "3 config.num_key_value_heads are not divisible by tensor=2"),
        (
            hf.BloomForCausalLM(hf.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=20)),
            "no plan is registered for any layer of BloomForCausalLM. Write one: ",
        ),
        (
            hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, add_cross_attention=True)),
            "crossattention (GPT2Attention): it has cross-attention, which this plan does",
        ),
        (hf.BertLMHeadModel(cross), "crossattention (BertAttention): it has cross-attention, which this plan does"),
        (limited, "relative_attention_bias (embedding_features, from plan 't5_attention'): max_norm is set, which"),
    ]:
        assert words in rejected(model)
