"""What changes between the backwards of one update, or on one rank only: gradients must never carry two scales."""

import math

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError
from tests.support.models import MODES, make_engine
from tests.support.ranks import here, run_ranks

TWO_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2, "max_loss_scale": 256.0}}
O2_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2, "max_loss_scale": 256.0}}
CONFIGS = [MODES["none"], MODES["torch_fp16"], MODES["naive_fp16"], TWO_LOSSES, O2_LOSSES]
X = torch.ones(4)


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


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_parameters_are_added_or_exchanged_between_updates_only(config):
    """And what backward left in one before it was added does not count."""
    words = "parameters were added to the optimizer, or replaced, between backward and"
    engine = pair_engine(config)
    engine.backward(engine(X))
    engine.step()
    engine.backward(engine(X))
    engine.optimizer.add_param_group({"params": [engine.model.second]})
    with pytest.raises(InputError, match=words):
        engine.step()
    engine.backward(engine(X))  # a new update
    engine.step()
    assert engine.state_dict()["model"]["second"].tolist() == [-0.25] * 4
    exchanged = pair_engine(config)
    exchanged.backward(exchanged(X))
    exchanged.optimizer.param_groups[0]["params"][0] = exchanged.model.second  # which looks the same
    with pytest.raises(InputError, match=words):
        exchanged.step()


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_unscaled_gradients_of_two_losses(level):
    """Of fp32 parameters they are in `.grad`, as in apex after `scale_loss`; to change them there has its effect."""
    engine = pair_engine({"fp16": {"mode": "apex", "num_losses": 2, "opt_level": level}})
    engine.backward(engine(X), loss_id=1)
    engine.backward(engine(X), loss_id=0)
    if level == "O1":
        assert engine.model.first.grad.tolist() == [2.0] * 4
        engine.model.first.grad[0] = 0.0
    engine.step()
    assert engine.state_dict()["model"]["first"].tolist() == [0.0 if level == "O1" else -0.5, -0.5, -0.5, -0.5]


def one_sided(rank, world_size):
    """Loss 1 is used on rank 0 alone, and overflows in the second update."""
    results, x = [], here(X)
    for config in (TWO_LOSSES, O2_LOSSES):
        engine = pair_engine(config)
        scales = []
        for update in range(3):
            engine.backward(engine(x), loss_id=0)
            if rank == 0:
                engine.backward(engine(x) * (math.inf if update == 1 else 1.0), loss_id=1)
            step = engine.step()
            scales.append((step.skipped, step.loss_scale, engine.loss_scales))
        state = engine.state_dict()
        results.append((scales, state["update"]["scalers"], state["model"]["first"].tolist()))
        engine.close()
    return results


@pytest.mark.distributed
def test_a_loss_that_one_rank_uses_moves_the_scale_on_all():
    first, second = run_ranks(one_sided, 2)
    assert first == second
    for scales, _, weights in first:
        assert [both for _, _, both in scales] == [(256.0, 256.0), (256.0, 128.0), (256.0, 128.0)]
        assert weights == [-0.75] * 4  # two updates of 0.25 * (1 + 1 / 2)
