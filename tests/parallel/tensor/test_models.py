"""Plans for models of timm, transformers and torchvision: parity, or a refusal with its reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.models.transformers import HuggingFacePlan
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import divide, parity, random, refusal, refused

WORDS, LENGTH = 20, 6
VIT = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
GAP = {"class_token": False, "global_pool": "avg"}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 8, "pad_token_id": 0}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
BERT |= {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": WORDS, "pad_token_id": 0}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
TV_VIT = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 24}
TV_SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": [2, 2]}

Case = tuple[str, Callable[[], nn.Module], Callable[[Any], torch.Tensor], bool]
"""Name, what builds a model, what calls it, and whether sequence parallelism works."""


def timm_models() -> Iterator[Case]:
    import timm
    from timm.layers import Attention, GluMlp, SwiGLU, SwiGLUPacked
    from timm.models.vision_transformer import VisionTransformer

    x = random(4, 1, 16, 16)
    for options, sequence in [
        (GAP, True),
        ({}, False),  # 17 tokens
        ({"reg_tokens": 3}, True),
        ({**GAP, "qk_norm": True, "init_values": 0.5}, True),
        ({**GAP, "qkv_bias": False, "proj_bias": False}, True),
        *(({**GAP, "mlp_layer": layer}, True) for layer in (SwiGLU, SwiGLUPacked, GluMlp)),
        ({**GAP, "final_norm": False}, True),  # it is an Identity, after which the sequence is whole
    ]:
        yield f"ViT {options}", partial(VisionTransformer, **{**VIT, **options}), lambda m: m(x), sequence
    small = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 4}
    eva = {**small, "img_size": 28, "patch_size": 14, "mlp_ratio": 2}
    swin = {"img_size": 28, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4), "window_size": 7, "patch_size": 2}
    for name, options in {
        "deit_tiny_distilled_patch16_224": small,
        "deit3_small_patch16_224": small,
        "beit_base_patch16_224": small,
        "eva02_tiny_patch14_224": eva,
        "eva_giant_patch14_224": eva,
        "swin_tiny_patch4_window7_224": swin,
        "convnext_tiny": {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)},
        "vit_small_patch16_18x2_224": small,
    }.items():
        y = random(4, 3, options.get("img_size", 32), options.get("img_size", 32))
        yield name, partial(timm.create_model, name, num_classes=3, **options), lambda m, y=y: m(y), False
    gated = partial(Attention, 16, 4, qkv_bias=True, gated=True, qk_norm=True, norm_layer=nn.LayerNorm, dim_out=6)
    yield "gated", lambda: nn.Sequential(gated()), lambda m: m(random(2, 5, 16)), False


def language_models() -> Iterator[Case]:
    import transformers as hf

    ids = here(torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1)))

    def call(model: Any) -> torch.Tensor:
        output = model(input_ids=ids, use_cache=False)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    tied = {"tie_word_embeddings": True}
    for name, options, sequence in [
        ("Llama", {**tied, "attention_bias": True}, True),
        ("Llama", {}, True),
        ("Qwen3", tied, True),
        ("Mistral", {}, True),
        ("Phi3", {}, True),
        ("Olmo2", {}, False),
        ("Gemma", tied, False),  # scales what its embedding returns
    ]:
        config = getattr(hf, f"{name}Config")(**LLAMA, **options)
        yield f"{name} {options}", partial(getattr(hf, f"{name}ForCausalLM"), config), call, sequence
    yield "LlamaModel", partial(hf.LlamaModel, hf.LlamaConfig(**LLAMA)), call, True
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    yield "Mixtral", partial(hf.MixtralForCausalLM, hf.MixtralConfig(**LLAMA, **experts)), call, False
    latent = {**LLAMA, "num_key_value_heads": 4, "head_dim": 6, "v_head_dim": 4, "qk_nope_head_dim": 4}
    latent |= {"kv_lora_rank": 6, "q_lora_rank": 8, "qk_rope_head_dim": 2}
    yield "MiniCPM3", partial(hf.MiniCPM3ForCausalLM, hf.MiniCPM3Config(**latent)), call, False


def other_models() -> Iterator[Case]:
    import torchvision.models as tv
    import transformers as hf

    ids = here(torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1)))
    mask = here(torch.tensor([[1] * LENGTH, [1] * 4 + [0] * 2]))

    def words(model: Any, **given: Any) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, **given).logits

    eager = {"attn_implementation": "eager"}
    yield "GPT-2", partial(hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2)), words, False
    scaled = hf.GPT2Config(**GPT2, **eager, scale_attn_by_inverse_layer_idx=True, n_inner=20)
    yield "GPT-2, scaled", partial(hf.GPT2ForSequenceClassification, scaled), words, False
    for name in ("Bert", "Roberta", "XLMRoberta", "Electra"):
        for options in ({}, eager):
            config = getattr(hf, f"{name}Config")(**BERT, **options, num_labels=3)
            yield f"{name} {options}", partial(getattr(hf, f"{name}ForSequenceClassification"), config), words, False
    yield "Bert, words", partial(hf.BertForMaskedLM, hf.BertConfig(**BERT)), words, False
    for act in ("relu", "gated-gelu"):
        t5 = partial(hf.T5ForConditionalGeneration, hf.T5Config(**T5, feed_forward_proj=act))
        yield f"T5 {act}", t5, lambda m: words(m, decoder_input_ids=ids), False
    yield "T5 encoder", partial(hf.T5EncoderModel, hf.T5Config(**T5)), lambda m: m(input_ids=ids)[0], False
    x = random(2, 3, 16, 16)
    yield "torchvision ViT", partial(tv.VisionTransformer, **TV_VIT, num_classes=3), lambda m: m(x), False
    second = {"block": tv.swin_transformer.SwinTransformerBlockV2}
    second |= {"downsample_layer": tv.swin_transformer.PatchMergingV2}
    for options in ({}, second):
        yield f"Swin {options}", partial(tv.SwinTransformer, **TV_SWIN, **options), lambda m: m(x), False


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """In fp64, without dropout and without parameters that are (nearly) zero and hide what comes before them."""
    torch.manual_seed(0)
    model = build().double().eval()
    for param in model.parameters():
        if param.abs().max() < 0.05:
            nn.init.normal_(param, 0.5, 0.2, generator=torch.Generator().manual_seed(2))
    return model


def parities(rank: int, world_size: int, models: Callable[[], Iterator[Case]]) -> dict[tuple[str, bool], float]:
    warnings.filterwarnings("ignore")
    found = {}
    for name, build, call, sequence in models():
        found[name, False] = parity(made(build), call)
        if sequence:
            found[name, True] = parity(made(build), call, "auto", True)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("models", "count", "packages"),
    [(timm_models, 26, "timm"), (language_models, 16, "transformers"), (other_models, 17, "transformers torchvision")],
)
def test_outputs_and_updates_are_those_of_one_process(models, count, packages):
    for package in packages.split():
        pytest.importorskip(package)
    for found in run_ranks(parities, 2, models, timeout=240):
        assert len(found) == count
        assert max(found.values()) < 1e-12, found


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


def conv1d(rank: int, world_size: int) -> list[float]:
    """transformers' transposed linear layers, under patterns of one's own."""
    from transformers.pytorch_utils import Conv1D

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Conv1D(12, 8), nn.Tanh(), Conv1D(8, 12), Conv1D(6, 8)).double()

    plans = ({"0": "colwise", "2": "rowwise", "3": "colwise_gather"}, {"0": "colwise_gather", "2": "rowwise_split"})
    assert "takes this rank's 6 features, but its input has 12" in refusal(
        lambda: divide(make(), {"2": "rowwise"})(random(3, 5, 8))
    )
    return [parity(make(), lambda m: m(random(3, 5, 8)), plan) for plan in plans]


@pytest.mark.slow
@pytest.mark.distributed
def test_transposed_layers():
    pytest.importorskip("transformers")
    for found in run_ranks(conv1d, 2):
        assert max(found) < 1e-13


def drops(rank: int, world_size: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Which samples each DropPath drops, with divided sequences, in two forwards; and what each Dropout drops."""
    from timm.layers import DropPath
    from timm.models.vision_transformer import VisionTransformer

    rates = dict.fromkeys(("drop_path_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "drop_rate"), 0.5)
    torch.manual_seed(0)
    model = VisionTransformer(**VIT, **GAP, **rates)
    for block in model.blocks:
        block.attn.fused_attn = False  # a module of its own drops attention weights
    engine = divide(model, "auto", True)
    seen: list[Any] = []
    masks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, DropPath) and module.drop_prob:
            module.register_forward_hook(lambda _, args, output: seen.append((output == 0).flatten(1).all(1).tolist()))
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_hook(lambda _, args, output, name=name: masks.update({name: output == 0}))
    for _ in range(2):
        engine(random(16, 1, 16, 16, dtype=torch.float32))
    return seen, masks


@pytest.mark.slow
@pytest.mark.distributed
def test_samples_are_dropped_alike_on_all_ranks():
    pytest.importorskip("timm")
    (first, masks), (second, others) = run_ranks(drops, 2)
    assert len(first) == 2 * 2
    assert first == second
    assert all(any(dropped) and not all(dropped) for dropped in first)
    assert len({str(dropped) for dropped in first}) == 4
    whole = {name for name in masks if torch.equal(masks[name], others[name])}
    assert whole == {"pos_drop", "head_drop"}


def test_models_of_timm_that_cannot_be_divided():
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    for options, words in [
        ({"scale_attn_norm": True}, "blocks.0.attn (Attention): its norm works on all features between its layers"),
        ({"scale_mlp_norm": True}, "blocks.0.mlp (Mlp): its norm works on all features between its layers"),
        ({"num_heads": 1}, "blocks.0.attn (heads(num_heads, attn_dim), from plan 'timm_attention'): 1 num_heads"),
    ]:
        assert words in refused(VisionTransformer(**{**VIT, **options}))
    assert "convolutions cannot be sharded: if most of the model is in them, leave tensor at 1" in refused(
        timm.create_model("resnet18")
    )
    swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=8, depths=(1, 1), num_heads=(2, 4))
    assert "sequence_parallel=True, but no plan says where" in refused(swin, sequence_parallel=True)


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
            "crossattention (GPT2Attention): it is a cross-attention, which this plan does",
        ),
        (hf.BertLMHeadModel(cross), "crossattention (BertAttention): it is a cross-attention, which this plan does"),
        (limited, "relative_attention_bias (embedding_features, from plan 't5_attention'): max_norm is set, which"),
    ]:
        assert words in refused(model)
