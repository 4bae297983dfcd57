"""What changes between the backwards of one update, or on one rank only: gradients must never carry two scales."""

import math

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError
from tests.support.models import MODES, make_data, make_engine
from tests.support.ranks import run_ranks

TWO_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2, "max_loss_scale": 256.0}}
O2_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2, "max_loss_scale": 256.0}}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return ((self.first + self.second) * x).sum()


def pair_engine(config):
    """The optimizer holds `first`; a gradient of 1 moves it by 0.25."""
    model = Pair()
    return make_engine(config, model=model, optimizer=lambda _: optim.SGD([model.first], lr=0.25), criterion=None)


@pytest.mark.parametrize("config", [*MODES.values(), TWO_LOSSES, O2_LOSSES], ids=str)
def test_parameters_are_added_between_updates_only(config):
    engine = pair_engine(config)
    engine.backward(engine(torch.ones(4)))
    engine.optimizer.add_param_group({"params": [engine.model.second]})
    with pytest.raises(
        InputError, match="parameters were added to the optimizer, or exchanged, between backward and step"
    ):
        engine.step()
    engine.backward(engine(torch.ones(4)))  # a new update
    engine.step()
    assert engine.state_dict()["model"]["second"].tolist() == [-0.25] * 4


@pytest.mark.parametrize("config", [*MODES.values(), TWO_LOSSES, O2_LOSSES], ids=str)
def test_parameters_are_exchanged_between_updates_only(config):
    """Also for one that looks the same."""
    engine = pair_engine(config)
    engine.backward(engine(torch.ones(4)))
    engine.optimizer.param_groups[0]["params"][0] = engine.model.second
    with pytest.raises(InputError, match="parameters were added to the optimizer, or exchanged"):
        engine.step()


@pytest.mark.parametrize("config", [*MODES.values(), TWO_LOSSES, O2_LOSSES], ids=str)
def test_what_backward_left_in_a_parameter_before_it_was_added_does_not_count(config):
    engine = pair_engine(config)
    for _ in range(2):
        engine.backward(engine(torch.ones(4)))
        engine.step()
    engine.optimizer.add_param_group({"params": [engine.model.second]})
    engine.backward(engine(torch.ones(4)))
    engine.step()
    assert engine.state_dict()["model"]["second"].tolist() == [-0.25] * 4


@pytest.mark.parametrize(
    "config", [TWO_LOSSES, {"fp16": {"mode": "apex", "num_losses": 2, "opt_level": "O3"}}], ids=str
)
def test_unscaled_gradients_are_where_one_looks(config):
    """Of fp32 parameters, as in apex after `scale_loss`. To clear or change them there has its effect."""
    engine = pair_engine(config)
    fp32 = engine.model.first.dtype == torch.float32
    engine.backward(engine(torch.ones(4)), loss_id=1)
    engine.backward(engine(torch.ones(4)), loss_id=0)
    if fp32:
        assert engine.model.first.grad.tolist() == [2.0] * 4
        engine.model.first.grad[0] = 0.0
    engine.step()
    assert engine.state_dict()["model"]["first"].tolist() == [0.0 if fp32 else -0.5, -0.5, -0.5, -0.5]
    engine.backward(engine(torch.ones(4)), loss_id=1)
    if fp32:
        engine.model.zero_grad()
        engine.backward(engine(torch.ones(4)), loss_id=0)
        engine.step()
        assert engine.state_dict()["model"]["first"].tolist() == [-0.25, -0.75, -0.75, -0.75]


@pytest.mark.parametrize("mode", [{"mode": "naive"}, {"mode": "apex", "opt_level": "O2"}], ids=str)
@pytest.mark.parametrize("own_first", [True, False])
def test_the_cap_for_fp16_losses_reaches_gradients_that_are_there(mode, own_first):
    """A loss in fp32 and one that the model returned in fp16, in one update: both count once."""
    engine = pair_engine({"fp16": mode})
    x = torch.full((4,), 0.25)  # times 2**16 it still fits into fp16

    def own():
        engine.backward(engine(x))

    def fp32():
        engine.backward((engine.model.first.float() * x).sum())

    for each in (own, fp32) if own_first else (fp32, own):
        each()
    result = engine.step()
    assert (result.loss_scale, result.skipped) == (2.0**15, False)
    assert engine.state_dict()["model"]["first"].tolist() == [-0.125] * 4


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_static_scale_above_the_cap_is_refused_whatever_the_shape(shape):
    class Scalar(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum().reshape(shape)

    config = {"fp16": {"mode": "apex", "opt_level": "O3", "loss_scale": 2.0**16}}
    engine = make_engine(config, model=Scalar(8, 1), criterion=None, optimizer=lambda p: optim.SGD(p, lr=0.1))
    loss = engine(make_data(4)[0])
    engine(make_data(4)[0])  # another forward in between
    with pytest.raises(InputError, match="the static loss_scale 65536 cannot be used: the loss itself is fp16"):
        engine.backward(loss)


def exchanged(rank, world_size):
    """Between two updates one group's parameters give way to as many others, of the same shape."""
    results = []
    for config in ({}, TWO_LOSSES):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": list(layer.parameters())} for layer in model[:2]]
        engine = make_engine(config, model=model, optimizer=lambda _, g=groups: optim.SGD(g, lr=0.1), criterion=None)
        x = torch.full((2, 4), float(rank + 1))
        for update in range(3):
            if update == 1:
                engine.optimizer.param_groups[1]["params"] = list(model[2].parameters())
            engine.backward(engine(x).float().square().mean())
            engine.step()
        results.append({name: value.clone() for name, value in engine.state_dict()["model"].items()})
        engine.close()
    return results


@pytest.mark.distributed
def test_exchanged_parameters_are_reduced_and_unscaled():
    first, second = run_ranks(exchanged, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first[0], first[1], rtol=2e-3, atol=2e-3)


def one_sided(rank, world_size):
    """Loss 1 is used on rank 0 alone, and overflows in the second update."""
    results = []
    for config in (TWO_LOSSES, O2_LOSSES):
        engine = pair_engine(config)
        for update in range(3):
            engine.backward(engine(torch.ones(4)), loss_id=0)
            if rank == 0:
                engine.backward(engine(torch.ones(4)) * (math.inf if update == 1 else 1.0), loss_id=1)
            step = engine.step()
            results.append(
                (step.skipped, step.loss_scale, engine.loss_scales, engine.state_dict()["update"]["scalers"])
            )
        results.append(engine.state_dict()["model"]["first"].tolist())
        engine.close()
    return results


@pytest.mark.distributed
def test_a_loss_that_one_rank_uses_moves_the_scale_on_all():
    first, second = run_ranks(one_sided, 2)
    assert first == second
    assert [scales for _, _, scales, _ in first[:3]] == [(256.0, 256.0), (256.0, 128.0), (256.0, 128.0)]
    assert first[3] == first[7] == [-0.75] * 4  # two updates of 0.25 * (1 + 1 / 2)


def reduced(rank, world_size):
    """Unscaled gradients of 1e-7: fp16 rounds them to a multiple of 6e-8, or to zero when they are averaged."""
    weights = {}
    for dtype in ("float32", "bfloat16"):
        engine = pair_engine(O2_LOSSES | {"parallel": {"data": {"reduce_dtype": dtype}}})
        engine.backward(engine(torch.full((4,), 1e-2)) * 1e-6, loss_id=rank)
        engine.step()
        weights[dtype] = engine.state_dict()["model"]["first"][0].item()
        engine.close()
    return weights


@pytest.mark.distributed
def test_unscaled_fp16_gradients_are_reduced_in_a_wider_range():
    for weights in run_ranks(reduced, 2):
        assert weights["float32"] == pytest.approx(-0.25e-8, rel=2e-2)
        assert weights["bfloat16"] == pytest.approx(-0.25e-8, rel=2e-2)
