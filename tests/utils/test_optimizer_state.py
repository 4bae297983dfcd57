"""Optimizers inside an optimizer: saved where its state dict has their state, rejected by name where it has not."""

import pytest
import torch
from torch import optim

from halfmesh.errors import InputError
from halfmesh.utils.optimizer_state import change_state
from tests.support.checkpoint_runs import differing, make_engine, make_small, train, weights


class Container(optim.Optimizer):
    """Steps the optimizers that `parts` holds."""

    def __init__(self, parts, *optimizers):
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.parts, self._inner = parts, optimizers

    def step(self, closure=None):
        for inner in self._inner:
            inner.step()


def two(params):
    return optim.SGD(params[:4], lr=0.1, momentum=0.9), optim.AdamW(params[4:], lr=0.1)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda params: Container(list(both := two(params)), *both), "Container holds another optimizer, SGD"),
        (lambda params: Container({"b": [(both := two(params))[1]]}, both[1]), "Container holds .* AdamW"),
    ],
)
def test_state_that_would_be_lost_is_rejected_by_name(build, words, tmp_path):
    engine = make_engine("one", "naive", optimizer=lambda params: build(params))
    engine.save(tmp_path)  # nothing is lost yet
    train(engine, 1)
    for save in (lambda: engine.save(tmp_path), engine.state_dict):
        with pytest.raises(InputError, match=f"{words}, whose state would be lost: \\w+.state_dict.. leaves it out"):
            save()
    assert [path.name for path in tmp_path.glob("step*")] == ["step-00000000"]


class Sharing(Container):
    """Its state is that of the one inside, until torch's load_state_dict replaces it."""

    def __init__(self, params):
        super().__init__([inner := optim.AdamW(params, lr=0.1)], inner)
        self.state = inner.state


class Passing(Sharing):
    def load_state_dict(self, state):
        self.parts[0].load_state_dict(state)
        self.state, self.param_groups = self.parts[0].state, self.parts[0].param_groups


def test_shared_state_is_rejected_unless_loading_passes_it_on(tmp_path):
    train(engine := make_small(optimizer=Sharing), 1)
    with pytest.raises(InputError, match=r"Sharing holds another .*: Sharing.load_state_dict\(\) does not restore it"):
        engine.save(tmp_path)


def test_state_that_the_state_dict_has_comes_back(tmp_path):
    expected = train(engine := make_small(optimizer=Passing), 4, save_at=2, folder=tmp_path)[2:]
    other = make_small(optimizer=Passing, seed=1)
    other.load(tmp_path)
    assert train(other, 2) == expected
    assert differing(weights(other), weights(engine)) == []


def test_the_step_counter_of_a_scalar_parameter_is_no_value_of_it():
    param = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = optim.Adam([param])
    param.grad = torch.tensor(2.0)
    optimizer.step()
    change_state(optimizer, param, torch.zeros_like)
    found = {name: value.item() for name, value in optimizer.state[param].items()}
    assert found == {"step": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
