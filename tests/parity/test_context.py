"""Sequences that are divided over context ranks: models, masks and losses train as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.context.runs import LENGTH, WORDS, criterion, make_gpt
from tests.support.proofs import Row, rows

pytestmark = pytest.mark.distributed

ROWS, WINDOW = 4, 5
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": WORDS, "initializer_range": 0.2, "pad_token_id": 0}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Models rotate for a set of kinds of layers, whose order differs between processes: so all alike.
MIXED["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in MIXED["layer_types"]}


def context(size: int = 2, axes: Any = None, **config: Any) -> dict[str, Any]:
    return {"parallel": {"context": size, **(axes or {})}, **config}


def tokens(length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(WORDS, (ROWS, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gpt(**options: Any) -> Any:
    return make_gpt(**options), tokens(), criterion


def uneven() -> Any:
    """The ranks' tokens do not count alike; of one sample none does on the last rank."""
    ids, targets = tokens()
    targets[0, 3:] = targets[1, :2] = -100
    return make_gpt(), (ids, targets), criterion


class Decoder(nn.Module):
    """Causal; or it takes a mask as it is, or one of padding, [batch, sequence], by a name of its own."""

    def __init__(self, heads: int, keys: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 24), nn.Embedding(LENGTH, 24)
        self.size, self.heads, self.keys = 24 // heads, heads, keys
        self.qkv, self.head = nn.Linear(24, (heads + 2 * keys) * self.size), nn.Linear(24, WORDS)

    def forward(self, ids, mask=None, keep=None, position_ids=None):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.keys, self.keys], 1)
        mask = mask if keep is None else keep[:, None, None]
        options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": self.keys < self.heads}
        return self.head(x + F.scaled_dot_product_attention(q, k, v, **options, scale=0.3).transpose(1, 2).flatten(2))


def decoder(heads: int, keys: int | None = None, length: int = LENGTH, **masks: torch.Tensor) -> Any:
    ids, targets = tokens(length)
    return Decoder(heads, keys or heads), ({"ids": ids, **masks}, targets), criterion


PADDING = torch.arange(LENGTH).expand(ROWS, -1) < torch.tensor([[11], [LENGTH], [LENGTH], [14]])
BEHIND, IN_FRONT = PADDING, PADDING.flip(1)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PREFIX = CAUSAL | (torch.arange(LENGTH) < 6)
"""The first tokens see each other, the others those before them."""
DISTANCE = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
SLOPES = (2.0 ** -torch.arange(1, 4)[:, None, None] * DISTANCE).masked_fill(DISTANCE > 0, -torch.inf)
"""ALiBi's: [heads, sequence, sequence], less for keys that are further away."""


class Layers(nn.Module):
    """torch's own layers, which compare masks with the tokens that they are given."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 24), nn.Embedding(LONG, 24)
        layer = nn.TransformerEncoderLayer(24, heads, 32, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, WORDS)

    def forward(self, ids, mask=None, src_key_padding_mask=None, position_ids=None, is_causal=None):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
        return self.head(self.encoder(x, mask, src_key_padding_mask, is_causal))


LONG = 24
"""Longer than the sequences of a trial."""
LATER = torch.ones(LONG, LONG, dtype=torch.bool).triu(1)
ENDS = torch.arange(LONG).expand(ROWS, -1) >= torch.tensor([[20], [24], [24], [23]])


def layers(heads: int, **masks: Any) -> Any:
    ids, targets = tokens(LONG)
    return Layers(heads), ({"ids": ids, **masks}, targets), criterion


def hugging_face(kind: str, sizes: dict[str, Any], mask: torch.Tensor | None = None, hides: Any = None, **given) -> Any:
    """`hides`: the share of targets that do not count."""
    import transformers as hf

    make, (ids, targets) = getattr(hf, kind), tokens()
    labels = ids.clone() if hides is None else targets.masked_fill(torch.rand(targets.shape) < hides, -100)
    if mask is None:
        labels[0, :5] = -100
    else:
        given["attention_mask"] = mask if mask.dim() > 2 else mask.long()
        labels = labels.masked_fill(~mask, -100) if mask.dim() == 2 else labels
    return make(make.config_class(**sizes)), {"input_ids": ids, "labels": labels, **given}


JOINED = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)]).expand(ROWS, -1).contiguous()
"""Positions of two sequences in each row."""
llama = partial(hugging_face, "LlamaForCausalLM", DECODER)
gemma = partial(hugging_face, "Gemma3ForCausalLM", {**DECODER, **MIXED})
bert = partial(hugging_face, mask=BEHIND, hides=0.7)
modern = {**SIZES, **MIXED, "local_attention": WINDOW, "attn_implementation": "sdpa"}
KEEPING = {"parallel": {"context": {"size": 2, "non_split": ["keep"]}}}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ("head",)}}


@pytest.mark.promise(
    "sequences or experts larger than a device",
    "context and expert parallelism equal one process",
    of="SageMaker",
    page="choosing.md",
)
@rows(
    Row("targets that do not count", uneven, context(gradient_accumulation=2), accumulated=True),
    Row("halves, recomputed", partial(gpt, num_heads=1), context(activation_checkpoint="full")),
    Row("padding, whole on each rank", partial(decoder, 4, keep=BEHIND), KEEPING),
    Row("an odd number of tokens, three heads", partial(decoder, 3, 1, length=10), context()),
    Row("two heads of keys for four ranks", partial(decoder, 4, 2), context(4), 4),
    Row("one token on each rank", partial(decoder, 4, length=4), context(4), 4),
    Row("a mask of pairs", partial(decoder, 4, mask=CAUSAL.triu(-WINDOW) & BEHIND[:, None, None]), context()),
    Row("a bias of each head", partial(decoder, 3, mask=SLOPES), context()),
    Row("in a traced module", partial(decoder, 3, mask=BEHIND[:, None, None]), context(axes=PIPELINE), 4, slow=True),
    Row("torch's layers, a hint", partial(layers, 3, mask=LATER, is_causal=True, src_key_padding_mask=ENDS), context()),
    Row("Llama", llama, context()),
    Row("Llama, padding in front", partial(llama, IN_FRONT), context()),
    Row("Llama, padding behind, more ranks than keys", partial(llama, BEHIND), context(4), 4, slow=True),
    Row("Llama, joined sequences", partial(llama, position_ids=JOINED), context()),
    Row("Llama, a prefix", partial(llama, PREFIX.expand(ROWS, 1, -1, -1).contiguous()), context()),
    Row("Mistral", partial(hugging_face, "MistralForCausalLM", {**DECODER, "sliding_window": WINDOW}), context()),
    Row(
        "Gemma 3, joined sequences",
        partial(hugging_face, "Gemma3ForCausalLM", {**DECODER, **MIXED}, position_ids=JOINED),
        context(),
    ),
    Row("BERT", partial(bert, "BertForMaskedLM", SIZES), context()),
    Row("ModernBERT", partial(bert, "ModernBertForMaskedLM", modern), context(), slow=True),
)
def test_trains_as_one_process(row):
    row.prove()
