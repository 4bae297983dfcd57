"""A third party's mode or data strategy: registered, it is validated, and it is what runs."""

from __future__ import annotations

import pytest
import torch

from halfmesh.amp.plugin import AMP_PLUGINS, AMPPlugin, Composes
from halfmesh.amp.recipe import LossScale, Recipe
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError
from halfmesh.options import Options, PositiveFloat
from halfmesh.parallel.data_strategy import DataStrategy
from halfmesh.parallel.reducer import Reducer
from halfmesh.parallel.registries import DATA_STRATEGIES
from tests.support.models import TOLERANCES, difference, full_weights, make_engine, make_loader, reference, train
from tests.support.ranks import run_ranks


class HalfwayOptions(Options):
    start_scale: PositiveFloat = 4.0
    keep: tuple[str, ...] = ()


@pytest.fixture
def halfway():
    @AMP_PLUGINS.register("halfway")
    class Halfway(AMPPlugin):
        options = HalfwayOptions
        composes = Composes(
            parallel=frozenset({"tensor", "replicate"}),
            why_not={"pipeline": "halfway has no boundary dtype; use mode='torch'"},
        )
        scale_keys = frozenset({"start_scale"})

        @classmethod
        def recipe(cls, options, dtype):
            return Recipe(compute_dtype=dtype, autocast=True, loss_scale=LossScale(initial=options.start_scale))

    yield Halfway
    AMP_PLUGINS.unregister("halfway")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"mode": "halfway", "strat_scale": 2}}, "fp16.strat_scale: unknown key; did you mean 'start_scale'"),
        ({"bf16": {"mode": "halfway", "start_scale": 2}}, "bf16.start_scale: bf16 has the range of fp32"),
        ({"start_scale": 2}, "start_scale: unknown key; it belongs at 'fp16.start_scale'"),
        ({"fp16": {"mode": "halfwya"}}, "mode='halfwya' is not a registered mode; .* did you mean 'halfway'"),
    ],
)
def test_its_keys_are_validated(halfway, config, message):
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_it_trains(halfway):
    engine = make_engine({"fp16": {"mode": "Halfway", "start_scale": 64}})
    assert engine(next(iter(engine.dataloader))[0]).dtype == torch.float16
    assert {result.loss_scale for result in train(engine)} == {64.0}
    assert difference(full_weights(engine), reference(make_loader())) < TOLERANCES["torch_fp16"]


def test_a_plugin_without_a_recipe(halfway, monkeypatch):
    monkeypatch.setattr(halfway, "recipe", lambda *_: None)
    with pytest.raises(TypeError, match=r"Halfway.recipe returned None, but it must return a halfmesh.Recipe"):
        make_engine({"fp16": {"mode": "halfway"}})


def test_a_plugin_that_cannot_be_imported():
    AMP_PLUGINS.register_lazy("broken", "halfmesh_no_such_module:Broken")
    try:
        said = r"fp16: the AMP mode 'broken' is registered as .* which fails: ModuleNotFoundError: No module"
        with pytest.raises(ConfigError, match=said):
            load_config({"fp16": {"mode": "broken"}})
        with pytest.raises(ConfigError, match=r"sed: unknown key; did you mean 'seed'"):  # others are still told
            load_config({"sed": 3})
    finally:
        AMP_PLUGINS.unregister("broken")


def train_with_a_strategy_of_a_third_party(rank, world_size):
    class Logged(Reducer):
        opened = 0

        def open(self, last):
            Logged.opened += 1
            super().open(last)

    class Strategy(DataStrategy):
        def make_reducer(self, shards, buffers, withholds):
            return Logged(shards, buffers, self.inputs.context.dp_group, self.inputs.reduce)

    DATA_STRATEGIES.register("logged", Strategy)
    train(make_engine({"parallel": {"data": "logged"}}))
    return Logged.opened


@pytest.mark.distributed
def test_a_third_partys_data_strategy_is_the_one_that_runs():
    assert run_ranks(train_with_a_strategy_of_a_third_party, 2) == [3, 3]
