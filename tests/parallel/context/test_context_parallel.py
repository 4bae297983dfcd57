"""`parallel.context` through the engine: outputs, random numbers, checkpoints, trials, what is sent, and losses."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from halfmesh.parallel import collectives
from halfmesh.parallel.context.attention import attend
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rejection
from tests.support.whole import close_whole

from .runs import LENGTH, ROWS, criterion, make_engine, make_gpt, plain_step, tokens
from .test_rejections import Plain

pytestmark = pytest.mark.distributed


def outputs(rank, world_size, folder=None):
    """In training, in evaluation, of a length that the ranks do not divide, the loss, and after an update."""
    engine = make_engine(make_gpt, world_size)
    ids, target = tokens()
    trained = engine(ids).detach()
    engine.eval()
    with torch.no_grad():
        whole = engine(ids)
        odd, loss = engine(ids[:, :15]), engine.criterion(whole, target)
    if folder is None:
        return trained, whole, odd, loss
    engine.train()
    engine.backward(plain_step(engine, 0))
    engine.step()
    engine.save(folder)
    engine.close()
    return trained, whole, odd, loss, here(engine.model)(ids).detach()  # the user's model, whole


def test_outputs_are_this_ranks_tokens_in_training_and_whole_in_evaluation(tmp_path):
    trained, *expected = outputs(0, 1)
    ranks = run_ranks(outputs, 2, tmp_path / "saved")
    for rank, (own, *found, _) in enumerate(ranks):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(own, trained.chunk(2, 1)[rank], rtol=0, atol=1e-5)
    engine = make_engine(make_gpt)
    engine.load(tmp_path / "saved")
    torch.testing.assert_close(engine.eval()(tokens()[0]), ranks[0][-1], rtol=0, atol=1e-5)


def dropped(rank, world_size):
    engine = make_engine(partial(make_gpt, dropout=0.5), world_size)
    kept = []
    engine.model.drop.register_forward_hook(lambda module, args, output: kept.append(output == 0))
    engine.backward(plain_step(engine, 0))
    return kept[-1]


def test_ranks_drop_activations_by_themselves():
    one, other = run_ranks(dropped, 2)
    assert 0.3 < one.double().mean() < 0.7
    assert not torch.equal(one, other)


class Counts(Plain):
    """Keeps a number, a list and a tensor of its calls. Its graph depends on the tokens of a rank."""

    def __init__(self):
        super().__init__()
        self.calls, self.kept, self.total = 0, [], torch.zeros(())
        self.zero = nn.Parameter(torch.zeros(3))

    def forward(self, ids, position_ids=None):
        self.calls += 1
        self.kept.append(self.calls)
        self.total += 1
        logits, x = super().forward(ids, position_ids=position_ids), 0.0
        for kind in (ids % 2).unique().tolist():
            x = x + logits * (ids % 2 == kind)[..., None]
        return logits, x.logsumexp(-1).square().mean()


def meet_experts(rank, world_size):
    """In the second call only one rank meets both kinds of tokens."""
    engine, found = make_engine(Counts, world_size, timeout=30.0), []
    for seed in range(2):
        ids, target = tokens(seed)
        if seed:
            ids[:, : LENGTH // 2] = ids[:, : LENGTH // 2] // 2 * 2
        torch.manual_seed(1)
        logits, loss = engine(ids)
        engine.backward(engine.criterion(logits, target) + 0.01 * loss)
        found.append(torch.rand(()).item())
        engine.step()
    model = engine.model
    return model.calls, len(model.kept), float(model.total), bool(model.zero.any()), found


def test_ranks_whose_graphs_differ_try_together_and_leave_no_trace():
    torch.manual_seed(1)
    drawn = torch.rand(()).item()
    assert run_ranks(meet_experts, 2) == [(2, 2, 2.0, False, [drawn, drawn])] * 2


def evaluate_first(rank, world_size):
    """The first data rank evaluates before any update; the other has no batch. Then the sizes of the groups over which
    large tensors are summed in an update."""
    engine = make_engine(make_gpt, 2, timeout=30.0)
    if engine.context.dp_rank == 0:
        with torch.no_grad():
            assert engine.eval()(tokens(0)[0]).shape[1] == LENGTH
    engine.train()
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        engine.backward(plain_step(engine, 0))
        engine.step()
    return [call.kwargs["group"].size() for call in sums.mock_calls if call.args[0].numel() > 100]


def test_a_trial_waits_for_the_ranks_of_its_batch_only_and_gradients_are_reduced_once():
    assert run_ranks(evaluate_first, 4) == [[4]] * 4


def sent_by(rank, world_size, heads, kv_heads):
    """The bytes that this rank gives to all-to-alls and all-gathers of attention, in those of its queries; and what is
    said of other shapes."""
    attention, own = partial(attend, dist.group.WORLD, F.scaled_dot_product_attention), 4
    q, k, v = (here(torch.randn(ROWS, n, own, 4)) for n in (heads, kv_heads, kv_heads))
    with (
        patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged,
        patch.object(collectives, "all_gather", wraps=collectives.all_gather) as gathered,
    ):
        attention(q, k, v, is_causal=True, enable_gqa=True)
    sent = [[call.args[1].nbytes / q.nbytes for call in calls.mock_calls] for calls in (exchanged, gathered)]
    mask = here(torch.ones(own, own, dtype=torch.bool))
    wrong = [(q[:, :, :1], k, v), (q[:, 0], k[:, 0], v[:, 0]), (q, k, v, mask)]
    said = [rejection(lambda x=x: attention(*x)) for x in wrong]
    return sent, said


@pytest.mark.parametrize(
    ("heads", "kv_heads", "exchanged", "gathered"),
    [
        pytest.param(8, 2, [1, 0.5, 0.5, 1], [], id="heads are exchanged; a key-value head is for two ranks"),
        pytest.param(6, 2, [0.5, 0.5], [1 / 3, 1 / 3], id="half of the queries are exchanged"),
    ],
)
def test_what_attention_sends_and_rejects(heads, kv_heads, exchanged, gathered):
    for sent, said in run_ranks(sent_by, 4, heads, kv_heads):
        assert sent == [exchanged, gathered]
        assert all("q, k and v must be [batch, heads, tokens, features] for this" in text for text in said)
        assert "a mask [..., 16, 16] or [..., 1, 16]" in said[-1]


SMALL = partial(make_gpt, depth=1, width=8, num_heads=2)


def weights():
    return here(torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.5)


def summed(output, target):
    return criterion(output, target, reduction="sum"), (target != -100).sum()


def entropy_without_ones(output, target):
    return criterion(output, target.masked_fill(target == -100, -1), ignore_index=-1)


def flat(engine, ids, target):
    return engine.criterion(engine(ids).flatten(0, 1), target.flatten())


def plain(engine, ids, target):
    return engine.criterion(engine(ids), target)


def summed_where(output, target, mask):
    losses = criterion(output, target.clamp_min(0), reduction="none").view_as(target)
    return (losses * mask).sum(), mask.sum()


def with_a_prompt(engine, ids, target):
    mask = here(torch.ones(target.shape))
    mask[:, :10] = 0
    return engine.criterion(engine(ids), target, mask)


RIGHT = {
    "class weights": (lambda o, t: criterion(o, t, weight=weights(), label_smoothing=0.1), plain, "mean"),
    "another index that does not count": (entropy_without_ones, plain, "mean"),
    "log-likelihood": (lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten()), plain, "mean"),
    "a sum": (lambda o, t: criterion(o, t, reduction="sum") / 20, plain, "sum"),
    "weighted": (summed, plain, "weighted"),
    "a prompt that does not count": (summed_where, with_a_prompt, "weighted"),
    "flat tensors": (F.cross_entropy, flat, "mean"),
}


def update_each(rank, world_size):
    """For each criterion the loss and the norms of the weights after an update."""
    found = {}
    for name, (loss_of, step, reduction) in RIGHT.items():
        engine = make_engine(SMALL, world_size, loss_of, loss_reduction=reduction)
        loss = step(engine, *tokens(uneven=True))
        engine.backward(loss)
        engine.step()
        numbers = [float(torch.as_tensor(part).detach()) for part in (loss if isinstance(loss, tuple) else (loss,))]
        found[name] = numbers, torch.cat([w.flatten() for w in close_whole(engine).values()])
    half = partial(criterion, weight=weights().bfloat16())
    engine = make_engine(SMALL, world_size, half, bf16={"mode": "torch"})
    return found, float(plain(engine, *tokens(uneven=True)).detach())


def test_losses_are_those_of_one_process():
    expected, expected_half = update_each(0, 1)
    for found, half in run_ranks(update_each, 2):
        assert half == pytest.approx(expected_half, rel=2e-2), "tried with weights in half precision"
        for name, (loss, new) in expected.items():
            assert found[name][0] == pytest.approx(loss, rel=1e-5), name
            torch.testing.assert_close(found[name][1], new, rtol=0, atol=2e-6, msg=name)
