"""Attention of sharded sequences: values and gradients are those of whole ones; what each rank computes and sends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halfmesh.errors import InputError
from halfmesh.parallel import collectives
from halfmesh.parallel.context.attention import attend
from tests.support.ranks import here, run_ranks

from .runs import compare, make_gpt, plain_step

ROWS, SIZE = 2, 4

pytestmark = pytest.mark.distributed


def own_attention(*args, attention=F.scaled_dot_product_attention, **options):
    return attend(dist.group.WORLD, attention, *args, **options)


def masks(heads, length):
    torch.manual_seed(1)
    padding = torch.ones(ROWS, 1, 1, length, dtype=torch.bool)
    padding[0, ..., -3:], padding[1, ..., :1] = False, False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    window, prefix = causal.triu(-2), causal.clone()
    prefix[:, :3] = True
    found = {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": padding},
        "causal and padding": {"attn_mask": (padding & causal) | torch.eye(length, dtype=torch.bool)},
        "a sliding window": {"attn_mask": window},
        "a prefix": {"attn_mask": prefix},
        "a window of floats": {"attn_mask": torch.zeros(length, length).masked_fill(~window, -torch.inf)},
        "a bias of each head": {"attn_mask": torch.randn(1, heads, length, length)},
        "a bias of heads without a batch": {"attn_mask": torch.randn(heads, length, length)},
        "scale": {"scale": 0.3},
    }
    return here(found)


def attention_gaps(rank, world_size, heads, kv_heads, length):
    """How far values and gradients are from one process's, for each mask."""
    gaps = {}
    for name, options in masks(heads, length).items():
        torch.manual_seed(0)
        wholes = [here(torch.randn(ROWS, n, length, SIZE)).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        direction = here(torch.randn(ROWS, heads, length, SIZE))
        expected = F.scaled_dot_product_attention(*wholes, enable_gqa=heads != kv_heads, **options)
        expected.backward(direction)

        def cut(whole):
            return whole.chunk(world_size, 2)[rank]

        own = [cut(whole.detach()).clone().requires_grad_() for whole in wholes]
        found = own_attention(*own, enable_gqa=heads != kv_heads, **options)
        found.backward(cut(direction))
        pairs = [(found, cut(expected)), *((x.grad, cut(whole.grad)) for x, whole in zip(own, wholes, strict=True))]
        gaps[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return gaps


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "length"),
    [
        pytest.param(2, 4, 4, 8, id="heads are exchanged"),
        pytest.param(2, 4, 2, 8, id="with fewer key-value heads"),
        pytest.param(4, 4, 2, 8, id="fewer key-value heads than ranks"),
        pytest.param(2, 4, 1, 8, id="one key-value head"),
        pytest.param(2, 12, 3, 8, id="more key-value heads, which the ranks do not divide"),
        pytest.param(4, 2, 2, 8, id="keys are gathered, as there are fewer heads than ranks"),
        pytest.param(2, 3, 1, 10, id="keys are gathered, an odd number of tokens"),
        pytest.param(3, 1, 1, 6, id="one head, an odd number of ranks"),
        pytest.param(4, 3, 3, 4, id="one token on each rank"),
    ],
)
def test_attention(ranks, heads, kv_heads, length):
    for gaps in run_ranks(attention_gaps, ranks, heads, kv_heads, length):
        assert len(gaps) == 10
        assert max(gaps.values()) < 2e-6, gaps


def wrong_attention(rank, world_size):
    x = here(torch.randn(ROWS, 4, 8 // world_size, SIZE))
    mask = here(torch.ones(8 // world_size, 8 // world_size, dtype=torch.bool))
    calls = {
        "a query": lambda: own_attention(x[:, :, :1], x, x),
        "no heads": lambda: own_attention(x[:, 0], x[:, 0], x[:, 0]),
        "a mask of own tokens": lambda: own_attention(x, x, x, attn_mask=mask),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(InputError) as caught:
            call()
        said[name] = str(caught.value)
    return said


def test_other_attention_is_refused():
    said = run_ranks(wrong_attention, 2)[0]
    assert "they have to be [batch, heads, tokens, features] of this rank's" in said["a query"]
    assert "they have to be [batch, heads, tokens, features] of this rank's" in said["no heads"]
    assert "a mask has to be [..., 8, 8] or [..., 1, 8]" in said["a mask of own tokens"]


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


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_halves_that_other_ranks_computed_are_recomputed(recompute):
    compare(partial(make_gpt, num_heads=1), plain_step, activation_checkpoint=recompute)
