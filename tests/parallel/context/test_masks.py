"""Windows, prefixes, padding and biases of attention, through the engine: one process's losses and weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.ranks import here, run_ranks

from .runs import LENGTH, ROWS, WORDS, compare, make_llama, tokens, train

WINDOW = 5
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS, "initializer_range": 0.2}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}


def make_mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**DECODER, use_cache=False, sliding_window=WINDOW))


def make_gemma3(**options):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**{**DECODER, **MIXED, "use_cache": False, **options}))


def make_modern_bert():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    options = {**SIZES, **MIXED, "local_attention": WINDOW, "attn_implementation": "sdpa", "vocab_size": WORDS}
    return ModernBertForMaskedLM(ModernBertConfig(**options, initializer_range=0.2))


def labels_step(engine, seed):
    ids, _ = tokens(seed)
    return engine(input_ids=ids, labels=ids).loss


def padding_step(engine, seed):
    """Of one sequence the end is padded, of the other one the begin."""
    ids, _ = tokens(seed)
    mask = torch.ones_like(ids)
    mask[0, -5:], mask[1, :2] = 0, 0
    return engine(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def joined_step(engine, seed):
    ids, _ = tokens(seed)
    positions = here(torch.cat([torch.arange(10), torch.arange(LENGTH - 10)]).expand(ROWS, -1))
    return engine(input_ids=ids, position_ids=positions, labels=ids).loss


def prefix(number=6):
    """[sequence, sequence]: the first tokens see each other, the others those before them."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:, :number] = True
    return here(mask)


def prefix_step(engine, seed):
    ids, _ = tokens(seed)
    return engine(input_ids=ids, attention_mask=prefix().expand(ROWS, 1, -1, -1), labels=ids).loss


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "step", "ranks"),
    [
        pytest.param(make_mistral, labels_step, 2, id="Mistral, a window"),
        pytest.param(make_mistral, padding_step, 2, id="Mistral, a window and padding"),
        pytest.param(make_gemma3, labels_step, 2, id="Gemma 3, windows in one layer"),
        pytest.param(make_gemma3, joined_step, 2, id="Gemma 3, windows in one layer and joined sequences"),
        pytest.param(partial(make_gemma3, sliding_window=64), padding_step, 2, id="Gemma 3, a window that is longer"),
        pytest.param(make_gemma3, padding_step, 4, id="Gemma 3, on four ranks"),
        pytest.param(make_modern_bert, padding_step, 2, id="ModernBERT, windows in one layer"),
        pytest.param(make_llama, prefix_step, 2, id="Llama, a prefix"),
        pytest.param(make_llama, labels_step, 4, id="Llama, fewer key-value heads than ranks"),
    ],
)
def test_masks_of_hugging_face_models(make, step, ranks):
    compare(make, step, ranks)


class Decoder(nn.Module):
    """Takes masks as they are, and a bias of each head."""

    def __init__(self, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 24), nn.Embedding(LENGTH, 24)
        self.qkv, self.head = nn.Linear(24, 72), nn.Linear(24, WORDS)
        self.heads = heads

    def forward(self, ids, mask, position_ids=None):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def masked_step(engine, seed, mask):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids, here(mask)), target)


def window():
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-WINDOW)


def padding():
    mask = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, ..., -5:] = False
    return mask


def slopes(heads):
    """ALiBi's: [heads, sequence, sequence], less for keys that are further away."""
    distance = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
    slope = 2.0 ** -torch.arange(1, heads + 1)
    return (slope[:, None, None] * distance).masked_fill(distance > 0, -torch.inf)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("heads", "mask"),
    [
        pytest.param(4, window(), id="a window"),
        pytest.param(3, torch.zeros(LENGTH, LENGTH).masked_fill(~window(), -torch.inf), id="a window of floats"),
        pytest.param(4, prefix().cpu(), id="a prefix"),
        pytest.param(3, padding(), id="padding"),
        pytest.param(4, padding() & window(), id="padding and a window"),
        pytest.param(4, slopes(4), id="a bias of each head"),
        pytest.param(3, slopes(3), id="a bias of each head, which the ranks do not divide"),
    ],
)
def test_masks_that_are_given(heads, mask):
    compare(partial(Decoder, heads), partial(masked_step, mask=mask))


@pytest.mark.distributed
def test_attention_in_a_traced_module():
    """A pipeline cuts the model at points: attention is recorded, and runs with this rank's tokens."""
    make, step = partial(Decoder, 3), partial(masked_step, mask=padding())
    losses, weights = train(0, 1, make, step)
    parallel = {"context": 2, "pipeline": {"size": 2, "microbatches": 2, "partition": ("head",)}}
    for found, theirs in run_ranks(train, 4, make, step, parallel=parallel):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=2e-5)


class Layers(nn.Module):
    """torch's own layers, which compare masks with the tokens that they are given."""

    def __init__(self, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 24), nn.Embedding(LONG, 24)
        layer = nn.TransformerEncoderLayer(24, heads, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, WORDS)

    def forward(self, ids, mask=None, src_key_padding_mask=None, position_ids=None, is_causal=None):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
        return self.head(self.encoder(x, mask, src_key_padding_mask, is_causal))


def layers_step(engine, seed, **masks):
    torch.manual_seed(seed)
    ids, target = here(torch.randint(WORDS, (ROWS, LONG))), here(torch.randint(WORDS, (ROWS, LONG)))
    return engine.criterion(engine(ids, **here(masks)), target)


LONG = 24
"""Longer than the sequences of a trial."""
LATER = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
ENDS = torch.arange(LONG).expand(ROWS, -1) >= torch.tensor([[20], [24]])
BIAS = torch.linspace(-1, 1, ROWS * 4 * LONG * LONG).view(ROWS * 4, LONG, LONG)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("heads", "masks"),
    [
        pytest.param(4, {"mask": LATER}, id="later tokens"),
        pytest.param(3, {"mask": LATER, "is_causal": True}, id="a hint"),
        pytest.param(4, {"src_key_padding_mask": ENDS}, id="padding"),
        pytest.param(3, {"mask": LATER, "src_key_padding_mask": ENDS, "is_causal": True}, id="both, and a hint"),
        pytest.param(4, {"mask": BIAS}, id="floats for each head"),
    ],
)
def test_masks_of_torchs_layers(heads, masks):
    compare(partial(Layers, heads), partial(layers_step, **masks))
