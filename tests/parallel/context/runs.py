"""Small models, and the training of context parallelism's tests beside that of one process."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import halfmesh
from tests.support.example_runs import ROOT
from tests.support.ranks import here, rank_device, run_ranks

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT

from tests.support.whole import close_whole

ROWS, LENGTH, WORDS = 2, 16, 32


def make_gpt(**options):
    return GPT(**{"context": LENGTH, "width": 16, "depth": 2, "num_heads": 4, **options})


def make_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"num_key_value_heads": 2, "vocab_size": WORDS, "initializer_range": 0.2, "use_cache": False, **options}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options))


def make_gpt2():
    """Its class says nothing of the loss, which transformers takes to be that of a causal model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False, initializer_range=0.2))


def make_bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **dropout, vocab_size=WORDS, initializer_range=0.2))


def make_roberta():
    """It counts positions from the number of the token of padding on, and not where that stands."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return RobertaForMaskedLM(RobertaConfig(**sizes, **dropout, vocab_size=WORDS, initializer_range=0.2))


def tokens(seed=0):
    torch.manual_seed(seed)
    ids = here(torch.randint(WORDS, (ROWS, LENGTH + 1)))
    return ids[:, :-1], ids[:, 1:].clone()


def criterion(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_engine(make, size=1, criterion=criterion, **config):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = {"context": size, **config.pop("parallel", {})} if size > 1 else config.pop("parallel", {})
    config = {**config, "parallel": parallel}
    return halfmesh.initialize(model, optimizer, criterion, config=config, device=rank_device())


def train(rank, world_size, make, step, seeds=(0, 1), **config):
    """Two updates; the losses and the whole weights."""
    engine = make_engine(make, world_size, **config)
    losses = []
    for seed in seeds:
        engine.zero_grad()
        loss = step(engine, seed)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, close_whole(engine)


def compare(make, step, ranks=2, **config):
    """With one process."""
    losses, weights = train(0, 1, make, step, **config)
    for found, theirs in run_ranks(train, ranks, make, step, **config):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(theirs, weights, rtol=0, atol=2e-5)


def plain_step(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids), target)
