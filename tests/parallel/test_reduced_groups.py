"""Buckets whose gradients are summed over fewer ranks than those whose losses are averaged, as those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh import ParallelContext
from halfmesh.parallel.data_strategy import DataStrategy, StrategyInputs
from halfmesh.parallel.dims import ParallelDims
from halfmesh.parallel.reducer import ReduceOptions
from halfmesh.parallel.sharding.zero1 import Zero1
from halfmesh.utils.param_shard import ParamShard, clear_grads
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.distributed
RANKS = 4
STRATEGIES = {"replicate": DataStrategy, "zero1": Zero1}
ONCE, TWICE = (False, True), (True, True)  # whether gradients are reduced after each microbatch
UPDATES = ((ONCE, (0, 1, 2, 3)), (ONCE, (0,)), (ONCE, ()), (TWICE, (0, 1, 2, 3)), (ONCE, (1, 3)))
"""When gradients are reduced, and which ranks use their expert."""


class Layers(nn.Module):
    """A layer that all ranks have, and one of several experts."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(5)
        self.dense = nn.Linear(5, 3)
        experts = [nn.Linear(3, 7) for _ in range(RANKS)]
        self.expert = experts[expert]
        self.last = nn.Linear(3, 1)
        self.double()

    def forward(self, x: torch.Tensor, uses_expert: bool) -> torch.Tensor:
        hidden = self.dense(self.norm(x))
        out = self.last(hidden).sum() + hidden.square().sum()
        return out + self.expert(hidden).square().sum() if uses_expert else out


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """A parameter without a gradient stays as it is, one with a gradient of zero decays."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def batches(rank: int) -> Iterator[tuple[list[torch.Tensor], tuple[bool, bool], tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(rank)
    for reduces, users in UPDATES:
        draw = [torch.randn(4, 5, dtype=torch.float64, generator=generator) for _ in range(2)]
        yield draw, reduces, users


def train(rank: int, world_size: int, strategy: str, mean: bool, experts: int, bucket_bytes: int) -> dict[str, Any]:
    context = ParallelContext(ParallelDims(RANKS, {"pp": 1, "dp": RANKS, "tp": 1}), rank_device())
    context.split("dp", {"edp": RANKS // experts, "ep": experts})
    model = Layers(context.coordinate("ep"))
    optimizer = sgd(model)
    own = dict.fromkeys(model.expert.parameters(), ("edp",))
    copies = {param: RANKS // experts if param in own else RANKS for param in model.parameters()}
    sent: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        inner = dist.all_reduce

        def all_reduce(flat: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            sent.append((group.size(), flat.numel()))
            return inner(flat, *args, group=group, **options)

        patch.setattr(dist, "all_reduce", all_reduce)
        data = STRATEGIES[strategy](
            StrategyInputs(
                model=model,
                optimizer=optimizer,
                shards=[ParamShard(name, param, 1 / copies[param]) for name, param in model.named_parameters()],
                context=context,
                options=SimpleNamespace(strategy=strategy),
                reduce=ReduceOptions(bucket_bytes=bucket_bytes, mean=mean),
                param_dtype=None,
                casts={},
                blocks=(),
                not_called=None,
                kept=(),
                tied=(),
                outside=(),
                make=lambda module: None,
                fewer_axes=own,
            )
        )
        reducer = data.make_reducer(data.shards, dict(model.named_buffers()), withholds=False)
        for microbatches, reduces, users in batches(rank):
            for x, last in zip(microbatches, reduces, strict=True):
                reducer.open(last)
                model(here(x), rank in users).backward()
                if last:
                    reducer.finish()
            optimizer.step()
            if data.publisher is not None:
                with torch.no_grad():
                    data.publisher.stepped([shard for shard in data.shards if shard.param.grad is not None])
                    data.publisher.finish()
            clear_grads([shard.param for shard in data.shards] + list(model.parameters()))
            reducer.forget()
        reducer.close()
    weighed = context.all_reduce(here(torch.tensor(sum(shard.weight * shard.param.numel() for shard in data.shards))))
    found = {"state": model.state_dict(), "elements": weighed.item(), "sent": sent}
    context.close()
    return found


def in_one_process(mean: bool, experts: int) -> list[dict[str, torch.Tensor]]:
    """The states of the models with each expert, whose common parameters are one."""
    models = [Layers(expert) for expert in range(experts)]
    for model in models[1:]:
        model.norm, model.dense, model.last = models[0].norm, models[0].dense, models[0].last
    params = dict.fromkeys(param for model in models for param in model.parameters())
    optimizer = sgd(nn.ParameterList(params))
    norm, means = models[0].norm, []
    for update in zip(*map(batches, range(RANKS)), strict=True):
        statistics = [tensor.clone() for tensor in (norm.running_mean, norm.running_var)]
        means = []
        for rank, (microbatches, _, users) in enumerate(update):
            norm.running_mean.copy_(statistics[0])
            norm.running_var.copy_(statistics[1])
            for x in microbatches:
                (models[rank % experts](x, rank in users) / (RANKS if mean else 1)).backward()
            means.append((norm.running_mean.clone(), norm.running_var.clone()))
        norm.running_mean.copy_(sum(mean for mean, _ in means) / RANKS)
        norm.running_var.copy_(sum(var for _, var in means) / RANKS)
        for param in nn.ModuleList(model.expert for model in models).parameters():
            if param.grad is not None:
                param.grad *= experts  # gradients of few ranks stand for those of all
        optimizer.step()
        optimizer.zero_grad()
    return [model.state_dict() for model in models]


@pytest.mark.promise("gradients of a weight are reduced once")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("mean", "experts", "bucket_bytes"), [(True, 2, 1), (False, 2, 10**6), (True, 4, 200)])
def test_gradients_summed_over_fewer_ranks_are_those_of_one_process(strategy, mean, experts, bucket_bytes):
    expected = in_one_process(mean, experts)
    once = Layers(0)
    numel = sum(param.numel() for param in once.parameters())
    expert = sum(param.numel() for param in once.expert.parameters())
    for rank, found in enumerate(run_ranks(train, RANKS, strategy, mean, experts, bucket_bytes)):
        wanted, state = expected[rank % experts], found["state"]
        for name in wanted:
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(state[name], wanted[name], rtol=1e-12, atol=1e-12, msg=f"{rank}: {name}")
        assert round(found["elements"], 9) == numel + (experts - 1) * expert, "each element counts once"
        sizes = {size for size, _ in found["sent"]}
        assert sizes == ({RANKS, RANKS // experts} - {1}), "one rank sends nothing"
