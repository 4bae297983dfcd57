"""The partitions that come with halfmesh compute what their models compute, bit by bit, and refuse what they cannot."""

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
    act = nn.Sequential(nn.GELU(), nn.Tanh())
    inner = nn.Sequential(OrderedDict(up=nn.Linear(4, 8), act=act, none=nn.Sequential()))
    return nn.Sequential(OrderedDict(body=inner, head=nn.Linear(8, 2)))


def repeated() -> nn.Module:
    act, linear = nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), act, linear, act, linear)


def doing_more() -> nn.Module:
    """Inner ones that do more when they are called stay whole."""
    hooked = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hooked.register_forward_hook(lambda module, args, output: output * 3)
    return nn.Sequential(Twice(nn.Linear(4, 4), nn.ReLU()), hooked, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)), list("0123")),
        (nested, ["body.up", "body.act.0", "body.act.1", "body.none", "head"]),
        (repeated, list("01234")),
        (doing_more, list("012")),
    ],
    ids=["row", "nested", "repeated", "doing more"],
)
def test_sequential(make, names):
    assert [piece.name for piece in check_pieces(make(), [torch.randn(3, 4)])] == names


def test_first_module_of_a_sequential_takes_what_the_model_is_called_with():
    model = nn.Sequential(nn.Bilinear(4, 3, 5), nn.Linear(5, 2))
    left, right = torch.randn(2, 4), torch.randn(2, 3)
    assert_equal(compose(model, pieces_of(model), left, input2=right), model[1](model[0](left, right)))


@pytest.mark.parametrize("partition", ["auto", "sequential"])
def test_sequential_with_a_forward_of_its_own_is_not_taken(partition):
    with pytest.raises(InputError, match=r"know Twice|knows Twice"):
        pieces_of(Twice(nn.Linear(2, 2)), partition)


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
    model = make_vit()
    kind = type(model)
    model.__class__ = type("Derived", (kind,), {"_pos_embed": lambda self, x: kind._pos_embed(self, x) * 2})
    check_pieces(model, [IMAGES])


def test_vision_transformer_refusals():
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


def check_logits(model: Any, *args: Any, **inputs: Any) -> None:
    """Past keys stay on their stages."""
    pieces = pieces_of(model)
    uncached = {} if type(model).__name__.startswith("Bert") else {"use_cache": False}
    for training in (True, False):
        model.train(training)
        torch.manual_seed(1)
        expected = model(*args, **inputs, **uncached)
        torch.manual_seed(1)
        assert_equal(compose(model, pieces, *args, **inputs), expected)


@pytest.mark.parametrize("kind", DECODERS)
def test_causal_language_models(kind):
    for attention, tied in (("eager", True), ("sdpa", False)):
        model = make(kind, attn_implementation=attention, tie_word_embeddings=tied, use_cache=False)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        positions = torch.arange(6).expand(2, 6)
        for inputs in (
            {},
            {"attention_mask": LEFT_PADDED},
            {"position_ids": positions[:1] + 3},
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)},  # two packed sequences
        ):
            check_logits(model, input_ids=IDS, **inputs)
    check_pieces(model, [], {"input_ids": IDS, "attention_mask": LEFT_PADDED})


@pytest.mark.parametrize("kind", ["bert", "masked"])
def test_bert(kind):
    types, mask = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2), LEFT_PADDED.flip(1)
    layers = [f"bert.encoder.layer.{i}" for i in range(3)]
    for attention in ("eager", "sdpa"):
        model = make(kind, attn_implementation=attention)
        for given in ({"token_type_ids": types}, {"position_ids": torch.arange(1, 7)[None]}):
            check_logits(model, input_ids=IDS, **given)
        assert [piece.name for piece in check_pieces(model, [IDS, mask, types])] == [
            "the beginning",
            *layers,
            "the end",
        ]


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


ONLY = "under a pipeline a Hugging Face model takes input_ids, attention_mask, .*position_ids only; leave it out"


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_what_a_language_model_is_called_with_beside_its_inputs(kind):
    model = make(kind).eval()
    pieces = pieces_of(model)
    given = {"inputs_embeds": torch.zeros(2, 6, 16), "output_hidden_states": True, "return_dict": False}
    if kind in DECODERS:
        given |= {cache_name(model): ((torch.zeros(1),),), "use_cache": True, "logits_to_keep": 1}
    for name, value in given.items():
        with pytest.raises(InputError, match=f"^{name}: {ONLY}"):
            compose(model, pieces, input_ids=IDS, **{name: value})
    with pytest.raises(InputError, match=r"^labels: .* give initialize a criterion: loss = engine.criterion\(output"):
        compose(model, pieces, input_ids=IDS, labels=IDS)
    harmless = {"labels": None, "output_attentions": False}
    assert_equal(compose(model, pieces, IDS, return_dict=True, **harmless), compose(model, pieces, IDS))


def test_arguments_by_position_are_those_of_the_models_forward():
    """GPT-2 takes a cache second, and the mask third."""
    model = make("gpt2").eval()
    pieces = pieces_of(model)
    assert_equal(compose(model, pieces, IDS, None, LEFT_PADDED), model(IDS, None, LEFT_PADDED, use_cache=False))
    with pytest.raises(InputError, match=f"^{cache_name(model)}: {ONLY}"):
        compose(model, pieces, IDS, LEFT_PADDED)


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_language_models_that_cannot_be_cut(kind):
    for key in ("output_hidden_states", "output_attentions", "is_decoder"):
        model = make(kind, attn_implementation="eager")
        setattr(model.config, key, True)
        with pytest.raises(
            InputError, match=f"its config has {key}=True, which is not known under a .*set {key}=False"
        ):
            pieces_of(model)
    for inner in (False, True):
        model = make(kind)
        with pytest.raises(InputError, match="no partitioner knows"):
            pieces_of(replaced(model, "forward", model.base_model if inner else None))
