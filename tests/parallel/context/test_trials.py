"""What the trial of a model finds, and that it leaves no trace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from tests.support.ranks import run_ranks

from .runs import LENGTH, criterion, make_engine, make_llama, plain_step, tokens
from .test_refusals import Plain

pytestmark = pytest.mark.distributed


class RunningMean(Plain):
    """A causal mixing that is small beside the rest."""

    def mix(self, x):
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        return super().mix(x + 0.02 * x.cumsum(1) / counts.to(x.dtype))


class Hidden(Plain):
    """What it mixes begins at zero."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def mix(self, x):
        return super().mix(x) + self.gate * x.mean(1, keepdim=True)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def mix(self, x):
        return super().mix(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Recurrent(Plain):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def mix(self, x):
        return super().mix(x + self.rnn(x)[0])


class Centres(Plain):
    """In training only."""

    def mix(self, x):
        return super().mix(x - x.mean((0, 1)) if self.training else x)


class LateLabels(Plain):
    def forward(self, ids, labels=None, position_ids=None):
        logits = super().forward(ids, position_ids)
        return logits if labels is None else criterion(logits, F.pad(labels, (0, 1), value=-100)[:, 1:])


class SmallPositions(Plain):
    def embed(self, ids, position_ids):
        return self.tokens(ids) + 0.05 * self.places(torch.arange(ids.shape[1], device=ids.device))


class CountsMasked(Plain):
    """Positions depend on the mask."""

    def forward(self, ids, mask, position_ids=None):
        return self.head(self.mix(self.embed(ids, mask.cumsum(1) - 1 if position_ids is None else position_ids)))


class Balanced(Plain):
    def forward(self, ids, position_ids=None):
        logits = super().forward(ids, position_ids)
        return logits, logits.softmax(-1).mean((0, 1)).square().sum()


class MaskedMean(Plain):
    """Each rank divides by a count of its own."""

    def forward(self, ids, labels, position_ids=None):
        logits = super().forward(ids, position_ids)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return losses.sum() / (labels != -100).sum()


def prompted(engine, seed):
    ids, target = tokens(seed)
    target[:, :6] = -100
    return engine(ids, target)


class MetExperts(Plain):
    """Its graph depends on the tokens of a rank."""

    def forward(self, ids, position_ids=None):
        logits, x = super().forward(ids, position_ids), 0.0
        for kind in (ids % 2).unique().tolist():
            x = x + logits * (ids % 2 == kind)[..., None]
        return logits, x.logsumexp(-1).square().mean()


def late_labels(engine, seed):
    ids, _ = tokens(seed)
    with torch.no_grad():
        engine(ids)
    labels = ids.clone()
    labels[:, : LENGTH // 2] = -100
    return engine(ids, labels=labels)


def masked(engine, seed):
    ids, target = tokens(seed)
    return engine.criterion(engine(ids, torch.ones_like(ids)), target)


def cached(engine, seed):
    engine.eval()
    with torch.no_grad():
        assert engine(input_ids=tokens()[0]).past_key_values is None
        return engine(input_ids=tokens()[0], use_cache=True)


BF16 = {"bf16": {"mode": "torch"}}
WRONG = {
    "diluted": (RunningMean, plain_step, {}, "tokens are combined"),
    "diluted, bf16": (RunningMean, plain_step, BF16, "tokens are combined"),
    "hidden": (Hidden, plain_step, {}, "tokens are combined"),
    "training only": (Centres, plain_step, {}, "tokens are combined"),
    "statistics of the batch": (Normed, plain_step, BF16, "tokens are combined"),
    "recurrent": (Recurrent, plain_step, {}, "tokens are combined"),
    "late labels": (LateLabels, late_labels, {}, "Shift targets of whole sequences"),
    "positions": (SmallPositions, plain_step, {}, "positions"),
    "positions, bf16": (SmallPositions, plain_step, BF16, "positions"),
    "positions of a mask": (CountsMasked, masked, {}, "with padding"),
    "a mean of what counts": (MaskedMean, prompted, {}, "or targets that do not count"),
    "a router's loss": (Balanced, plain_step, {}, "output_router_logits"),
    "a cache": (lambda: make_llama(use_cache=True), cached, {}, "use_cache: with parallel.context"),
}


def refuse_each(rank, world_size):
    said = {}
    for name, (make, step, config, _) in WRONG.items():
        engine = make_engine(make, world_size, **config)
        with pytest.raises(halfmesh.InputError) as caught:
            step(engine, 0)
        said[name] = str(caught.value)
    return said


@pytest.mark.promise("sequences longer than a device holds")
def test_what_combines_tokens_is_refused():
    for said in run_ranks(refuse_each, 2):
        for name, (*_, words) in WRONG.items():
            assert words in said[name], name


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
        return super().forward(ids, position_ids)


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
    engine = make_engine(make_llama, 2, timeout=30.0)
    if engine.context.dp_rank == 0:
        with torch.no_grad():
            logits = engine.eval()(input_ids=tokens(0)[0]).logits
        assert logits.shape[1] == LENGTH
    engine.train()
    return float(plain_loss(engine))


def plain_loss(engine):
    engine.backward(loss := engine(input_ids=tokens(0)[0], labels=tokens(0)[0]).loss)
    engine.step()
    return loss


def test_a_trial_waits_for_the_ranks_of_its_batch_only():
    assert len(set(run_ranks(evaluate_first, 4))) == 1
