"""Layers that are divided over tensor ranks, by each style and in each shape of a model, train as one process's."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.proofs import Row, rows

pytestmark = pytest.mark.distributed

WORDS = 12


def tensor(plan: Any, sequence: bool = False, size: int = 2) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": size, "plan": plan, "sequence_parallel": sequence}}}


def floats(make: Any, *shape: int, **options: Any) -> Any:
    return make(**options), torch.randn(shape)


def words(make: Any, **options: Any) -> Any:
    return make(**options), torch.randint(WORDS, (4, 6))


# -- layers ------------------------------------------------------------------------------------------------------------


def mlp(frozen: str = "") -> nn.Module:
    linear = [nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 6)]
    for layer in linear[1:] if frozen else ():
        getattr(layer, frozen).requires_grad_(False)
    return nn.Sequential(linear[0], nn.GELU(), linear[1], nn.Tanh(), linear[2])


class Sinks(nn.Module):
    """A parameter with an entry for each head, words by their features, and keys that all heads use as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.keys = nn.Embedding(WORDS, 8), nn.Linear(8, 6)
        self.heads, self.out, self.sinks = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        latent, rotary = self.keys(self.words(ids)).split([4, 2], -1)
        heads = self.heads(latent).unflatten(-1, (-1, 2)) * rotary.unsqueeze(-2)
        return self.out((heads * self.sinks.unsqueeze(-1)).flatten(-2))


SINKS = {"words": "embedding_gather", "keys": "latent_keys(2)", "": "rows(sinks)", "heads": "colwise", "out": "rowwise"}


MLP = {"2": "colwise", "4": "rowwise"}
GATHERED = {"0": "colwise_gather", "2": "rowwise_split", "4": "colwise_gather"}


class Language(nn.Module):
    """Words in, logits of words out; one weight for both if `tied`."""

    def __init__(self, tied: bool = True, padding_idx: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 6, padding_idx), nn.Linear(6, WORDS, bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).tanh())


VOCAB = {"words": "vocab", "head": "vocab"}
SHARDED_LOGITS = {"words": "vocab", "head": "vocab_parallel"}


def entropy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.view(-1, WORDS), targets.flatten(), ignore_index=3, label_smoothing=0.1)


def labelled(**options: Any) -> Any:
    model, ids = words(Language, **options)
    return model, (ids, ids.roll(1, 1)), entropy


class Projections(nn.Module):
    """Three layers on one input, perhaps computed again in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.before, self.out = nn.Linear(4, 4), nn.Linear(8, 4)
        self.q, self.k, self.v = (nn.Linear(4, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.out(self._run(self.q, x) * self._run(self.k, x).sigmoid() + self._run(self.v, x))

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)


PROJECTIONS = {"[qkv]": "colwise", "out": "rowwise"}


# -- sequences ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer between divided sequences, which passes activations by name."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.norm, self.drop, self.again = nn.LayerNorm(4), nn.Dropout(0.0), again
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        if self.again:
            return x + self.drop(checkpoint(self.mlp, input=normed, use_reentrant=False))
        return x + self.drop(self.mlp(input=normed))


def sequences(again: bool = False, outputs: int = 2) -> nn.Module:
    layers = nn.Sequential(Layer(again), Layer(again))
    return nn.Sequential(nn.Linear(4, 4), layers, nn.LayerNorm(4), nn.Linear(4, outputs))


SEQUENCE = {"1.0": "sequence_begin", "1.*.norm": "sequence", "1.*.drop": "sequence", "2": "sequence_end"}
SEQUENCE |= {"1.*.mlp": "region(input)", "1.*.mlp.0": "colwise", "1.*.mlp.2": "rowwise"}


# -- attention ---------------------------------------------------------------------------------------------------------


class Renamed(nn.Linear):
    """Computes what nn.Linear does."""


class Attention(nn.Module):
    """Heads that are counted, three projections in one weight, a norm over each head; takes a mask by name, and returns
    the weights of its heads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.fast = 4, True
        self.qkv, self.q_norm, self.proj = nn.Linear(8, 24), nn.LayerNorm(2), Renamed(8, 8)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 2)).permute(2, 0, 3, 1, 4)
        weights = (self.q_norm(q) @ k.transpose(-1, -2)).masked_fill(mask, -torch.inf).softmax(-1)
        return {"out": self.proj((weights @ v).transpose(1, 2).flatten(2)), "weights": weights}


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, mask=torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool())["out"]


ATTENTION = {"*.q_norm": "partial", "*.qkv": "fused_colwise(3)", "*.proj": "rowwise", "inner": "heads(num_heads)"}
ATTENTION |= {"inn*": "off(fast, not_there)"}

N, L, S, E, HEADS = 2, 5, 3, 8, 4
BOOLS = torch.zeros(L, S, dtype=torch.bool)
BOOLS[1:, 0] = BOOLS[0, 2] = True
OF_TORCH = {"attention": "attention", "attention.out_proj": "rowwise"}


class OfTorch(nn.Module):
    """torch's attention; outputs and weights as one, so that a loss of both goes backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, **options)

    def forward(self, *args: Any, **given: Any) -> torch.Tensor:
        return torch.cat([part.flatten() for part in self.attention(**given) if part is not None])


def attend(bias: bool = True, first: bool = True, heads_mask: bool = False, **options: Any) -> Any:
    shapes = [(N, n, E) if first else (n, N, E) for n in (L, S, S)]
    given = dict(zip(("query", "key", "value"), map(torch.randn, shapes), strict=True)) | options
    given |= {"attn_mask": torch.randn(N * HEADS, L, S)} if heads_mask else {}
    return OfTorch(bias=bias, batch_first=first), [given] * 2


def padding(keys: int) -> torch.Tensor:
    mask = torch.zeros(N, keys, dtype=torch.bool)
    mask[0, -1] = True
    return mask


CAUSAL = torch.ones(L, S, dtype=torch.bool).triu(1)
MASKS = {
    "plain": attend,
    "float masks of heads": partial(attend, heads_mask=True, average_attn_weights=False),
    "both": partial(attend, first=False, attn_mask=BOOLS, key_padding_mask=padding(S)),
    "causal": partial(attend, bias=False, attn_mask=CAUSAL, is_causal=True, need_weights=False),
}


def layers(kind: str, shapes: dict[str, Any], **given: Any) -> Any:
    """torch's encoder or decoder, in a module whose plan is found."""
    layer = getattr(nn, f"Transformer{kind}Layer")(E, HEADS, 12, 0.0, batch_first=True, norm_first=kind == "Encoder")
    batch = {name: torch.randn(N, length, E) for name, length in shapes.items()} | given
    return getattr(nn, f"Transformer{kind}")(layer, 2), [batch] * 2


MASK = torch.ones(L, L).triu(1).mul(-1e9).double()
KINDS = {
    "encoder, causal": partial(layers, "Encoder", {"src": L}, mask=MASK, is_causal=True),
    "decoder": partial(layers, "Decoder", {"memory": S, "tgt": L}, tgt_mask=MASK, memory_key_padding_mask=padding(S)),
}


@rows(
    Row("one row", partial(floats, mlp, 4), tensor(MLP)),
    Row("gathered and split", partial(floats, mlp, 2, 3, 4), tensor(GATHERED)),
    Row("frozen weights", partial(floats, mlp, 3, 4, frozen="weight"), tensor(MLP)),
    Row("frozen biases", partial(floats, mlp, 3, 4, frozen="bias"), tensor(MLP)),
    Row("which are recomputed", partial(floats, Projections, 3, 4, reentrant=False), tensor(PROJECTIONS)),
    Row("words, tied", partial(words, Language, padding_idx=5), tensor(VOCAB, size=3), 3),
    Row("sharded logits", labelled, tensor(SHARDED_LOGITS)),
    Row("sharded logits, not tied", partial(labelled, tied=False, bias=True), tensor(SHARDED_LOGITS)),
    Row("sequences", partial(floats, sequences, 2, 6, 4), tensor(SEQUENCE, True)),
    Row("sequences, recomputed", partial(floats, sequences, 2, 6, 4, again=True), tensor(SEQUENCE, True)),
    Row("keys of all heads, whose gradients are parts of the whole", partial(words, Sinks), tensor(SINKS)),
    Row("attention", partial(floats, Masking, 2, 3, 8), tensor(ATTENTION)),
    *(Row(f"torch's attention, {name}", build, tensor(OF_TORCH)) for name, build in MASKS.items()),
    *(Row(f"torch's {name}", build, tensor("auto")) for name, build in KINDS.items()),
)
def test_trains_as_one_process(row):
    row.prove()
