"""What fsdp rejects: keys that cannot work, and what FSDP2 would not hear of or could not sum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.compat import check, raise_for
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.parallel.sharding.runs import Blocks, Net, batch, make_engine, take_step
from tests.support.models import said
from tests.support.ranks import run_ranks

PIPELINE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
REJECTED = [
    ({"compile": {"scope": "model"}}, {}, "gathers the weights of each block between graphs"),
    ({"activation_offload": True}, {}, "would also offload the gathered weights"),
    ({}, {"param_dtype": "bfloat16"}, "is not the dtype that the mode computes in"),
    ({"fp16": {"mode": "naive"}}, {"buffer_dtype": "float32"}, "is not the dtype that the mode computes in"),
    ({}, {"hybrid": 3}, "parallel.data.hybrid: 3 does not divide the 4 data ranks"),
    (PIPELINE, {"prefetch": 2}, "FSDP2 does not support this under a pipeline"),
    (PIPELINE, {"output_dtype": "float32"}, "FSDP2 does not support this under a pipeline"),
]


@pytest.mark.parametrize(("config", "data", "words"), REJECTED)
def test_keys_that_cannot_work(config, data, words):
    parallel = config.get("parallel", {}) | {"data": {"strategy": "fsdp", **data}}
    loaded = halfmesh.load_config(config | {"parallel": parallel})
    with pytest.raises(IncompatibleConfigError, match=words):
        raise_for(check(loaded, 8 if "pipeline" in parallel else 4, "cpu"))


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(12, 4, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.long() % 12)


class Wrapped:
    """An output that nobody knows how to look into."""

    def __init__(self, logits) -> None:
        self.logits = logits


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05)


def loop(engine, rank):
    take_step(engine, rank, 0)


def doubled(weight):
    weight.register_hook(lambda grad: grad * 2)


def hook_before(rank):
    model = Net()
    doubled(model.end.weight)
    return partial(loop, make_engine("fsdp", model=model), rank)


def hook_later(rank):
    engine = make_engine("fsdp", model=Net())
    loop(engine, rank)
    engine.model.to(engine.device)  # which changes nothing
    loop(engine, rank)
    doubled(engine.model.end.weight)
    return partial(loop, engine, rank)


def backward_outside(rank):
    engine = make_engine("fsdp", model=Net())
    x = batch(rank, 0)[0]
    engine.backward(engine(x).square().mean())
    engine.model(x).square().mean().backward()
    return engine.step


def frozen_by_the_given_object(rank):
    model = Net()
    given = next(model.parameters())
    engine = make_engine("fsdp", model=model)
    given.requires_grad_(False)
    return partial(loop, engine, rank)


def ended_too_early(rank):
    engine = make_engine("fsdp", model=Net(), gradient_accumulation=2)
    loop(engine, rank)
    return partial(engine.step, last=True)


def after_a_failed_backward(rank):
    engine = make_engine("fsdp", model=Net())
    x, y = batch(rank, 0)
    loss = engine.criterion(engine(x), y)
    handle = loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()
    return partial(loop, engine, rank)


def added_later(rank, new):
    """A layer that the optimizer holds later, by its new objects or by those that the model came with."""
    model = Blocks()
    before = list(model.end.parameters())
    engine = make_engine("fsdp", sgd_of_some, model=model)
    engine.optimizer.add_param_group({"params": list(model.end.parameters()) if new else before})
    return partial(loop, engine, rank)


def sgd_of_some(groups):
    return sgd([p for g in groups for p in g["params"]][:4])


def used_by_the_criterion(rank):
    model = Blocks()

    def criterion(output, labels):
        return F.cross_entropy(output @ model.blocks[0][0].weight[:4, :4], labels)

    return partial(loop, make_engine("fsdp", model=model, criterion=criterion), rank)


def sparse(rank):
    return partial(loop, make_engine("fsdp", sgd, model=Looked()), rank)


def hidden_in_an_object(rank):
    model = Net()
    model.blocks[1].register_forward_hook(lambda module, args, output: Wrapped(output))
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].logits, *args[1:]))
    return partial(loop, make_engine("fsdp", model=model), rank)


def penalty(rank):
    engine = make_engine("fsdp", model=Net())
    x = batch(rank, 0)[0].requires_grad_()
    output = engine(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return partial(engine.backward, output.square().mean() + grad.square().mean())


IN_THE_LOOP = {
    "hook before": (hook_before, "hooks were registered on the gradient of end.weight, which FSDP2 never"),
    "hook later": (hook_later, "hooks were registered on the gradient of end.weight"),
    "backward outside": (backward_outside, "a backward outside this engine"),
    "frozen": (frozen_by_the_given_object, "change it on those of engine.model"),
    "too early": (ended_too_early, "ended the cycle, loop over engine.dataloader"),
    "failed": (after_a_failed_backward, "gradients of an update were dropped before its end"),
    "added, new": (partial(added_later, new=True), "end.weight, end.bias joined the optimizer after initialize"),
    "added": (partial(added_later, new=False), "end.weight, end.bias joined the optimizer after initialize"),
    "criterion": (used_by_the_criterion, "weights were used outside the forward of their module (in the criterion"),
    "sparse": (sparse, "a gradient is sparse, which FSDP2 cannot sum"),
    "object": (hidden_in_an_object, "returns tensors inside an object that FSDP2 does not search: return tensors"),
    "penalty": (penalty, "the loss contains gradients"),
}


def each_mistake(rank, world_size):
    return {name: said(prepare(rank)) for name, (prepare, _) in IN_THE_LOOP.items()}


@pytest.mark.distributed
def test_mistakes_in_the_loop():
    for found in run_ranks(each_mistake, 2, timeout=90):
        for name, (_, message) in IN_THE_LOOP.items():
            assert message in found[name], name


def assigned(rank, world_size):
    """FSDP2 does not hear of new memory."""
    for new in (torch.zeros_like, lambda data: torch.zeros_like(data.to_local())):
        engine = make_engine("fsdp", sgd, model=Net())
        loop(engine, rank)
        weight = engine.model.blocks[1].one.weight
        weight.data = new(weight.data)
        for words, use in {"": partial(loop, engine, rank), "engine.full_state_dict: ": engine.full_state_dict}.items():
            with pytest.raises(InputError) as caught:
                use()
            assert str(caught.value).startswith(f"{words}blocks.1.one.weight got new memory")
            assert caught.value.__context__ is None, "said once"


@pytest.mark.distributed
def test_memory_that_is_assigned():
    run_ranks(assigned, 2)
