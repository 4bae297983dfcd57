"""Frozen weights and buffers under NAIVE come out as they went in: from close, state dicts, checkpoints and files."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.checkpoint_runs import LAYOUTS, Net, differing, make_engine, train, weights, whole_state
from tests.support.ranks import run_ranks

KEPT = ("frozen.weight", "frozen.bias", "steps")


def made_net(factor=1.0):
    model = Net()
    model.steps.copy_(torch.rand(3, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and "running" not in name:
                value.mul_(factor)
    return model


def engine_of(model, layout="one", mode="naive", **options):
    """The frozen layer is not in the optimizer: what is there has a master."""

    def optimizer(params):
        return torch.optim.AdamW([param for param in params if param.requires_grad], lr=0.01)

    return make_engine(layout, mode, model=model, optimizer=optimizer, **options)


def kept(state):
    return {name: state[name] for name in KEPT}


def ways(rank, world_size, layout, folder):
    """What is not given back as it came, and by what."""
    expected, wrong = kept(made_net().state_dict()), []
    engine = engine_of(made_net(), layout)
    train(engine, 2)
    engine.save(f"{folder}/saved")
    engine.save_weights(f"{folder}/w.pt", format="torch")
    wrong += [("file", name) for name in differing(kept(torch.load(f"{folder}/w.pt")), expected)]
    wrong += [("close", name) for name in differing(kept(whole_state(engine)), expected)]
    for load in ("load", "load_weights", "load_state_dict"):
        engine = engine_of(made_net(1.7), layout)
        if load != "load_state_dict":
            getattr(engine, load)(f"{folder}/saved" if load == "load" else f"{folder}/w.pt")
        elif "tensor" in LAYOUTS[layout][1] or "pipeline" in LAYOUTS[layout][1] or layout == "fsdp":
            continue
        else:
            engine.model.load_state_dict(torch.load(f"{folder}/w.pt"))
        train(engine, 1)
        wrong += [(load, name) for name in differing(kept(whole_state(engine)), expected)]
    return wrong


def test_in_one_process(tmp_path):
    assert ways(0, 1, "one", tmp_path) == []


@pytest.mark.promise("weights are not inherited; loading before wrapping; changed shapes")
@pytest.mark.distributed
@pytest.mark.sends  # whole weights go to the rank that writes them
@pytest.mark.parametrize(
    "layout", ["zero1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dp2", "fsdp", "tp2", "pp2"))]
)
def test_in_every_layout(layout, tmp_path):
    assert run_ranks(ways, 2, layout, str(tmp_path), timeout=100) == [[], []]


def test_what_others_write_is_kept():
    """Statistics, and a frozen layer that the loop changes; what it leaves alone is not rounded."""
    engine = engine_of(made_net())
    expected = made_net().frozen.weight.detach().clone()
    with torch.no_grad():
        engine.model.frozen.weight[3] += 1
    expected[3] = (expected.half() + 1)[3].float()
    train(engine, 1)
    assert engine.model.norm.running_mean.abs().sum() > 0
    state = weights(engine)
    assert torch.equal(state["norm.running_mean"], engine.model.norm.running_mean.float())
    assert torch.equal(state["frozen.weight"], expected)
    copied = copy.deepcopy(engine.model).state_dict()["frozen.weight"]  # a copy has what the model computes with
    assert torch.equal(copied, expected.half().float())


def test_a_layer_that_is_trained_later_begins_where_it_came_from():
    engine = engine_of(made_net())
    frozen = engine.model.frozen
    engine.optimizer.add_param_group({"params": list(frozen.requires_grad_().parameters()), "lr": 0.0})
    train(engine, 1)
    expected = kept(made_net().state_dict())
    (group,) = engine.optimizer.param_groups[1:]
    assert [torch.equal(each, expected[name]) for each, name in zip(group["params"], KEPT, strict=False)] == [True] * 2
    assert differing(kept(whole_state(engine)), expected) == []
