"""BERT in pieces computes what it computes whole; arguments go where the model's own forward has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.partition import UnknownModelError, find_pieces, resolve
from tests.support.pipeline_parts import assert_equal, check_pieces, compose

transformers = pytest.importorskip("transformers")

IDS = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
KINDS = ("BertForSequenceClassification", "BertForMaskedLM")


def make_bert(kind: str = KINDS[0], **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = transformers.BertConfig(**{**sizes, "num_attention_heads": 4, "max_position_embeddings": 16, **options})
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_bert(kind, attention):
    model = make_bert(kind, attn_implementation=attention)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    pieces = check_pieces(model, [IDS])
    assert [piece.name for piece in pieces] == [
        "the beginning",
        *(f"bert.encoder.layer.{i}" for i in range(3)),
        "the end",
    ]
    for given in ({"attention_mask": PADDED}, {"token_type_ids": types}, {"position_ids": torch.arange(1, 7)[None]}):
        check_pieces(model, [], {"input_ids": IDS, **given})
    check_pieces(model, [IDS, PADDED, types])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bert_in_half_precision(dtype):
    check_pieces(make_bert().to(dtype), [IDS, PADDED])


def test_bert_refusals():
    with pytest.raises(InputError, match="its config has is_decoder=True, which is not known under a pipeline"):
        find_pieces(make_bert(is_decoder=True), "auto")
    with pytest.raises(InputError, match="its config asks for hidden states or attentions"):
        find_pieces(make_bert(output_hidden_states=True), "auto")
    model = make_bert()
    pieces = find_pieces(model, "auto")
    takes = "takes input_ids, attention_mask, token_type_ids, position_ids only; leave it out"
    with pytest.raises(InputError, match=f"^inputs_embeds: under a pipeline a Hugging Face model {takes}"):
        compose(model, pieces, IDS, inputs_embeds=torch.zeros(2, 6, 16))
    with pytest.raises(InputError, match="labels would make the model return its own loss"):
        compose(model, pieces, IDS, labels=torch.zeros(2))
    with pytest.raises(InputError, match="under a pipeline a Hugging Face model needs input_ids"):
        compose(model, pieces, attention_mask=PADDED)
    with pytest.raises(InputError, match=r"BertForSequenceClassification.forward: multiple values for argument 'input"):
        compose(model, pieces, IDS, input_ids=IDS)
    model.bert.__class__ = type("Other", (type(model.bert),), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(UnknownModelError):
        find_pieces(model, "auto")


def test_arguments_by_position_are_those_of_the_models_forward():
    """GPT-2 takes past_key_values second, and the mask third."""
    torch.manual_seed(0)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    ).eval()
    pieces = find_pieces(gpt2, "auto")
    expected = gpt2(IDS, None, PADDED, use_cache=False)
    assert_equal(compose(gpt2, pieces, IDS, None, PADDED), expected)
    assert not torch.equal(expected.logits, gpt2(IDS).logits)
    only = "under a pipeline a Hugging Face model takes input_ids, attention_mask, position_ids only"
    with pytest.raises(InputError, match=f"^past_key_values: {only}"):
        compose(gpt2, pieces, IDS, PADDED)


class AnyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_split_points_are_not_offered_where_they_would_be_refused():
    _, [problem] = resolve(AnyArguments(), 2, 1)
    assert problem == (
        "no partitioner knows AnyArguments; split points cannot cut it either, because its forward takes *args or "
        "**kwargs; register a partitioner (halfmesh.PARTITIONERS, see docs/pipeline.md), or use tensor parallelism or "
        "fsdp"
    )
    _, [problem] = resolve(AnyArguments(), 2, 1, ("layers.1",))
    assert "forward takes *args or **kwargs, which cannot be traced for split points" in problem
