"""The partitions that come with halfmesh compute what their models compute, and refuse what they cannot."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.partition import UnknownModelError, find_pieces
from halfmesh.parallel.registries import PARTITIONERS
from tests.support.pipeline_parts import assert_equal, check_pieces, compose

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0))
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


def test_names():
    known = {"hugging_face_gpt2", "hugging_face_llama", "sequential", "timm_vit"}
    bert = {"hugging_face_bert_classification", "hugging_face_bert_masked"}
    assert known | bert <= set(PARTITIONERS.names())


# -- nn.Sequential ---------------------------------------------------------------------------------------------------


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(left) * scale, self.right(right)


class Add(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def test_sequential():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert [piece.name for piece in check_pieces(model, [torch.randn(3, 4)])] == ["0", "1", "2", "3"]


def test_named_and_nested_sequential():
    inner = nn.Sequential(
        OrderedDict(up=nn.Linear(4, 8), act=nn.Sequential(nn.GELU(), nn.Tanh()), none=nn.Sequential())
    )
    model = nn.Sequential(OrderedDict(body=inner, head=nn.Linear(8, 2)))
    names = ["body.up", "body.act.0", "body.act.1", "body.none", "head"]
    assert [piece.name for piece in check_pieces(model, [torch.randn(3, 4)])] == names


def test_an_inner_sequential_whose_call_does_more_is_one_piece():
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    hooked = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hooked.register_forward_hook(lambda module, args, output: output * 3)
    model = nn.Sequential(Twice(nn.Linear(4, 4), nn.ReLU()), hooked, nn.Linear(4, 2))
    assert [piece.name for piece in check_pieces(model, [torch.randn(3, 4)])] == ["0", "1", "2"]


def test_first_module_of_a_sequential_takes_what_the_model_is_called_with():
    class Several(nn.Sequential):  # forward(input) of its own takes one
        pass

    model = Several(Join(), Add(), nn.Linear(5, 2))
    left, right = torch.randn(2, 4), torch.randn(2, 3)
    expected = model[2](model[1](model[0](left, right, scale=2.0)))
    assert_equal(compose(model, find_pieces(model, "sequential"), left, right, scale=2.0), expected)


def test_a_module_that_a_sequential_has_twice():
    act, linear = nn.Tanh(), nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), act, linear, act, linear)
    assert [piece.name for piece in check_pieces(model, [torch.randn(3, 4)])] == ["0", "1", "2", "3", "4"]


def test_sequential_with_a_forward_of_its_own_is_not_taken():
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    with pytest.raises(UnknownModelError, match="no partitioner knows Twice"):
        find_pieces(Twice(nn.Linear(2, 2)), "auto")
    with pytest.raises(UnknownModelError, match="the partitioner 'sequential' does not know Twice"):
        find_pieces(Twice(nn.Linear(2, 2)), "sequential")


# -- timm ------------------------------------------------------------------------------------------------------------


def make_vit(**options: Any) -> Any:
    transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    return transformer.VisionTransformer(**{**sizes, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 2},
        {"reg_tokens": 2, "no_embed_class": True},
        {"qk_norm": True, "init_values": 0.1},
        {"global_pool": "map", "class_token": False},
        {"global_pool": "avgmax", "class_token": False, "fc_norm": True},
        {"pos_embed": "none"},
        {"dynamic_img_size": True},
        {"pre_norm": True},
        {"fc_norm": True},
        {"final_norm": False},
        {"num_classes": 0},
        {"drop_rate": 0.2, "pos_drop_rate": 0.2, "drop_path_rate": 0.5, "proj_drop_rate": 0.2},
        {"patch_drop_rate": 0.5},
    ],
    ids=str,
)
def test_vision_transformer(options):
    model = make_vit(**options)
    pieces = check_pieces(model, [IMAGES])
    assert [piece.name for piece in pieces] == ["the beginning", "blocks.0", "blocks.1", "blocks.2", "the end"]


def test_vision_transformer_with_another_image_size():
    check_pieces(make_vit(dynamic_img_size=True), [torch.randn(1, 3, 24, 16)])


def test_vision_transformer_with_a_head_of_its_own():
    deit = pytest.importorskip("timm.models.deit")
    torch.manual_seed(0)
    model = deit.VisionTransformerDistilled(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=5
    )
    check_pieces(model, [IMAGES])
    model.set_distilled_training(True)
    assert len(model(IMAGES)) == 2
    check_pieces(model, [IMAGES])


def test_vision_transformer_refusals():
    model = make_vit()
    pieces = find_pieces(model, "auto")
    with pytest.raises(InputError, match="takes images only; leave attn_mask and is_causal out"):
        compose(model, pieces, IMAGES, is_causal=True)
    with pytest.raises(InputError, match="takes images only; leave attn_mask and is_causal out"):
        compose(model, pieces, IMAGES, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    model.set_grad_checkpointing()
    with pytest.raises(
        InputError, match=r"grad_checkpointing is not known .* call model.set_grad_checkpointing\(False"
    ):
        find_pieces(model, "auto")
    with pytest.raises(InputError, match="grad_checkpointing"):
        find_pieces(model, "timm_vit")


@pytest.mark.parametrize("method", ["forward", "forward_features", "forward_head", "pool"])
def test_vision_transformer_that_computes_otherwise_is_not_taken(method):
    model = make_vit()
    model.__class__ = type("Derived", (type(model),), {method: lambda self, x: x})
    with pytest.raises(UnknownModelError, match="no partitioner knows Derived"):
        find_pieces(model, "auto")


def test_vision_transformer_with_another_beginning():
    model = make_vit()

    class Derived(type(model)):
        def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
            return super()._pos_embed(x) * 2

    model.__class__ = Derived
    check_pieces(model, [IMAGES])


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def make_llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **options}))


def make_gpt2(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **options}))


MAKERS = {"llama": make_llama, "gpt2": make_gpt2}


def check_logits(model: Any, **inputs: Any) -> None:
    """Of the output only the logits: past keys stay on their stages."""
    pieces = find_pieces(model, "auto")
    for training in (True, False):
        model.train(training)
        torch.manual_seed(1)
        expected = model(**inputs, use_cache=False)
        torch.manual_seed(1)
        found = compose(model, pieces, **inputs)
        assert_equal(found, expected)
        assert torch.equal(found.logits, expected["logits"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_causal_language_model(kind, attention, tied):
    model = MAKERS[kind](attn_implementation=attention, tie_word_embeddings=tied, use_cache=False)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    positions = torch.arange(6).expand(2, 6)
    check_pieces(model, [IDS])
    for inputs in (
        {},
        {"attention_mask": LEFT_PADDED},
        {"attention_mask": LEFT_PADDED, "position_ids": (LEFT_PADDED.cumsum(1) - 1).clamp(min=0)},
        {"position_ids": positions + 3},
        {"position_ids": positions[:1]},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)},  # two packed sequences
    ):
        check_logits(model, input_ids=IDS, **inputs)
    check_pieces(model, [], {"input_ids": IDS, "attention_mask": LEFT_PADDED})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MAKERS)
def test_causal_language_model_in_half_precision(kind, dtype, attention):
    model = MAKERS[kind](attn_implementation=attention).to(dtype)
    check_logits(model, input_ids=IDS, attention_mask=LEFT_PADDED)
    check_logits(model, input_ids=IDS)


def test_llama_variants():
    check_logits(make_llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True), input_ids=IDS)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    check_logits(make_llama(rope_parameters=rope), input_ids=IDS)
    check_logits(make_llama(attention_dropout=0.3), input_ids=IDS)


def test_gpt2_variants():
    check_logits(make_gpt2(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True), input_ids=IDS)
    check_logits(make_gpt2(n_inner=20, activation_function="relu"), input_ids=IDS)


@pytest.mark.parametrize("kind", MAKERS)
def test_gradient_checkpointing_of_hugging_face(kind):
    model = MAKERS[kind]()
    model.gradient_checkpointing_enable()
    check_logits(model, input_ids=IDS)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_language_model_is_called_with_beside_its_inputs(kind):
    model = MAKERS[kind]().eval()
    pieces = find_pieces(model, "auto")
    only = "under a pipeline a Hugging Face model takes input_ids, attention_mask, position_ids only; leave it out"
    for given in (
        {"past_key_values": ((torch.zeros(1),),)},
        {"use_cache": True},
        {"inputs_embeds": torch.zeros(2, 6, 16)},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"logits_to_keep": 1},
        {"cache_position": torch.arange(6)},
        {"return_dict": False},
    ):
        (name,) = given
        with pytest.raises(InputError, match=f"^{name}: {only}"):
            compose(model, pieces, input_ids=IDS, **given)
    with pytest.raises(
        InputError, match=r"labels would make the model return its own loss.*engine.criterion\(output, la"
    ):
        compose(model, pieces, input_ids=IDS, labels=IDS)
    harmless = {"use_cache": False, "labels": None, "logits_to_keep": 0, "output_attentions": False}
    assert_equal(compose(model, pieces, IDS, return_dict=True, **harmless), compose(model, pieces, IDS))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("key", ["output_hidden_states", "output_attentions"])
def test_a_config_that_asks_for_what_stays_on_stages(kind, key):
    model = MAKERS[kind](attn_implementation="eager")
    setattr(model.config, key, True)
    with pytest.raises(InputError, match="its config asks for hidden states or attentions, which stay on their stages"):
        find_pieces(model, "auto")


@pytest.mark.parametrize("kind", MAKERS)
def test_a_config_that_asks_for_tuples(kind):
    model = MAKERS[kind]()
    model.config.return_dict = False
    with pytest.raises(InputError, match="its config has return_dict=False"):
        find_pieces(model, "auto")


@pytest.mark.parametrize("kind", MAKERS)
def test_language_models_that_compute_otherwise_are_not_taken(kind):
    model = MAKERS[kind]()
    decoder = model.base_model
    decoder.__class__ = type("Other", (type(decoder),), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(UnknownModelError, match="no partitioner knows"):
        find_pieces(model, "auto")
    model = MAKERS[kind]()
    model.__class__ = type("Derived", (type(model),), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(UnknownModelError, match="no partitioner knows Derived"):
        find_pieces(model, "auto")
