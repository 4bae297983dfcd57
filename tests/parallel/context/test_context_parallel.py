"""`parallel.context` through the engine: one process's losses, gradients and outputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfmesh
from halfmesh.hooks import ThroughputHook
from tests.support.ranks import here, run_ranks
from tests.support.saved_memory import bytes_left

from .runs import (
    GPT,
    LENGTH,
    ROWS,
    WORDS,
    compare,
    make_bert,
    make_engine,
    make_gpt,
    make_gpt2,
    make_llama,
    make_roberta,
    plain_step,
    tokens,
    train,
)


def uneven_step(engine, seed):
    """The ranks' tokens do not count alike; of one sample none does on the last rank."""
    ids, target = tokens(seed)
    target[0, 3:], target[1, :2] = -100, -100
    return engine.criterion(engine(ids), target)


def penalty_step(engine, seed):
    """A term that each rank computes by itself."""
    weights = sum(param.square().sum() for param in engine.model.parameters())
    return plain_step(engine, seed) + 0.01 * weights


def labels_step(engine, seed):
    ids, _ = tokens(seed)
    labels = ids.clone()
    labels[0, :5] = -100
    return engine(input_ids=ids, labels=labels).loss


def count_step(engine, seed):
    ids, _ = tokens(seed)
    return engine(input_ids=ids, labels=ids, num_items_in_batch=ROWS * (LENGTH - 1)).loss


def padding_step(engine, seed, left):
    ids, _ = tokens(seed)
    mask = torch.ones_like(ids)
    if left:
        mask[0, :5] = 0
    else:
        mask[0, -5:] = 0
    return engine(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def joined_step(engine, seed):
    """Two sequences in one row; one ends where a rank's tokens end."""
    ids, _ = tokens(seed)
    positions = here(torch.cat([torch.arange(8), torch.arange(LENGTH - 8)]).expand(ROWS, -1))
    return engine(input_ids=ids, position_ids=positions, labels=ids).loss


def masked_step(engine, seed):
    ids, target = tokens(seed)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    hidden = torch.rand(target.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    target = target.masked_fill(here(hidden), -100)
    return engine(input_ids=ids, attention_mask=mask, labels=target).loss


@pytest.mark.promise(
    "sequences longer than a device holds",
    "each rank computes its tokens; losses, gradients and outputs are those of whole sequences, or the "
    "model is refused",
    of="SageMaker",
    page="context-parallel.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "step", "ranks", "config"),
    [
        pytest.param(make_gpt, plain_step, 4, {}, id="GPT"),
        pytest.param(make_gpt, uneven_step, 2, {"gradient_accumulation": 2}, id="targets that do not count"),
        pytest.param(make_llama, labels_step, 2, {}, id="Llama, labels shifted over borders"),
        pytest.param(make_gpt, penalty_step, 2, {}, id="a penalty on weights"),
        pytest.param(make_gpt2, labels_step, 2, {}, id="GPT-2, labels shifted over borders"),
        pytest.param(make_llama, count_step, 2, {}, id="Llama, the loss divided by a count"),
        pytest.param(make_llama, partial(padding_step, left=False), 4, {}, id="Llama, padding behind"),
        pytest.param(make_llama, partial(padding_step, left=True), 2, {}, id="Llama, padding in front"),
        pytest.param(make_llama, joined_step, 2, {}, id="Llama, joined sequences"),
        pytest.param(make_bert, masked_step, 2, {}, id="BERT, padding"),
        pytest.param(make_roberta, masked_step, 2, {}, id="RoBERTa, padding"),
        pytest.param(make_gpt, plain_step, 2, {"activation_checkpoint": "full"}, id="recomputed"),
        pytest.param(make_gpt, plain_step, 2, {"activation_checkpoint": "selective"}, id="partly recomputed"),
    ],
)
def test_parity(make, step, ranks, config):
    compare(make, step, ranks, **config)


def reduced_precision(engine, seed):
    """Products may be rounded, as torch's settings say: the trial allows for it."""
    torch.backends.fp32_precision = "tf32"
    try:
        return plain_step(engine, seed)
    finally:
        torch.backends.fp32_precision = "none"


@pytest.mark.distributed
def test_products_of_fp32_that_may_be_rounded():
    compare(make_gpt, reduced_precision)


class OwnCheckpoint(GPT):
    def forward(self, ids, positions=None):
        x = self.embed(ids, positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.predict(x)


@pytest.mark.distributed
def test_a_model_that_recomputes_by_itself():
    compare(partial(OwnCheckpoint, LENGTH, 16, 2, 4), plain_step)


class OfTorch(nn.Module):
    """torch's own encoder layers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids, position_ids=None):
        places = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.distributed
def test_layers_of_torch():
    compare(OfTorch, plain_step)


def with_padding_mask(engine, seed):
    ids, target = tokens(seed)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, -4:] = False
    return engine.criterion(engine(ids, mask), target.masked_fill(~mask, -100))


class Masked(GPT):
    """Takes a mask of padding, by a name of its own."""

    def forward(self, ids, keep, positions=None):
        x = self.embed(ids, positions)
        for block in self.blocks:
            h = block.norm1(x)
            q, k, v = block.attention.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + block.attention.out(
                F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None]).transpose(1, 2).flatten(2)
            )
            x = x + block.mlp(block.norm2(x))
        return self.predict(x)


@pytest.mark.distributed
def test_arguments_that_every_rank_gets_whole():
    make = partial(Masked, LENGTH, 16, 2, 4)
    losses, weights = train(0, 1, make, with_padding_mask)
    found = run_ranks(train, 2, make, with_padding_mask, parallel={"context": {"size": 2, "non_split": ["keep"]}})
    for some, theirs in found:
        torch.testing.assert_close(some, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=2e-5)


# -- outputs, random numbers, weights ----------------------------------------------------------------------------------


def outputs(rank, world_size):
    engine = make_engine(make_gpt, world_size)
    ids, target = tokens()
    trained = engine(ids)
    engine.eval()
    with torch.no_grad():
        whole = engine(ids)
        loss = engine.criterion(whole, target)
    return trained.detach(), whole, loss.item()


def odd_evaluation(rank, world_size):
    engine = make_engine(make_gpt, world_size).eval()
    with torch.no_grad():
        return engine(tokens()[0][:, :15])


@pytest.mark.distributed
def test_lengths_that_the_ranks_do_not_divide_are_evaluated_whole():
    expected = odd_evaluation(0, 1)
    for found in run_ranks(odd_evaluation, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def flops(rank, world_size):
    engine = make_engine(make_gpt, world_size)
    hook = ThroughputHook()
    halfmesh.Trainer(engine).fit([tokens()] * 2, max_steps=2, hooks=[hook])
    return hook.flops


@pytest.mark.distributed
def test_flops_of_all_ranks_without_the_trial():
    (expected,) = run_ranks(flops, 1)
    assert all(found == expected for found in run_ranks(flops, 2))


@pytest.mark.distributed
def test_outputs_are_this_ranks_tokens_in_training_and_whole_in_evaluation():
    _, expected, loss = outputs(0, 1)
    for rank, (trained, whole, found) in enumerate(run_ranks(outputs, 2)):
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(trained, expected.chunk(2, 1)[rank], rtol=0, atol=1e-5)
        assert abs(found - loss) < 1e-5


def dropped(rank, world_size):
    engine = make_engine(partial(make_gpt, dropout=0.5), world_size)
    kept = []
    engine.model.drop.register_forward_hook(lambda module, args, output: kept.append(output == 0))
    ids, target = tokens()
    engine.backward(engine.criterion(engine(ids), target))
    return kept[-1]


@pytest.mark.distributed
def test_ranks_drop_activations_by_themselves():
    one, other = run_ranks(dropped, 2)
    assert 0.3 < one.double().mean() < 0.7
    assert not torch.equal(one, other)


def closed(rank, world_size, folder):
    engine = make_engine(make_gpt, world_size)
    engine.backward(plain_step(engine, 0))
    engine.step()
    engine.save(folder)
    engine.close()
    ids, _ = tokens()
    return here(engine.model)(ids).detach()  # the user's model, whole


@pytest.mark.distributed
def test_the_model_stays_whole_and_checkpoints_load_in_one_process(tmp_path):
    one, other = run_ranks(closed, 2, tmp_path / "saved")
    assert torch.equal(one, other)
    engine = make_engine(make_gpt)
    engine.load(tmp_path / "saved")
    torch.testing.assert_close(engine.eval()(tokens()[0]), one, rtol=0, atol=1e-5)


def saved_and_sent(rank, world_size):
    """Bytes that a forward leaves for its backward, and those of all-to-alls of a step: given out by this rank."""
    sent, inner = [], dist.all_to_all_single

    def counted(received, given, **options):
        sent.append(given.numel() * given.element_size())
        return inner(received, given, **options)

    engine = make_engine(partial(make_gpt, num_heads=2), world_size)
    engine.backward(plain_step(engine, 0))
    engine.step()
    ids, _ = tokens()
    dist.all_to_all_single = counted
    try:
        left = bytes_left(lambda: engine(ids))
        engine.backward(plain_step(engine, 0))
    finally:
        dist.all_to_all_single = inner
    return left, sum(sent), len(sent)


@pytest.mark.promise("sequences longer than a device holds")
@pytest.mark.distributed
def test_activations_halve_and_attention_sends_what_it_should():
    ((whole, _, _),) = run_ranks(saved_and_sent, 1)
    for left, sent, calls in run_ranks(saved_and_sent, 2):
        assert 0.45 < left / whole < 0.55
        depth, own = 2, ROWS * LENGTH // 2 * 16 * 4  # one activation of this rank: [2, 8, 16] in fp32
        assert calls == depth * 4 * 3  # q, k, v and the result, in two forwards and a backward
        assert sent == calls * own


# -- what is refused ---------------------------------------------------------------------------------------------------
