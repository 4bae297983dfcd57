"""What becomes of the trial of a model: it leaves no trace, and no rank waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks

from .runs import LENGTH, make_engine, make_gpt, plain_step, tokens
from .test_rejections import Plain

pytestmark = pytest.mark.distributed


class Counts(Plain):
    """Keeps a number, a list and a tensor of its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.kept, self.total = 0, [], torch.zeros(())
        self.zero = nn.Parameter(torch.zeros(3))

    def forward(self, ids, position_ids=None):
        self.calls += 1
        self.kept.append(self.calls)
        self.total += 1
        return super().forward(ids, position_ids=position_ids)


def calls(rank, world_size):
    engine = make_engine(Counts, world_size)
    torch.manual_seed(1)
    engine.backward(plain_step(engine, 0))
    model = engine.model
    return model.calls, len(model.kept), float(model.total), float(model.zero.abs().sum()), torch.rand(()).item()


def test_the_trial_leaves_no_trace():
    torch.manual_seed(1)
    tokens(0)  # which seeds
    drawn = torch.rand(()).item()
    for found in run_ranks(calls, 2):
        assert found == (1, 1, 1.0, 0.0, drawn)


class MetExperts(Plain):
    """Its graph depends on the tokens of a rank."""

    def forward(self, ids, position_ids=None):
        logits, x = super().forward(ids, position_ids=position_ids), 0.0
        for kind in (ids % 2).unique().tolist():
            x = x + logits * (ids % 2 == kind)[..., None]
        return logits, x.logsumexp(-1).square().mean()


def meet_experts(rank, world_size):
    """In the second call only one rank meets both kinds of tokens."""
    engine = make_engine(MetExperts, world_size, timeout=30.0)
    for seed in range(2):
        ids, target = tokens(seed)
        if seed:
            ids[:, : LENGTH // 2] = ids[:, : LENGTH // 2] // 2 * 2
        logits, loss = engine(ids)
        engine.backward(engine.criterion(logits, target) + 0.01 * loss)
        engine.step()


def test_ranks_whose_graphs_differ_try_together():
    run_ranks(meet_experts, 2)


def evaluate_first(rank, world_size):
    """The first data rank evaluates before any update; the other has no batch."""
    engine = make_engine(make_gpt, 2, timeout=30.0)
    if engine.context.dp_rank == 0:
        with torch.no_grad():
            assert engine.eval()(tokens(0)[0]).shape[1] == LENGTH
    engine.train()
    engine.backward(loss := plain_step(engine, 0))
    engine.step()
    return float(loss)


def test_a_trial_waits_for_the_ranks_of_its_batch_only():
    assert len(set(run_ranks(evaluate_first, 4))) == 1
