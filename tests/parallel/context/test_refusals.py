"""Models, losses and inputs that `parallel.context` would train otherwise than one process are refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.ranks import run_ranks

from .runs import LENGTH, WORDS, criterion, make_gpt, make_llama, plain_step, tokens, train


class Plain(nn.Module):
    """A small decoder that is changed in one place by each class below."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, ids, position_ids=None):
        return self.head(self.mix(self.embed(ids, position_ids)))

    def embed(self, ids, position_ids):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        return self.tokens(ids) + self.places(places)

    def mix(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class CountsFromZero(Plain):
    def embed(self, ids, position_ids):
        return super().embed(ids, torch.arange(ids.shape[1], device=ids.device))


class Convolves(Plain):
    def mix(self, x):
        return super().mix(x + F.avg_pool1d(F.pad(x.transpose(1, 2), (1, 0)), 2, 1).transpose(1, 2))


class AttendsByHand(Plain):
    def mix(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, -torch.inf)
        return x + scores.softmax(-1) @ v


class AttendsFlexibly(Plain):
    def mix(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + flex_attention(q, k, v).transpose(1, 2).flatten(2)


class AsksForWeights(Plain):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def mix(self, x):
        return x + self.attention(x, x, x)[0]


class Pools(Plain):
    def forward(self, ids, position_ids=None):
        return super().forward(ids, position_ids).mean(1)


class LosesTheBorder(Plain):
    def forward(self, ids, position_ids=None):
        logits = super().forward(ids, position_ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class ShiftsItself(Plain):
    """Keeps the number of targets, and loses those at borders."""

    def forward(self, ids, position_ids=None):
        logits = super().forward(ids, position_ids)
        return F.cross_entropy(logits.flatten(0, 1), F.pad(ids[:, 1:], (0, 1), value=-100).flatten())


def squared(output, target):
    return criterion(output, target) + output.mean((0, 1)).square().sum()


def outside(engine, seed):
    ids, target = tokens(seed)
    own = engine.context.coordinate("cp") * LENGTH // 2
    return criterion(engine(ids), target[:, own : own + LENGTH // 2].contiguous())


def own_loss(engine, seed):
    return engine(tokens(seed)[0])


def other_inputs(engine, seed):
    ids, target = tokens(seed + engine.context.rank)
    return engine.criterion(engine(ids), target)


def odd_length(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids[:, :15]), target[:, :15])


def refused(rank, world_size, make, step, loss):
    with pytest.raises(halfmesh.InputError) as caught:
        train(rank, world_size, make, step, criterion=loss)
    return str(caught.value)


@pytest.mark.promise("sequences longer than a device holds")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "words", "step", "loss"),
    [
        (CountsFromZero, r"differs by .*positions only be taken from the argument position_ids", plain_step, criterion),
        (Convolves, "differs by .*no convolution", plain_step, criterion),
        (
            AttendsByHand,
            "Tokens may only be combined by torch.nn.functional.scaled_dot_product_attention",
            plain_step,
            criterion,
        ),
        (
            AttendsFlexibly,
            "Tokens may only be combined by torch.nn.functional.scaled_dot_product_attention",
            plain_step,
            criterion,
        ),
        (AsksForWeights, "no rank has the weights of attention", plain_step, criterion),
        (Pools, r"the model returns something else: its output for 16 tokens", plain_step, criterion),
        (LosesTheBorder, "Shift targets of whole sequences", own_loss, None),
        (ShiftsItself, "Shift targets of whole sequences before the call", own_loss, None),
        (Plain, "the criterion has to be a mean over tokens", plain_step, squared),
        (Plain, "was computed from outputs of engine", outside, None),
        (Plain, "ranks of a context group were given different inputs", other_inputs, criterion),
        (Plain, "a sequence of 15 tokens cannot be sharded over context=2", odd_length, criterion),
    ],
    ids=[
        "positions",
        "convolution",
        "by hand",
        "flex_attention",
        "weights",
        "pooled",
        "border",
        "border kept",
        "squared mean",
        "loss outside",
        "inputs",
        "length",
    ],
)
def test_what_would_train_otherwise_is_refused(make, words, step, loss):
    for message in run_ranks(refused, 2, make, step, loss):
        assert re.search(words, message)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_llama()

    def forward(self, ids, labels, position_ids=None):
        return self.inner(input_ids=ids, labels=labels, position_ids=position_ids).loss


def make_gemma2():
    """It caps the logits of attention, which torch's function does not."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**GEMMA))


def make_gemma3(**options):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention"], **options))


GEMMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS, "pad_token_id": 0}


def problems(model, **config):
    with pytest.raises(halfmesh.IncompatibleConfigError) as caught:
        halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, device="cpu")
    return str(caught.value)


def test_models_that_cannot_be_sharded_are_refused_before_anything_runs(monkeypatch):
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    parallel = {"context": 2}
    for kind in ("eager", "flex_attention"):
        other = make_llama(attn_implementation=kind)
        assert f"its attention '{kind}' cannot be sharded" in problems(other, parallel=parallel)
    assert "transformers has no 'sdpa' for this model" in problems(make_gemma2(), parallel=parallel)
    both_ways = make_gemma3(use_bidirectional_attention=True)  # windows of its own
    assert "transformers' create_bidirectional_sliding_window_mask" in problems(both_ways, parallel=parallel)
    recurrent = make_llama()
    recurrent.config.layer_types = ["full_attention", "linear_attention"]
    assert "its layers have linear_attention, and only attention can be" in problems(recurrent, parallel=parallel)
    wrapped, dynamic = Wrapped(), make_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert "inner would shift the labels that Wrapped gives it" in problems(wrapped, parallel=parallel)
    assert "its rotations are 'dynamic'" in problems(dynamic, parallel=parallel)
    assert "compile: attention waits for other ranks" in problems(make_gpt(), parallel=parallel, compile=True)
    assert not dist.is_initialized()
