"""What the plans that halfmesh brings do with timm's and Hugging Face's models: parity, or a refusal that says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.tensor_checks import resolve
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, parity, random, refusal

pytestmark = pytest.mark.distributed

VIT = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
GAP = {"class_token": False, "global_pool": "avg"}


def vits() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Vision transformers: name, arguments, whether sequence parallelism works."""
    from timm.layers import GluMlp, SwiGLU, SwiGLUPacked

    yield "average", GAP, True
    yield "class token", {}, False  # 17 tokens
    yield "registers", {"reg_tokens": 3}, True
    yield "qk_norm, layer scale", {**GAP, "qk_norm": True, "init_values": 0.5}, True
    yield "no bias", {**GAP, "qkv_bias": False, "proj_bias": False}, True
    yield "SwiGLU", {**GAP, "mlp_layer": SwiGLU}, True
    yield "SwiGLUPacked", {**GAP, "mlp_layer": SwiGLUPacked}, True
    yield "GluMlp", {**GAP, "mlp_layer": GluMlp}, True
    yield "final norm", {**GAP, "final_norm": False}, True  # it is an Identity, after which the sequence is whole


def jiggled(model: nn.Module) -> nn.Module:
    """In fp64, without parameters that are (nearly) zero and hide what comes before them."""
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():
        if param.abs().max() < 0.05:
            nn.init.normal_(param, 0.5, 0.2, generator=generator)
    return model.double()


def vision_transformers(rank: int, world_size: int) -> dict[Any, Any]:
    from timm.models.vision_transformer import VisionTransformer

    found: dict[Any, Any] = {}
    x = random(4, 1, 16, 16)

    def make(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return jiggled(VisionTransformer(**{**VIT, **options}))

    for name, options, sequence in vits():
        found[name, False] = parity(make(**options), lambda m: m(x))
        if sequence:
            found[name, True] = parity(make(**options), lambda m: m(x), "auto", True)
    model = make()
    divide(model, "auto", True)
    found["length"] = refusal(lambda: model(x))
    found["scale_norm"] = refusal(lambda: divide(make(scale_attn_norm=True)))
    found["mlp norm"] = refusal(lambda: divide(make(scale_mlp_norm=True)))
    found["heads"] = refusal(lambda: divide(make(num_heads=1)))
    found["some"] = parity(make(**GAP), lambda m: m(x), {"blocks.1": "auto", "blocks.0.mlp": "auto"})
    found["some cut"] = sorted(
        a.name for a in resolve(make(**GAP), 2, {"blocks.1.*": "auto"})[0].assignments if a.style.splits(a.module)
    )
    return found


def test_vision_transformers():
    pytest.importorskip("timm")
    for found in run_ranks(vision_transformers, 2):
        assert found.pop("length") == (
            "InputError: a sequence of 17 cannot be divided by tensor=2, as sequence_parallel=True has to; pad it to "
            "18, or set sequence_parallel=False"
        )
        assert found.pop("scale_norm") == (
            "ValueError: blocks.0.attn (Attention): its norm works on the features of all heads (scale_norm=True), "
            "which are divided; build it without"
        )
        assert found.pop("mlp norm") == (
            "ValueError: blocks.0.mlp (Mlp): its norm works on all hidden features, which are divided; build it "
            "without (norm_layer=None)"
        )
        assert "blocks.0.attn (heads(num_heads, attn_dim), from plan 'timm_attention'): 1 num_heads" in found.pop(
            "heads"
        )
        layers = ("attn.proj", "attn.qkv", "mlp.fc1", "mlp.fc2")
        assert found.pop("some cut") == [f"blocks.1.{layer}" for layer in layers]
        for cell, result in found.items():
            assert max(result.output, result.grads) < 1e-13, cell
            assert result.missing == [], cell


def others(rank: int, world_size: int) -> dict[Any, Any]:
    import timm
    from timm.layers import Attention

    small = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 4}
    swin = {"img_size": 28, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4), "window_size": 7, "patch_size": 2}
    models: dict[str, dict[str, Any]] = {
        "deit_tiny_distilled_patch16_224": small,
        "deit3_small_patch16_224": small,
        "beit_base_patch16_224": small,
        "eva02_tiny_patch14_224": {**small, "img_size": 28, "patch_size": 14, "mlp_ratio": 2},
        "eva_giant_patch14_224": {**small, "img_size": 28, "patch_size": 14, "mlp_ratio": 2},
        "swin_tiny_patch4_window7_224": swin,
        "convnext_tiny": {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)},
        "vit_small_patch16_18x2_224": small,
    }
    found: dict[Any, Any] = {}
    for name, options in models.items():

        def make(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            torch.manual_seed(0)
            return jiggled(timm.create_model(name, num_classes=3, drop_path_rate=0.0, **options))

        size = options.get("img_size", 32)
        found[name] = parity(make(), lambda m, size=size: m.eval()(random(4, 3, size, size)))
        if not name.startswith("deit"):  # those are plain ones, with 6 tokens or 5
            message = refusal(lambda make=make: divide(make(), "auto", True))
            reasons = ("sequence_parallel=True, but no plan says where", "ls.gamma is in a layer whose activations")
            found["refused", name] = any(reason in message for reason in reasons) or message
    torch.manual_seed(0)
    gated = nn.Sequential(Attention(16, 4, qkv_bias=True, gated=True, qk_norm=True, norm_layer=nn.LayerNorm, dim_out=6))
    found["gated"] = parity(jiggled(gated), lambda m: m(random(2, 5, 16)))
    convolutions = {
        "resnet18": "Convolutions are not divided over tensor ranks, and most of this model is in them; leave tensor",
        "convnext_atto": "its layers are Conv2d, and Linear ones can be divided; build the model with those (timm's",
    }
    for name, words in convolutions.items():
        message = refusal(lambda name=name: divide(timm.create_model(name)))
        found["refused", name] = words in message or message
    return found


def test_other_models_of_timm():
    pytest.importorskip("timm")
    for found in run_ranks(others, 2, timeout=120):
        for cell, result in found.items():
            if cell[0] == "refused":
                assert result is True, (cell, result)
            else:
                assert max(result.output, result.grads) < 1e-13, cell


def drops(rank: int, world_size: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Which samples each DropPath drops, with divided sequences, in two forwards; and what each Dropout drops."""
    from timm.layers import DropPath
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    rates = {
        "drop_path_rate": 0.5,
        "proj_drop_rate": 0.5,
        "attn_drop_rate": 0.5,
        "pos_drop_rate": 0.5,
        "drop_rate": 0.5,
    }
    model = VisionTransformer(**VIT, **GAP, **rates)
    for block in model.blocks:
        block.attn.fused_attn = False  # a module of its own drops attention weights
    divide(model, "auto", True)
    seen: list[Any] = []
    masks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, DropPath) and module.drop_prob:
            module.register_forward_hook(lambda _, args, output: seen.append((output == 0).flatten(1).all(1).tolist()))
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_hook(lambda _, args, output, name=name: masks.update({name: output == 0}))
    for _ in range(2):
        model(random(16, 1, 16, 16, dtype=torch.float32))
    return seen, masks


def test_samples_are_dropped_alike_on_all_ranks():
    pytest.importorskip("timm")
    (first, masks), (second, others) = run_ranks(drops, 2)
    assert len(first) == 2 * 2
    assert first == second
    assert all(any(drops) and not all(drops) for drops in first)
    assert len({str(drops) for drops in first}) == 4
    whole = {name for name in masks if torch.equal(masks[name], others[name])}
    assert whole == {"pos_drop", "head_drop"}
    divided = ("attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2")
    assert masks.keys() - whole == {f"blocks.{i}.{name}" for i in (0, 1) for name in divided}


def language_models() -> Iterator[tuple[str, Callable[[], nn.Module], bool]]:
    """Name, what builds it, whether sequence parallelism works."""
    import transformers as hf

    common = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
    tied = {"tie_word_embeddings": True}
    for name, options in (("Llama", {**tied, "attention_bias": True}), ("Qwen3", tied), ("Mistral", {}), ("Llama", {})):
        config = getattr(hf, f"{name}Config")(**common, **heads, **options)
        yield f"{name} {options}", lambda c=config, n=name: getattr(hf, f"{n}ForCausalLM")(c), True
    yield "LlamaModel", lambda: hf.LlamaModel(hf.LlamaConfig(**common, **heads)), True
    yield "Phi3", lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**common, **heads)), True
    yield "Olmo2", lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**common, **heads)), False


def hugging_face(rank: int, world_size: int) -> dict[Any, Any]:
    warnings.filterwarnings("ignore")
    import transformers as hf

    ids = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(1))
    found: dict[Any, Any] = {}

    def call(model: nn.Module) -> torch.Tensor:
        output = model(input_ids=ids, use_cache=False)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    for name, build, works in language_models():

        def make(build: Callable[[], nn.Module] = build) -> nn.Module:
            torch.manual_seed(0)
            return build().double()

        found[name, False] = parity(make(), call)
        if works:
            found[name, True] = parity(make(), call, "auto", True)
        else:
            found["refused", name] = refusal(lambda make=make: divide(make(), "auto", True))
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 20, "pad_token_id": 0}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3))
    found["refused", "heads"] = refusal(lambda: divide(llama))
    bloom = hf.BloomForCausalLM(hf.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=20))
    found["refused", "bloom"] = refusal(lambda: divide(bloom))
    mixtral = hf.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    found["refused", "mixtral"] = refusal(lambda: divide(hf.MixtralForCausalLM(mixtral)))
    gemma = hf.GemmaConfig(**{**sizes, "hidden_size": 16}, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    found["refused", "gemma"] = refusal(lambda: divide(hf.GemmaForCausalLM(gemma)))
    layers = {"model.layers.*": "auto"}  # without its words
    found["gemma's layers", False] = parity(hf.GemmaForCausalLM(gemma).double(), call, layers)
    return found


def test_hugging_face():
    pytest.importorskip("transformers")
    first = run_ranks(hugging_face, 2, timeout=120)[0]
    refused = {cell[1]: first.pop(cell) for cell in list(first) if cell[0] == "refused"}
    assert len(first) == 7 + 6 + 1
    for cell, result in first.items():
        assert max(result.output, result.grads) < 1e-13, cell
        assert result.missing == [], cell
    assert refused["heads"].startswith("ValueError: ")
    assert "3 config.num_key_value_heads are not divisible by tensor=2; tensor can be 1, 3" in refused["heads"]
    assert "no plan is registered for any layer of BloomForCausalLM. Its largest layers: " in refused["bloom"]
    assert "transformer.h.*.mlp.dense_h_to_4h (Linear) with 288 numbers" in refused["bloom"]
    assert refused["mixtral"].endswith(
        "the style 'packed_colwise', which halfmesh does not have; choose the layers yourself (parallel.tensor.plan = "
        "{pattern: style})"
    )
    assert refused["gemma"].count("it is a GemmaTextScaledWordEmbedding, and this style is for torch.nn.Embedding") == 1
    assert "post_feedforward_layernorm.weight is in a layer whose activations are divided" in refused["Olmo2"]
