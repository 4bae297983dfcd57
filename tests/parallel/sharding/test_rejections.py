"""What fsdp rejects: keys that cannot work, and what FSDP2 would not hear of or could not sum."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import halfmesh
from halfmesh.compat import check, raise_for
from halfmesh.errors import IncompatibleConfigError
from tests.parallel.sharding.runs import Blocks, Net, batch, make_engine, take_step
from tests.support.models import said, sgd
from tests.support.ranks import run_ranks

PIPELINE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
REJECTED = [
    ({"compile": {"scope": "model"}}, {}, "which gathers the weights of each block between graphs"),
    (
        {"compile": {"scope": "model"}},
        {"strategy": "zero1", "overlap_param_gather": True},
        "overlap_param_gather: a model that is compiled as a whole needs all weights",
    ),
    ({"activation_offload": True}, {}, "would also offload gathered weights"),
    ({"fp16": {"mode": "naive"}}, {"buffer_dtype": "float32"}, "'float32' is not float16, in which the mode computes"),
    ({}, {"hybrid": 2, "separate_reduce_group": True}, "separate_reduce_group: hybrid makes its own groups"),
    (PIPELINE, {"output_dtype": "float32"}, "FSDP2 does not support this under a pipeline"),
    (PIPELINE, {"prefetch": 2}, "FSDP2 does not support this under a pipeline"),
]


@pytest.mark.parametrize(("config", "data", "words"), REJECTED)
def test_keys_that_cannot_work(config, data, words):
    parallel = config.get("parallel", {}) | {"data": {"strategy": "fsdp", **data}}
    loaded = halfmesh.load_config(config | {"parallel": parallel})
    with pytest.raises(IncompatibleConfigError, match=words):
        raise_for(check(loaded, 8 if "pipeline" in parallel else 4, "cpu"))


def hook_before(rank):
    model = Net()
    model.end.weight.register_hook(lambda grad: grad * 2)
    take_step(make_engine("fsdp", model=model), rank, 0)


def backward_outside(rank):
    engine, x = make_engine("fsdp", model=Net()), batch(rank, 0)[0]
    engine.backward(engine(x).square().mean())
    engine.model(x).square().mean().backward()
    engine.step()


def ended_too_early(rank):
    engine = make_engine("fsdp", model=Net(), gradient_accumulation=2)
    take_step(engine, rank, 0)
    engine.step(last=True)


def after_a_failed_backward(rank):
    engine, (x, y) = make_engine("fsdp", model=Net()), batch(rank, 0)
    loss = engine.criterion(engine(x), y)
    handle = loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    handle.remove()
    take_step(engine, rank, 0)


def used_by_the_criterion(rank):
    model = Blocks()

    def criterion(output, labels):
        return F.cross_entropy(output @ model.blocks[0][0].weight[:4, :4], labels)

    take_step(make_engine("fsdp", model=model, criterion=criterion), rank, 0)


def hidden_in_an_object(rank):
    model = Net()
    model.blocks[1].register_forward_hook(lambda module, args, output: SimpleNamespace(logits=output))
    model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].logits, *args[1:]))
    take_step(make_engine("fsdp", model=model), rank, 0)


def with_new_memory(rank):
    engine = make_engine("fsdp", sgd, model=Net())
    take_step(engine, rank, 0)
    weight = engine.model.blocks[1].one.weight
    weight.data = torch.zeros_like(weight.data)
    return engine


NEW_MEMORY = "blocks.1.one.weight got new memory, which FSDP2 does not use"
IN_THE_LOOP = {
    "hook": (hook_before, "FSDP2 never calls the hooks on the gradient of end.weight; use data='zero1'"),
    "backward outside": (backward_outside, "a backward outside this engine"),
    "too early": (ended_too_early, "ended the cycle, loop over engine.dataloader"),
    "failed": (after_a_failed_backward, "gradients were dropped before the update; some ranks may have summed them"),
    "criterion": (used_by_the_criterion, "weights were used outside the forward of their module"),
    "object": (hidden_in_an_object, "a module returns tensors inside an object"),
    "memory": (lambda rank: take_step(with_new_memory(rank), rank, 0), NEW_MEMORY),
    "memory, in a state": (lambda rank: with_new_memory(rank).full_state_dict(), NEW_MEMORY),
}


def each_mistake(rank, world_size):
    return {name: said(make, rank) for name, (make, _) in IN_THE_LOOP.items()}


@pytest.mark.distributed
def test_mistakes_in_the_loop():
    for found in run_ranks(each_mistake, 2, timeout=90):
        for name, (_, message) in IN_THE_LOOP.items():
            assert message in found[name], name
