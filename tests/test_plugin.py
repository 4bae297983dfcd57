"""A third party's mode: registered or installed, it gets the validation, the check and the table without more work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh.amp.plugin import AMP_PLUGINS, AMPPlugin, Composes
from halfmesh.amp.recipe import LossScale, Recipe
from halfmesh.compat import check, composition_table
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError
from halfmesh.options import Options, PositiveFloat
from halfmesh.parallel.reducer import Reducer
from halfmesh.parallel.registries import DATA_STRATEGIES
from tests.support.models import (
    TOLERANCES,
    MatmulDtypes,
    difference,
    full_weights,
    make_engine,
    make_loader,
    reference,
    train,
)
from tests.support.ranks import run_ranks


class HalfwayOptions(Options):
    start_scale: PositiveFloat = 4.0
    keep: tuple[str, ...] = ()


@pytest.fixture
def halfway():
    @AMP_PLUGINS.register("halfway")
    class Halfway(AMPPlugin):
        options = HalfwayOptions
        composes = Composes(tensor=True, why_not={"pipeline": "halfway has no boundary dtype; use mode='torch'"})
        scale_keys = frozenset({"start_scale"})

        @classmethod
        def recipe(cls, options, dtype):
            return Recipe(compute_dtype=dtype, autocast=True, loss_scale=LossScale(initial=options.start_scale))

    yield Halfway
    AMP_PLUGINS.unregister("halfway")


def test_it_is_validated(halfway):
    config = load_config({"fp16": {"mode": "Halfway", "start_scale": 2}})
    assert config.fp16.mode == "halfway"
    assert config.fp16.options == HalfwayOptions(start_scale=2.0)
    with pytest.raises(ConfigError, match=r"fp16.strat_scale: unknown key; did you mean 'start_scale'"):
        load_config({"fp16": {"mode": "halfway", "strat_scale": 2}})
    with pytest.raises(ConfigError, match=r"bf16.start_scale: bf16 has the range of fp32, so the loss is not scaled"):
        load_config({"bf16": {"mode": "halfway", "start_scale": 2}})
    with pytest.raises(ConfigError, match=r"start_scale: unknown key; it belongs at 'fp16.start_scale'"):
        load_config({"start_scale": 2})
    with pytest.raises(ConfigError, match=r"mode='halfwya' is not a registered mode; .* did you mean 'halfway'"):
        load_config({"fp16": {"mode": "halfwya"}})


def test_it_trains(halfway):
    engine = make_engine({"fp16": {"mode": "halfway", "start_scale": 64}}, loader=make_loader(80))
    x, _ = next(iter(engine.dataloader))
    with MatmulDtypes() as seen:
        engine(x)
    assert seen.dtypes == {torch.float16}
    results = train(engine)
    assert {r.loss_scale for r in results} == {64.0}
    assert difference(full_weights(engine), reference(make_loader(80))) < TOLERANCES["torch_fp16"]


def test_plugins_that_are_not_whole(halfway, monkeypatch):
    with pytest.raises(TypeError, match=r"NoKeys.options is None, but it has to be a subclass of halfmesh.Options"):

        class NoKeys(AMPPlugin):
            @classmethod
            def recipe(cls, options, dtype):
                return Recipe()

    with pytest.raises(TypeError, match=r"NotAClassmethod.recipe\(cls, options, dtype\) has to be a classmethod"):

        class NotAClassmethod(AMPPlugin):
            options = HalfwayOptions

            def recipe(self, options, dtype):
                return Recipe()

    monkeypatch.setattr(halfway, "recipe", lambda *_: None)
    with pytest.raises(TypeError, match=r"Halfway.recipe returned None, but it has to return a halfmesh.Recipe"):
        make_engine({"fp16": {"mode": "halfway"}})


def strategy_of_a_third_party(rank: int, world_size: int) -> tuple[bool, float]:
    class Logged(Reducer):
        opened = 0

        def open(self, last):
            Logged.opened += 1
            super().open(last)

    DATA_STRATEGIES.register("logged", Logged)
    engine = make_engine({"parallel": {"data": "logged"}})
    train(engine)
    return type(engine._cycle.reducer) is Logged, Logged.opened


@pytest.mark.distributed
def test_a_third_partys_data_strategy_is_the_one_that_runs():
    assert run_ranks(strategy_of_a_third_party, 2) == [(True, 3)] * 2


def test_it_is_checked(halfway):
    config = load_config({"fp16": {"mode": "halfway"}, "parallel": {"pipeline": {"size": 2, "microbatches": 2}}})
    refused = [str(finding) for finding in check(config, 2) if finding.kind == "refused"]
    assert refused == ["halfway fp16 x pipeline: halfway has no boundary dtype; use mode='torch'"]


def test_it_is_in_the_table(halfway):
    row = composition_table()["halfway bf16"]
    assert (row["replicate"], row["pipeline"], row["zero1"]) == ("yes", "refused", "refused")
    assert row["tensor"] == composition_table()["torch bf16"]["tensor"]


def test_it_round_trips(halfway, tmp_path):
    config = load_config({"fp16": {"mode": "halfway", "start_scale": 2, "keep": ("a", "b")}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


def test_its_recipe_is_used(halfway):
    config = load_config({"fp16": {"mode": "halfway", "start_scale": 2}})
    recipe = AMP_PLUGINS.get(config.fp16.mode).recipe(config.fp16.options, torch.float16)
    assert recipe.loss_scale == LossScale(initial=2.0)


def test_a_plugin_that_cannot_be_imported():
    AMP_PLUGINS.register_lazy("broken", "halfmesh_no_such_module:Broken")
    try:
        with pytest.raises(
            ConfigError, match=r"fp16: the AMP mode 'broken' is registered as .*, which fails: No module"
        ):
            load_config({"fp16": {"mode": "broken"}})
        with pytest.raises(
            ConfigError, match=r"sed: unknown key; did you mean 'seed'"
        ):  # others' mistakes are still told
            load_config({"sed": 3})
    finally:
        AMP_PLUGINS.unregister("broken")


PACKAGE = """
from halfmesh.amp.plugin import AMPPlugin, Composes
from halfmesh.amp.recipe import FP32
from halfmesh.options import Options, PositiveInt

class InstalledOptions(Options):
    level: PositiveInt = 1

class Installed(AMPPlugin):
    options = InstalledOptions
    composes = Composes(dtypes=frozenset({"float16"}))

    @classmethod
    def recipe(cls, options, dtype):
        return FP32
"""


def test_an_installed_package_joins(tmp_path):
    info = tmp_path / "halfmesh_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halfmesh-installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[halfmesh.amp_plugins]\ninstalled = halfmesh_installed:Installed\n")
    (tmp_path / "halfmesh_installed.py").write_text(PACKAGE)
    (tmp_path / "config.py").write_text("fp16 = dict(mode='installed', levle=3)\nparallel = dict(tensor=2)\n")
    command = [sys.executable, "-m", "halfmesh.cli", "check", str(tmp_path / "config.py"), "--world-size", "2"]
    path = os.pathsep.join([str(tmp_path), str(Path(halfmesh.__path__[0]).parent)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "  - fp16.levle: unknown key; did you mean 'level'?" in done.stdout
    assert "  - installed fp16 x tensor: mode 'installed' does not work with tensor" in done.stdout
