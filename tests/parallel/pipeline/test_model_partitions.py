"""The partitions that come with halfmesh compute what their models compute, bit by bit, and reject what they cannot."""

from __future__ import annotations

import inspect
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
    for partition in ("auto", "sequential"):
        with pytest.raises(InputError, match=r"know Twice|knows Twice"):
            pieces_of(Twice(nn.Linear(2, 2)), partition)


def test_first_module_of_a_sequential_takes_what_the_model_is_called_with():
    model = nn.Sequential(nn.Bilinear(4, 3, 5), nn.Linear(5, 2))
    left, right = torch.randn(2, 4), torch.randn(2, 3)
    assert_equal(compose(model, pieces_of(model), left, input2=right), model[1](model[0](left, right)))


# -- timm ------------------------------------------------------------------------------------------------------------


def make_vit(kind: str = "vision_transformer.VisionTransformer", **options: Any) -> Any:
    models = pytest.importorskip("timm.models")
    module, _, name = kind.partition(".")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    return getattr(getattr(models, module), name)(**{**sizes, **options})


VITS = [
    {},
    {"class_token": False, "global_pool": "avg", "pos_embed": "none", "pre_norm": True, "fc_norm": True},
    {"reg_tokens": 2, "no_embed_class": True, "qk_norm": True, "init_values": 0.1, "global_pool": "map"},
    {"final_norm": False, "num_classes": 0, "drop_rate": 0.2, "pos_drop_rate": 0.2, "drop_path_rate": 0.5},
    {"patch_drop_rate": 0.5, "proj_drop_rate": 0.2},
]


@pytest.mark.parametrize("options", VITS, ids=str)
def test_vision_transformer(options):
    pieces = check_pieces(make_vit(**options), [IMAGES])
    assert [piece.name for piece in pieces] == ["the beginning", "blocks.0", "blocks.1", "blocks.2", "the end"]


def test_vision_transformers_that_are_derived():
    check_pieces(make_vit(dynamic_img_size=True), [torch.randn(1, 3, 24, 16)])
    model = make_vit("deit.VisionTransformerDistilled")
    model.set_distilled_training(True)
    assert len(model(IMAGES)) == 2
    check_pieces(model, [IMAGES])
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


def cache_name(model: Any) -> str:
    """What the model calls the keys and values of earlier tokens: transformers 5.24 changed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


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
    for attention in ("eager", "sdpa"):
        check_logits(make(kind, attn_implementation=attention), input_ids=IDS, **inputs)
    model = make(kind, **({"use_cache": False} if kind in DECODERS else {}))
    names = [piece.name for piece in check_pieces(model, [], {"input_ids": IDS, "attention_mask": LEFT_PADDED})]
    assert (names[0], len(names), names[-1]) == ("the beginning", 5, "the end")


def checkpointed(kind: str) -> Any:
    model = make(kind)
    model.gradient_checkpointing_enable()
    return model


VARIANTS = {
    "one key": lambda: make("llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True, attention_dropout=0.3),
    "rope": lambda: make("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "scales": lambda: make("gpt2", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, n_inner=20),
    "half precision": lambda: make("llama").bfloat16(),
    "checkpointed": lambda: checkpointed("gpt2"),
    "checkpointed encoder": lambda: checkpointed("bert"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_language_models(name):
    check_logits(VARIANTS[name](), input_ids=IDS, attention_mask=LEFT_PADDED)


ONLY = "a Hugging Face model in a pipeline takes only input_ids, attention_mask, .*position_ids"


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_what_a_language_model_is_called_with_beside_its_inputs(kind):
    model = make(kind).eval()
    pieces = pieces_of(model)
    given = {"inputs_embeds": torch.zeros(2, 6, 16), "output_hidden_states": True, "return_dict": False, "labels": IDS}
    if kind in DECODERS:
        given |= {cache_name(model): ((torch.zeros(1),),), "use_cache": True, "logits_to_keep": 1}
    for name, value in given.items():
        with pytest.raises(InputError, match=f"^{name}: {ONLY}"):
            compose(model, pieces, input_ids=IDS, **{name: value})
    harmless = {"labels": None, "output_attentions": False}
    assert_equal(compose(model, pieces, IDS, return_dict=True, **harmless), compose(model, pieces, IDS))
    if kind == "gpt2":  # arguments by position are those of its forward: the mask is third
        assert_equal(compose(model, pieces, IDS, None, LEFT_PADDED), model(IDS, None, LEFT_PADDED, use_cache=False))


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_language_models_that_cannot_be_cut(kind):
    model = make(kind)
    model.config.is_decoder = True
    with pytest.raises(InputError, match="set is_decoder=False"):
        pieces_of(model)
    for inner in (False, True):
        model = make(kind)
        with pytest.raises(InputError, match="no partitioner knows"):
            pieces_of(replaced(model, "forward", model.base_model if inner else None))
