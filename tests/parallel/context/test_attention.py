"""Attention of sharded sequences: what is rejected, and what each rank computes and sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halfmesh.parallel import collectives
from halfmesh.parallel.context.attention import attend
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rejection

ROWS, SIZE = 2, 4

pytestmark = pytest.mark.distributed


def own_attention(*args, attention=F.scaled_dot_product_attention, **options):
    return attend(dist.group.WORLD, attention, *args, **options)


def wrong_attention(rank, world_size):
    x = here(torch.randn(ROWS, 4, 2, SIZE))
    mask = here(torch.ones(2, 2, dtype=torch.bool))
    return [
        rejection(lambda: own_attention(x[:, :, :1], x, x)),
        rejection(lambda: own_attention(x[:, 0], x[:, 0], x[:, 0])),
        rejection(lambda: own_attention(x, x, x, attn_mask=mask)),
    ]


def test_other_attention_is_rejected():
    for a_query, no_heads, own_mask in run_ranks(wrong_attention, 4):
        assert "they must be [batch, heads, tokens, features] for this rank's" in a_query
        assert "they must be [batch, heads, tokens, features] for this rank's" in no_heads
        assert "a mask must be [..., 8, 8] or [..., 1, 8]" in own_mask


def work(rank, world_size, heads, kv_heads):
    """The pairs of a query and a key that this rank computes for causal attention, and the bytes that it gives to
    all-to-alls and all-gathers."""
    own, pairs, sent = 4, [], {"all_to_all": [], "all_gather": []}
    q, k, v = (here(torch.randn(ROWS, n, own, SIZE)) for n in (heads, kv_heads, kv_heads))

    def attention(query, key, value, **options):
        queries, keys = query.shape[2], key.shape[2]
        pairs.append(query.shape[1] * (queries * keys - queries * (queries - 1) // 2))  # the last query sees all keys
        return F.scaled_dot_product_attention(query, key, value, **options)

    exchange, gather = dist.all_to_all_single, collectives.all_gather

    def counted(name, collective):
        def call(received, given, *args, **options):
            sent[name].append(given.numel() * given.element_size() / (q.numel() * q.element_size()))
            return collective(received, given, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted("all_to_all", exchange))
        patch.setattr(collectives, "all_gather", counted("all_gather", gather))
        own_attention(q, k, v, attention=attention, is_causal=True, enable_gqa=True)
    return sum(pairs), sent["all_to_all"], sent["all_gather"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "exchanged", "gathered"),
    [
        pytest.param(8, 8, [1, 1, 1, 1], [], id="heads are exchanged"),
        pytest.param(8, 2, [1, 0.5, 0.5, 1], [], id="two key-value heads, each for two ranks"),
        pytest.param(6, 2, [0.5, 0.5], [1 / 3, 1 / 3], id="half of the queries are exchanged"),
        pytest.param(1, 1, [0.5, 0.5], [1, 1], id="one head"),
    ],
)
def test_causal_work_is_equal_on_all_ranks(heads, kv_heads, exchanged, gathered):
    """Bytes are in those of a rank's queries."""
    length = 16
    for pairs, *sent in run_ranks(work, 4, heads, kv_heads):
        assert pairs == heads * length * (length + 1) // 2 / 4
        assert sent == [exchanged, gathered]
