"""Models of timm, transformers and torchvision, divided by halfmesh's own plans, train as one process's."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.proofs import Row, rows

pytestmark = pytest.mark.distributed

WORDS, LENGTH = 20, 6
VIT = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
SMALL = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 4}
EVA = {**SMALL, "img_size": 28, "patch_size": 14, "mlp_ratio": 2}
SWIN = {"img_size": 28, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4), "window_size": 7, "patch_size": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 8, "pad_token_id": 0}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
BERT |= {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0, "num_labels": 3}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": WORDS, "pad_token_id": 0}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
TV_SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": [2, 2]}
TV_SWIN |= {"stochastic_depth_prob": 0.0}
EAGER, TIED = {"attn_implementation": "eager"}, {"tie_word_embeddings": True}


def larger(model: nn.Module) -> nn.Module:
    """Parameters that are (nearly) zero hide what comes before them."""
    for param in model.parameters():
        if param.abs().max() < 0.05:
            nn.init.normal_(param, 0.5, 0.2, generator=torch.Generator().manual_seed(2))
    return model


def vit(mlp: str | None = None, **options: Any) -> Any:
    pytest.importorskip("timm")
    import timm.layers
    from timm.models.vision_transformer import VisionTransformer

    layer = {"mlp_layer": getattr(timm.layers, mlp)} if mlp else {}
    options = {**VIT, "class_token": False, "global_pool": "avg", **options, **layer}
    return larger(VisionTransformer(**options)), torch.randn(4, 1, 16, 16)


def of_timm(name: str, size: int = 32, **options: Any) -> Any:
    timm = pytest.importorskip("timm")
    return larger(timm.create_model(name, num_classes=3, **options)), torch.randn(4, 3, size, size)


def gated() -> Any:
    layers = pytest.importorskip("timm.layers")
    options = {"qkv_bias": True, "gated": True, "qk_norm": True, "norm_layer": nn.LayerNorm, "dim_out": 6}
    return nn.Sequential(layers.Attention(16, 4, **options)), torch.randn(2, 5, 16)


def words(kind: str, sizes: dict[str, Any], masks: bool = False, decodes: bool = False, **options: Any) -> Any:
    """A model of transformers."""
    hf = pytest.importorskip("transformers")
    warnings.filterwarnings("ignore")
    make = getattr(hf, kind)
    ids = torch.randint(1, WORDS, (2, LENGTH))
    given = {"input_ids": ids}
    if masks:
        given["attention_mask"] = torch.tensor([[1] * LENGTH, [1] * 4 + [0] * 2])
    if decodes:
        given["decoder_input_ids"] = ids
    return larger(make(make.config_class(**sizes, **options, use_cache=False))), given


def swin_2() -> Any:
    tv = pytest.importorskip("torchvision.models")
    layers = tv.swin_transformer
    kinds = {"block": layers.SwinTransformerBlockV2, "downsample_layer": layers.PatchMergingV2}
    return larger(tv.SwinTransformer(**TV_SWIN, **kinds)), torch.randn(2, 3, 16, 16)


def auto(sequence: bool = False) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "sequence_parallel": sequence}}}


LATENT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": WORDS, "pad_token_id": 0}
LATENT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "v_head_dim": 4, "q_lora_rank": 8}
LATENT |= {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "initializer_range": 0.2}
ALONE = {
    "ViT, 17 tokens": partial(vit, class_token=True, global_pool="token"),
    "distilled DeiT": partial(of_timm, "deit_tiny_distilled_patch16_224", **SMALL),
    "BEiT": partial(of_timm, "beit_base_patch16_224", **SMALL),
    "EVA-02": partial(of_timm, "eva02_tiny_patch14_224", 28, **EVA),
    "Swin of timm": partial(of_timm, "swin_tiny_patch4_window7_224", 28, **SWIN),
    "ConvNeXt": partial(of_timm, "convnext_tiny", depths=(1, 1, 1, 1), dims=(4, 8, 8, 8)),
    "gated attention": gated,
    "OLMo 2": partial(words, "Olmo2ForCausalLM", LLAMA),
    "Gemma": partial(words, "GemmaForCausalLM", LLAMA, **TIED),  # scales what its embedding returns
    "MiniCPM 3": partial(words, "MiniCPM3ForCausalLM", LATENT),  # latent attention, as DeepSeek's
    "Mixtral": partial(words, "MixtralForCausalLM", {**LLAMA, **EXPERTS}),
    "GPT-2, scaled": partial(
        words, "GPT2ForSequenceClassification", GPT2, True, **EAGER, scale_attn_by_inverse_layer_idx=True, n_inner=20
    ),
    **{kind: partial(words, f"{kind}ForSequenceClassification", BERT, masks=True) for kind in ("Roberta", "Electra")},
    "T5, gated": partial(words, "T5ForConditionalGeneration", T5, True, decodes=True, feed_forward_proj="gated-gelu"),
    "torchvision's Swin 2": swin_2,
}
WITH_SEQUENCES = {
    "ViT, registers": partial(vit, class_token=True, global_pool="token", reg_tokens=3),
    "ViT, norms and scales": partial(vit, qk_norm=True, init_values=0.5, qkv_bias=False, proj_bias=False),
    "ViT, no last norm": partial(vit, final_norm=False),  # it is an Identity, after which the sequence is whole
    **{f"ViT, {mlp}": partial(vit, mlp) for mlp in ("SwiGLU", "GluMlp")},
    "Llama, tied": partial(words, "LlamaForCausalLM", LLAMA, **TIED, attention_bias=True),
    "Qwen 3": partial(words, "Qwen3ForCausalLM", LLAMA, **TIED),
    "Phi 3": partial(words, "Phi3ForCausalLM", LLAMA),
}
"""Which are divided with their sequences, too."""


@rows(
    *(Row(name, build, auto(), slow=True) for name, build in ALONE.items()),
    *(Row(f"{name}, sequences", build, auto(True), slow=True) for name, build in WITH_SEQUENCES.items()),
)
def test_trains_as_one_process(row):
    row.prove()
