"""`parallel.context` through the engine: outputs, random numbers, weights, and what is kept and sent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import halfmesh
from halfmesh.hooks import ThroughputHook
from tests.support.ranks import here, run_ranks
from tests.support.saved_memory import bytes_left

from .runs import LENGTH, ROWS, make_engine, make_gpt, plain_step, tokens

pytestmark = pytest.mark.distributed


def outputs(rank, world_size):
    """In training, in evaluation, of a length that the ranks do not divide, the loss, and the FLOPs of an update."""
    engine = make_engine(make_gpt, world_size)
    ids, target = tokens()
    trained = engine(ids).detach()
    engine.eval()
    with torch.no_grad():
        whole = engine(ids)
        odd, loss = engine(ids[:, :15]), engine.criterion(whole, target).item()
    engine.close()
    engine, hook = make_engine(make_gpt, world_size), ThroughputHook()
    halfmesh.Trainer(engine).fit([tokens()] * 2, max_steps=2, hooks=[hook])
    return trained, whole, odd, loss, hook.flops


def test_outputs_are_this_ranks_tokens_in_training_and_whole_in_evaluation():
    _, expected, expected_odd, loss, flops = outputs(0, 1)
    for rank, (trained, whole, odd, found, counted) in enumerate(run_ranks(outputs, 2)):
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(odd, expected_odd, rtol=0, atol=1e-5)
        torch.testing.assert_close(trained, expected.chunk(2, 1)[rank], rtol=0, atol=1e-5)
        assert abs(found - loss) < 1e-5
        assert counted == flops, "of all ranks, without the trial"


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


def closed(rank, world_size, folder):
    engine = make_engine(make_gpt, world_size)
    engine.backward(plain_step(engine, 0))
    engine.step()
    engine.save(folder)
    engine.close()
    return here(engine.model)(tokens()[0]).detach()  # the user's model, whole


def test_the_model_stays_whole_and_checkpoints_load_in_one_process(tmp_path):
    one, other = run_ranks(closed, 2, tmp_path / "saved")
    assert torch.equal(one, other)
    engine = make_engine(make_gpt)
    engine.load(tmp_path / "saved")
    torch.testing.assert_close(engine.eval()(tokens()[0]), one, rtol=0, atol=1e-5)


def rounded(rank, world_size):
    """Products of fp32 may be rounded, as torch's settings say: the trial allows for it."""
    engine = make_engine(make_gpt, world_size)
    torch.backends.fp32_precision = "tf32"
    try:
        engine.backward(plain_step(engine, 0))
    finally:
        torch.backends.fp32_precision = "none"


def test_products_of_fp32_that_may_be_rounded():
    run_ranks(rounded, 2)


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
