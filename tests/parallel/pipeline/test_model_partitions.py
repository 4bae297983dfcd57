"""The partitions that come with halfmesh compute what their models compute, bit by bit, and reject what they cannot."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh import InputError
from tests.support.pipeline_parts import assert_equal, check_pieces, compose, pieces_of

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(0))
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


def replaced(model: nn.Module, method: str, inner: nn.Module | None = None) -> nn.Module:
    """The model with another `method`, of its own or of a module within."""
    target = inner or model
    target.__class__ = type("Derived", (type(target),), {method: lambda self, *args, **kwargs: None})
    return model


# -- nn.Sequential ---------------------------------------------------------------------------------------------------


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def nested() -> nn.Module:
    """With a module at two places, and inner ones that do more when they are called, which stay whole."""
    act, hooked = nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    hooked.register_forward_hook(lambda module, args, output: output * 3)
    inner = nn.Sequential(OrderedDict(up=nn.Linear(4, 8), acts=nn.Sequential(nn.GELU(), act), none=nn.Sequential()))
    more = nn.Sequential(nn.BatchNorm1d(8), act, nn.Dropout(0.5))
    return nn.Sequential(OrderedDict(body=inner, twice=Twice(nn.Linear(8, 8), nn.ReLU()), hooked=hooked, more=more))


def test_sequential():
    names = ["body.up", "body.acts.0", "body.acts.1", "body.none", "twice", "hooked", "more.0", "more.1", "more.2"]
    assert [piece.name for piece in check_pieces(nested(), [torch.randn(3, 4)])] == names
    with pytest.raises(InputError, match="no partitioner knows Twice"):
        pieces_of(Twice(nn.Linear(2, 2)))


# -- timm ------------------------------------------------------------------------------------------------------------


def make_vit(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    return pytest.importorskip("timm.models").vision_transformer.VisionTransformer(**{**sizes, **options})


VITS = [
    {"reg_tokens": 2, "no_embed_class": True, "qk_norm": True, "init_values": 0.1, "global_pool": "map"},
    {"final_norm": False, "num_classes": 0, "drop_rate": 0.2, "patch_drop_rate": 0.5, "drop_path_rate": 0.5},
]


@pytest.mark.parametrize("options", VITS, ids=str)
def test_vision_transformer(options):
    pieces = check_pieces(make_vit(**options), [IMAGES])
    assert [piece.name for piece in pieces] == ["the beginning", "blocks.0", "blocks.1", "blocks.2", "the end"]
    for method in ("forward", "forward_features", "forward_head", "pool"):
        with pytest.raises(InputError, match="no partitioner knows Derived"):
            pieces_of(replaced(make_vit(), method))


# -- Hugging Face ----------------------------------------------------------------------------------------------------

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
BERT = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
KINDS: dict[str, tuple[str, str, dict[str, int]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForSequenceClassification", "BertConfig", BERT),
    "masked": ("BertForMaskedLM", "BertConfig", BERT),
}
DECODERS = ("llama", "gpt2")


def make(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    model, config, sizes = KINDS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(vocab_size=32, **{**sizes, **options}))


def check_logits(model: Any, **inputs: Any) -> None:
    """Past keys stay on their stages."""
    pieces = pieces_of(model)
    uncached = {} if type(model).__name__.startswith("Bert") else {"use_cache": False}
    for training in (True, False):
        model.train(training)
        torch.manual_seed(1)
        expected = model(**inputs, **uncached)
        torch.manual_seed(1)
        assert_equal(compose(model, pieces, **inputs), expected)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)  # two packed sequences
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        *((kind, {"position_ids": positions}) for kind in DECODERS for positions in (POSITIONS, POSITIONS[:1] + 3)),
        ("bert", {"token_type_ids": TYPES, "position_ids": POSITIONS[:1] + 1}),
        ("masked", {"token_type_ids": TYPES}),
    ],
)
def test_language_models(kind, inputs):
    more = {"num_key_value_heads": 1, "attention_bias": True, "attention_dropout": 0.3} if kind == "llama" else {}
    for attention in ("eager", "sdpa"):
        check_logits(make(kind, attn_implementation=attention, **more), input_ids=IDS, **inputs)
    model = make(kind, **({"use_cache": False} if kind in DECODERS else {}))
    names = [piece.name for piece in check_pieces(model, [], {"input_ids": IDS, "attention_mask": LEFT_PADDED})]
    assert (names[0], len(names), names[-1]) == ("the beginning", 5, "the end")


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_what_language_models_reject(kind):
    model = make(kind).eval()
    pieces = pieces_of(model)
    given = {"inputs_embeds": torch.zeros(2, 6, 16), "output_hidden_states": True, "return_dict": False, "labels": IDS}
    given |= {"use_cache": True, "logits_to_keep": 1} if kind in DECODERS else {}
    for name, value in given.items():
        with pytest.raises(InputError, match=f"^{name}: a Hugging Face model in a pipeline takes only input_ids"):
            compose(model, pieces, input_ids=IDS, **{name: value})
    for inner in (False, True):
        model = make(kind)
        with pytest.raises(InputError, match="no partitioner knows"):
            pieces_of(replaced(model, "forward", model.base_model if inner else None))
