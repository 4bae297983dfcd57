"""`parallel.context` through the engine: outputs, random numbers, checkpoints, trials, and what is kept and sent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from halfmesh.parallel import collectives
from halfmesh.parallel.context.attention import attend
from tests.support.ranks import here, run_ranks
from tests.support.saved_memory import bytes_left
from tests.support.tensor_parity import rejection

from .runs import LENGTH, ROWS, make_engine, make_gpt, plain_step, tokens
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


# -- trials ------------------------------------------------------------------------------------------------------------


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
    engine, sent, inner = make_engine(make_gpt, 2, timeout=30.0), [], dist.all_reduce
    if engine.context.dp_rank == 0:
        with torch.no_grad():
            assert engine.eval()(tokens(0)[0]).shape[1] == LENGTH
    engine.train()

    def all_reduce(tensor, *args, **options):
        if tensor.numel() > 100:
            sent.append(options["group"].size())
        return inner(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        engine.backward(plain_step(engine, 0))
        engine.step()
    return sent


def test_a_trial_waits_for_the_ranks_of_its_batch_only_and_gradients_are_reduced_once():
    assert run_ranks(evaluate_first, 4) == [[4]] * 4


# -- what is kept and sent ---------------------------------------------------------------------------------------------


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        left = bytes_left(lambda: engine(ids))
        engine.backward(plain_step(engine, 0))
    return left, sum(sent), len(sent)


def test_activations_halve_and_attention_sends_what_it_should():
    whole, _, _ = saved_and_sent(0, 1)
    for left, sent, calls in run_ranks(saved_and_sent, 2):
        assert 0.45 < left / whole < 0.55
        depth, own = 2, ROWS * LENGTH // 2 * 16 * 4  # one activation of this rank: [2, 8, 16] in fp32
        assert calls == depth * 4 * 3  # q, k, v and the result, in two forwards and a backward
        assert sent == calls * own


def work(rank, world_size, heads, kv_heads):
    """The pairs of a query and a key that this rank computes for causal attention, and the bytes that it gives to
    all-to-alls and all-gathers; and what is said of other shapes."""
    own, pairs, sent = 4, [], {"all_to_all": [], "all_gather": []}
    q, k, v = (here(torch.randn(ROWS, n, own, 4)) for n in (heads, kv_heads, kv_heads))

    def attention(query, key, value, **options):
        queries, keys = query.shape[2], key.shape[2]
        pairs.append(query.shape[1] * (queries * keys - queries * (queries - 1) // 2))  # the last query sees all keys
        return F.scaled_dot_product_attention(query, key, value, **options)

    def counted(name, collective):
        def call(received, given, *args, **options):
            sent[name].append(given.numel() * given.element_size() / (q.numel() * q.element_size()))
            return collective(received, given, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted("all_to_all", dist.all_to_all_single))
        patch.setattr(collectives, "all_gather", counted("all_gather", collectives.all_gather))
        attend(dist.group.WORLD, attention, q, k, v, is_causal=True, enable_gqa=True)
    mask = here(torch.ones(own, own, dtype=torch.bool))
    wrong = [(q[:, :, :1], k, v), (q[:, 0], k[:, 0], v[:, 0]), (q, k, v, mask)]
    said = [rejection(lambda x=x: attend(dist.group.WORLD, attention, *x)) for x in wrong]
    return sum(pairs), sent["all_to_all"], sent["all_gather"], said


@pytest.mark.parametrize(
    ("heads", "kv_heads", "exchanged", "gathered"),
    [
        pytest.param(8, 2, [1, 0.5, 0.5, 1], [], id="heads are exchanged; a key-value head is for two ranks"),
        pytest.param(6, 2, [0.5, 0.5], [1 / 3, 1 / 3], id="half of the queries are exchanged"),
    ],
)
def test_causal_work_is_equal_on_all_ranks(heads, kv_heads, exchanged, gathered):
    """Bytes are in those of a rank's queries."""
    length = 16
    for pairs, *sent, said in run_ranks(work, 4, heads, kv_heads):
        assert pairs == heads * length * (length + 1) // 2 / 4
        assert sent == [exchanged, gathered]
        assert all("q, k and v must be [batch, heads, tokens, features] for this" in text for text in said)
        assert "a mask [..., 16, 16] or [..., 1, 16]" in said[-1]
