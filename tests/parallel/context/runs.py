"""Small models, and the training of context parallelism's tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt import GPT

import halfmesh
from tests.support.ranks import here, rank_device

ROWS, LENGTH, WORDS = 2, 16, 32


def make_gpt(**options):
    return GPT(**{"context": LENGTH, "width": 16, "depth": 2, "num_heads": 4, **options})


def make_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"num_key_value_heads": 2, "vocab_size": WORDS, "initializer_range": 0.2, "use_cache": False, **options}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options))


def tokens(seed=0, uneven=False):
    """Inputs and targets; `uneven`: the ranks' tokens do not count alike."""
    torch.manual_seed(seed)
    ids = here(torch.randint(WORDS, (ROWS, LENGTH + 1)))
    target = ids[:, 1:].clone()
    if uneven:
        target[0, :11], target[1, 4:6] = -100, -100
    return ids[:, :-1], target


def criterion(output, target, **options):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def make_engine(make, size=1, criterion=criterion, **config):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config["parallel"] = {"context": size} if size > 1 else {}
    return halfmesh.initialize(model, optimizer, criterion, config=config, device=rank_device())


def plain_step(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids), target)
