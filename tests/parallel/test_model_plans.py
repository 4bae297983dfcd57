"""The plans for models of torchvision and transformers that bring none: parity in fp64, or a refusal that says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.parallel.tensor_layers import ColwiseConv1D, RowwiseConv1D
from tests.support.ranks import PRELOAD, run_ranks
from tests.support.tensor_parity import divide, make_axis, parity, random, refusal

PRELOAD.extend(["transformers.models.bert.modeling_bert"])
pytestmark = pytest.mark.distributed

WORDS, LENGTH = 20, 6
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 8}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
BERT |= {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": [2, 2]}
VIT = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 24}


def models() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]]:
    """Name, what builds it, and a call that gives its output."""
    import torchvision.models as tv
    import transformers as hf

    ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * LENGTH, [1] * 4 + [0] * 2])

    def words(model: nn.Module, **given: Any) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, **given).logits

    for options in ({}, {"attn_implementation": "eager", "scale_attn_by_inverse_layer_idx": True, "n_inner": 20}):
        config = hf.GPT2Config(**GPT2, **options)
        if not options:
            yield "GPT-2", lambda c=config: hf.GPT2LMHeadModel(c), words
        yield f"GPT-2 {options}", lambda c=config: hf.GPT2ForSequenceClassification(_padded(c)), words
    for name in ("Bert", "Roberta", "XLMRoberta", "Electra"):
        for attention in ("sdpa", "eager"):
            config = getattr(hf, f"{name}Config")(**BERT, attn_implementation=attention, num_labels=3)
            model = getattr(hf, f"{name}ForSequenceClassification")
            yield f"{name} {attention}", lambda m=model, c=config: m(c), words
    yield "Bert, words", lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), words
    for act in ("relu", "gated-gelu"):
        config = hf.T5Config(**T5, feed_forward_proj=act)
        yield f"T5 {act}", lambda c=config: hf.T5ForConditionalGeneration(c), lambda m: words(m, decoder_input_ids=ids)
    yield "T5 encoder", lambda: hf.T5EncoderModel(hf.T5Config(**T5)), lambda m: m(input_ids=ids).last_hidden_state
    x = random(2, 3, 16, 16)
    yield "torchvision ViT", lambda: tv.VisionTransformer(**VIT, num_classes=3), lambda m: m(x)
    for block in (None, tv.swin_transformer.SwinTransformerBlockV2):
        options = {"block": block, "stochastic_depth_prob": 0.0}
        merging = {"downsample_layer": tv.swin_transformer.PatchMergingV2} if block else {}
        yield f"Swin {block}", lambda o=options, m=merging: tv.SwinTransformer(**SWIN, **o, **m), lambda m: m(x)


def _padded(config: Any) -> Any:
    config.pad_token_id = 0
    return config


def all_models(rank: int, world_size: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    for name, build, call in models():
        torch.manual_seed(0)
        model = build().double().eval()  # without dropout, and with gradients
        for param in model.parameters():
            if param.abs().max() < 1e-3:  # a zero would hide what comes before it
                nn.init.normal_(param, 0.3, 0.2, generator=torch.Generator().manual_seed(2))
        found[name] = parity(model, call)
    return found


def test_outputs_and_gradients_are_those_of_one_process():
    for package in ("torchvision", "transformers"):
        pytest.importorskip(package)
    first = run_ranks(all_models, 2, timeout=120)[0]
    assert len(first) == 3 + 8 + 1 + 3 + 3
    for name, result in first.items():
        assert max(result.output, result.grads) < 1e-12, name
        assert result.missing == [], name


def conv1d(rank: int, world_size: int) -> dict[str, Any]:
    """Single layers, under patterns of one's own."""
    from transformers.pytorch_utils import Conv1D

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = Conv1D(12, 8), Conv1D(8, 12), Conv1D(6, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.down(self.up(x).tanh()))

    torch.manual_seed(0)
    model = Pair().double()
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}
    found: dict[str, Any] = {"parity": parity(model, lambda m: m(random(3, 5, 8)), plan)}
    split = {"up": "colwise_gather", "down": "rowwise_split"}
    found["split"] = parity(model, lambda m: m(random(3, 5, 8)), split)
    found["heads"] = refusal(lambda: divide(Pair(), {"head": "fused_colwise(4)", "up": "rowwise"}, axis=make_axis()))
    tensor = divide(model, plan)
    found["kinds"] = [type(layer) for layer in (model.up, model.down, model.head)]
    found["shapes"] = [tuple(p.shape) for p in model.parameters()]
    found["numbers"] = model.up.nf, model.down.nx, model.head.nf
    tensor.close()
    wrong = Pair().double()
    divide(wrong, {"down": "rowwise"})
    found["whole input"] = refusal(lambda: wrong(random(3, 5, 8)))
    return found


def test_transposed_layers():
    pytest.importorskip("transformers")
    for found in run_ranks(conv1d, 2):
        for cell in ("parity", "split"):
            assert max(found[cell].output, found[cell].grads) < 1e-13
            assert found[cell].missing == []
        assert found["kinds"] == [ColwiseConv1D, RowwiseConv1D, ColwiseConv1D]
        assert found["shapes"] == [(8, 6), (6,), (6, 8), (8,), (8, 3), (3,)]
        assert found["numbers"] == (6, 6, 3)
        assert "6 output features in 4 blocks are not divisible by tensor=2; it cannot be divided" in found["heads"]
        assert found["whole input"] == (
            "InputError: a 'rowwise' layer takes this rank's 6 features, but 12 came; give the layer before it the "
            "style 'colwise', or this one 'rowwise_split' if its input is whole"
        )


def refusals(rank: int, world_size: int) -> dict[str, str]:
    import torchvision.models as tv
    import transformers as hf

    warnings.filterwarnings("ignore")
    found = {}
    cross = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, add_cross_attention=True))
    found["gpt2 cross"] = refusal(lambda: divide(cross))
    decoder = hf.BertLMHeadModel(hf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True))
    found["bert cross"] = refusal(lambda: divide(decoder))
    found["heads"] = refusal(lambda: divide(hf.BertForMaskedLM(hf.BertConfig(**{**BERT, "num_attention_heads": 1}))))
    softmax = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))
    softmax.transformer.h[0].mlp.act = nn.Softmax(-1)
    found["activation"] = refusal(lambda: divide(softmax))
    vit = tv.VisionTransformer(**VIT)
    vit.encoder.layers[1].mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    found["mlp"] = refusal(lambda: divide(vit))
    found["max_norm"] = refusal(lambda: divide(_limited(hf.T5EncoderModel(hf.T5Config(**T5)))))
    return found


def _limited(model: Any) -> nn.Module:
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.max_norm = 1.0
    return model


def test_refusals():
    for package in ("torchvision", "transformers"):
        pytest.importorskip(package)
    words = {
        "gpt2 cross": "transformer.h.0.crossattention (GPT2Attention): it is a cross-attention, which this plan does",
        "bert cross": "crossattention (BertAttention): it is a cross-attention, which this plan does not know; build",
        "heads": "1 num_attention_heads are not divisible by tensor=2; tensor can be 1",
        "activation": "transformer.h.0.mlp (GPT2MLP): its activation looks at several features at once (softmax)",
        "mlp": "encoder_layer_1 (EncoderBlock): its mlp is made of Linear, GELU, Linear; leave it whole",
        "max_norm": "relative_attention_bias (embedding_features, from plan 't5_attention'): max_norm is set, which is",
    }
    for found in run_ranks(refusals, 2):
        assert found.keys() == words.keys()
        for name, message in found.items():
            assert words[name] in message, message
