"""Context ranks are data ranks of the weights: gradients are reduced once over both, and shards lie on both."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks

from .runs import make_engine, make_gpt, plain_step

pytestmark = pytest.mark.distributed


def count_reductions(rank, world_size):
    """The sizes of the groups over which tensors of more than 100 elements were summed in an update."""
    engine = make_engine(make_gpt, 2)
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        inner = dist.all_reduce

        def all_reduce(tensor, *args, **options):
            if tensor.numel() > 100:
                sent.append((options["group"].size(), tensor.numel()))
            return inner(tensor, *args, **options)

        patch.setattr(dist, "all_reduce", all_reduce)
        engine.backward(plain_step(engine, 0))
        engine.step()
    return sent, sum(param.numel() for param in engine.model.parameters())


def test_one_all_reduce_of_gradients_in_an_update():
    for sent, numel in run_ranks(count_reductions, 4):
        assert [size for size, _ in sent] == [4]
        assert numel <= sent[0][1] < 1.1 * numel  # and flags


def held(rank, world_size, strategy):
    """Elements that this rank steps, of those of the model."""
    engine = make_engine(make_gpt, world_size, parallel={"data": strategy})
    engine.backward(plain_step(engine, 0))
    engine.step()
    held = [param.to_local() if hasattr(param, "to_local") else param for param in engine.master_params()]
    return sum(param.numel() for param in held)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_context_ranks_shard_what_data_ranks_shard(strategy):
    total = sum(param.numel() for param in make_gpt().parameters())
    found = run_ranks(held, 2, strategy)
    assert sum(found) == pytest.approx(total, rel=0.01)
    assert max(found) < 0.55 * total
