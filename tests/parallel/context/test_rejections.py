"""Models, losses and inputs that `parallel.context` would train otherwise than one process are rejected."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import rejection

from .runs import LENGTH, WORDS, criterion, make_engine, make_gpt, make_llama, plain_step, tokens


class Plain(nn.Module):
    """A small decoder. `before` attention it changes activations, perhaps with a `layer`; `after` the head it makes of
    logits, words and labels what it returns."""

    def __init__(self, before=lambda model, x: x, layer=None, after=lambda logits, ids, labels: logits):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)
        self.before, self.after = before, after
        if layer is not None:
            self.layer = layer()

    def forward(self, ids, labels=None, position_ids=None):
        x = self.before(self, self.embed(ids, position_ids))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.after(self.head(x), ids, labels)

    def embed(self, ids, position_ids):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        return self.tokens(ids) + self.places(places)


class SmallPositions(Plain):
    def embed(self, ids, position_ids):
        return self.tokens(ids) + 0.05 * self.places(torch.arange(ids.shape[1], device=ids.device))


class CountsMasked(Plain):
    """Positions depend on the mask."""

    def forward(self, ids, mask, position_ids=None):
        return super().forward(ids, position_ids=mask.cumsum(1) - 1 if position_ids is None else position_ids)


def running_mean(model, x):
    """A causal mixing that is small beside the rest."""
    return x + 0.02 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def shifted(logits, ids, labels):
    """Keeps the number of targets, and loses those at borders."""
    return F.cross_entropy(logits.flatten(0, 1), F.pad(ids[:, 1:], (0, 1), value=-100).flatten())


def shifted_labels(logits, ids, labels):
    return logits if labels is None else criterion(logits, F.pad(labels, (0, 1), value=-100)[:, 1:])


def own_mean(logits, ids, labels):
    """Each rank divides by a count of its own."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return losses.sum() / (labels != -100).sum()


def balanced(logits, ids, labels):
    return logits, logits.softmax(-1).mean((0, 1)).square().sum()


def zeros():
    return nn.Parameter(torch.zeros(16))


HIDDEN = partial(Plain, lambda model, x: x + model.layer * x.mean(1, keepdim=True), zeros)
CENTRED = partial(Plain, lambda model, x: x - x.mean((0, 1)) if model.training else x)
OF_TORCH = partial(nn.MultiheadAttention, 16, 2, batch_first=True)
ASKING = partial(Plain, lambda model, x: x + model.layer(x, x, x)[0], OF_TORCH)


def squared(output, target):
    return criterion(output, target) + output.mean((0, 1)).square().sum()


def outside(engine, seed):
    ids, target = tokens(seed)
    own = engine.context.coordinate("cp") * LENGTH // 2
    return criterion(engine(ids), target[:, own : own + LENGTH // 2].contiguous())


def odd_length(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids[:, :15]), target[:, :15])


def late_labels(engine, seed):
    ids, _ = tokens(seed)
    with torch.no_grad():
        engine(ids)
    labels = ids.clone()
    labels[:, : LENGTH // 2] = -100
    return engine(ids, labels=labels)


def prompted(engine, seed):
    ids, target = tokens(seed)
    target[:, :6] = -100
    return engine(ids, target)


def masked(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids, torch.ones_like(ids)), target)


def cached(engine, seed):
    engine.eval()
    with torch.no_grad():
        assert engine(input_ids=tokens()[0]).past_key_values is None
        return engine(input_ids=tokens()[0], use_cache=True)


def masked_mean(output, target):
    mask = target != -100
    return (criterion(output, target, reduction="none") * mask.flatten()).sum() / mask.sum()


class Late:
    """A term sets in with the third call."""

    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        late = output.mean((0, 1)).square().sum() if self.calls > 2 else 0.0
        return criterion(output, target) + late


def uneven(engine, seed):
    ids, target = tokens(seed, uneven=True)
    return engine.criterion(engine(ids), target)


def time_major(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids).transpose(0, 1).flatten(0, 1), target.t().flatten())


def cut(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids)[:, :-1], target[:, 1:])


def mixed(engine, seed):
    ids, target = tokens(seed)
    output = engine(ids)
    return engine.criterion(output - output.mean(1, keepdim=True), target)


LATE = Late()
BF16 = {"bf16": {"mode": "torch"}}
POSITIONS = "positions must come from the argument that parallel.context.positions names"
SHIFT = "Shift targets before the call"
MIXED = "tokens are combined"
WRONG = {
    "positions, bf16": (SmallPositions, plain_step, BF16, POSITIONS),
    "positions of a mask": (CountsMasked, masked, {}, "with padding"),
    "diluted, bf16": (partial(Plain, running_mean), plain_step, BF16, MIXED),
    "hidden": (HIDDEN, plain_step, {}, MIXED),
    "training only": (CENTRED, plain_step, {}, MIXED),
    "weights of attention": (ASKING, plain_step, {}, "no rank has the attention weights"),
    "a border": (partial(Plain, after=shifted), lambda engine, seed: engine(tokens(seed)[0]), {}, SHIFT),
    "late labels": (partial(Plain, after=shifted_labels), late_labels, {}, SHIFT),
    "a mean of what counts": (partial(Plain, after=own_mean), prompted, {}, "targets that do not count"),
    "a router's loss": (partial(Plain, after=balanced), plain_step, {}, "output_router_logits"),
    "a squared mean": (Plain, plain_step, {"criterion": squared}, "the criterion must be a mean"),
    "a loss outside": (Plain, outside, {}, "compute the loss in the model or in engine.criterion"),
    "an odd length": (Plain, odd_length, {}, "context=2 does not divide a sequence of 15 tokens; pad it"),
    "a mean by a mask": (make_gpt, uneven, {"criterion": masked_mean}, "loss_reduction='weighted'"),
    "late": (make_gpt, plain_step, {"criterion": LATE}, "neither"),
    "time-major before": (make_gpt, time_major, {"criterion": F.cross_entropy}, "without a sequence dim"),
    "shifted before": (make_gpt, cut, {}, "Shift targets of whole sequences"),
    "mixed before": (make_gpt, mixed, {}, "unchanged, and targets [batch, sequence, ...]; compute inside"),
    "a cache": (lambda: make_llama(use_cache=True), cached, {}, "use_cache: with parallel.context"),
}


def reject_each(rank, world_size):
    said = {}
    for name, (make, step, config, _) in WRONG.items():
        engine = make_engine(make, world_size, **config)

        def train(engine=engine, step=step):
            for seed in range(3):
                engine.backward(step(engine, seed))
                engine.step()

        said[name] = rejection(train), engine.global_step
    return said, LATE.calls


@pytest.mark.distributed
def test_what_would_train_otherwise_is_rejected():
    for said, calls in run_ranks(reject_each, 2, timeout=120):
        for name, (*_, words) in WRONG.items():
            text, steps = said[name]
            assert text.startswith("InputError"), (name, text)
            assert words in text, (name, text)
            assert steps == 2 * (name == "late"), name
        assert calls == 3, "the trial leaves no trace"


def make_recurrent():
    model = make_llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


def make_gemma():
    import transformers as hf

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS, "pad_token_id": 0}
    both_ways = {"layer_types": ["sliding_attention"], "use_bidirectional_attention": True}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **both_ways))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
UNKNOWN = [
    (lambda: make_llama(attn_implementation="eager"), "its attention 'eager' cannot be sharded"),
    (make_gemma, "its windows are not those of transformers' create_bidirectional_sliding_window_mask"),
    (make_recurrent, "its layers have linear_attention, and only attention can be"),
    (lambda: make_llama(rope_parameters=DYNAMIC), "its rotations are 'dynamic'"),
    (make_gpt, "compile: attention waits for other ranks"),
]


def test_models_that_cannot_be_sharded_are_rejected_before_anything_runs(monkeypatch):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for make, words in UNKNOWN:
        with pytest.raises(halfmesh.IncompatibleConfigError) as caught:
            make_engine(make, 2, compile=make is make_gpt)
        assert words in str(caught.value)
    assert not dist.is_initialized()
