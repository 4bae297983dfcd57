"""examples/plugin, installed as users do: it joins, is checked, trains; and what a broken package does to others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.example_runs import ROOT
from tests.support.ranks import run_ranks

PACKAGE = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder into which pip has installed the package."""
    if find_spec("pip") is None:
        pytest.skip("pip is not installed")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(PACKAGE, folder / "source")  # pip writes into the folder that it builds
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(folder / "site"), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def python(*args: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, cwd=cwd, timeout=200
    )


def in_a_fresh_process(function: Any, *paths: Path) -> Any:
    """What `function` returns in a process that has not imported halfmesh, with packages in `paths`."""
    return run_ranks(with_packages, 1, function, [str(path) for path in paths], init=False)[0]


def with_packages(rank: int, world_size: int, function: Any, paths: list[str]) -> Any:
    assert "halfmesh" not in sys.modules
    sys.path[:0] = paths
    return function()


def look_around() -> dict[str, Any]:
    import halfmesh
    from halfmesh.compat import check, composition_table, render_table

    names = {
        "modes": halfmesh.AMP_PLUGINS.names(),
        "plans": halfmesh.TENSOR_PLANS.names(),
        "hooks": halfmesh.HOOKS.names(),
    }
    assert "halfmesh_plugin_example" not in sys.modules, "listing imports nothing"
    config = halfmesh.load_config({"fp16": {"mode": "keepnorm"}, "parallel": {"tensor": 2}})
    return names | {
        "row": composition_table()["keepnorm fp16"],
        "in the table": "| keepnorm bf16 | yes | **refused** | yes | **refused** | **refused** |" in render_table(),
        "allowed": check(config, 2, "cpu"),
        "misspelt": said({"fp16": {"mode": "keepnorm", "initial_scal": 2}}),
        "mode": said({"fp16": {"mode": "keepnrom"}}),
    }


def said(config: Any) -> str:
    """What a config is refused with, or "nothing"."""
    import halfmesh

    try:
        halfmesh.load_config(config)
    except halfmesh.ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_it_joins(installed):
    found = in_a_fresh_process(look_around, installed)
    assert found["modes"] == ["torch", "naive", "apex", "keepnorm"]
    assert "gated_mlp" in found["plans"]
    assert "skip_rate" in found["hooks"]
    assert found["row"] == {
        "tensor": "yes",
        "pipeline": "refused",
        "replicate": "yes",
        "zero1": "refused",
        "fsdp": "refused",
    }
    assert found["in the table"]
    assert found["allowed"] == []
    assert "fp16.initial_scal: unknown key; did you mean 'initial_scale'?" in found["misspelt"]
    assert "did you mean 'keepnorm'" in found["mode"]


def test_the_command_line_knows_it(installed, tmp_path):
    (tmp_path / "config.py").write_text('fp16 = dict(mode="keepnorm")\nparallel = dict(pipeline=2)\n')
    done = python("-m", "halfmesh.cli", "check", "config.py", "--world-size", "2", path=installed, cwd=tmp_path)
    assert done.returncode == 1
    assert "keepnorm fp16 x pipeline: keepnorm has not been tried with a pipeline; use mode='naive'" in done.stdout


def test_its_own_tests_pass(installed, tmp_path):
    """They train in one process, on two ranks with parity, and with the hook by its name."""
    tests = shutil.copytree(PACKAGE / "tests", tmp_path / "tests")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), path=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def add_package(folder: Path, name: str, content: str, *entry_points: tuple[str, str]) -> Path:
    """A package `name` of one module, with entry points (group, "name = Attribute")."""
    site = folder / name
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}_module.py").write_text(content)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, entry_point in entry_points:
        key, _, attribute = entry_point.partition(" = ")
        lines += [f"[halfmesh.{group}]", f"{key} = {name}_module:{attribute}"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


def use_beside_broken_ones() -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import halfmesh
    from halfmesh.compat import composition_table, render_table
    from halfmesh.parallel.tensor_checks import resolve

    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)), batch_size=4)
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), data, {})
    halfmesh.Trainer(engine).fit(epochs=1, hooks=["memory"])
    table = composition_table()
    found: dict[str, Any] = {
        "hook": hook_said("crashes"),
        "another kind": hook_said("number"),
        "mode": said({"fp16": {"mode": "crashes"}}),
        "no mode": said({"fp16": {"mode": "number"}}),
        "no recipe": said({"fp16": {"mode": "unfinished"}}),
        "no keys": said({"fp16": {"mode": "keyless"}}),
        "taken": said({"fp16": {"mode": "naive"}}),
        "other mode": said({"fp16": {"mode": "torch"}}),
        "cells": [table[f"{mode} fp16"]["replicate"] for mode in ("torch", "naive", "crashes")],
        "rows": len(render_table().splitlines()),
        "auto": resolve(layer, 2, "auto", False)[1],
        "by name": resolve(layer, 2, "crashes", False)[1],
        "no plan": resolve(layer, 2, "number", False)[1],
        "pieces": pieces_said(nn.Linear(2, 2)),
    }
    return found


def hook_said(name: str) -> str:
    import halfmesh
    from halfmesh.trainer.named_hooks import make_hooks

    try:
        make_hooks([name])
    except halfmesh.RegistryError as error:
        return str(error)
    return "nothing"


def pieces_said(model: Any) -> str:
    """What is said of a model that all partitioners were asked for."""
    import halfmesh
    from halfmesh.parallel.pipeline.partition import find_pieces

    try:
        find_pieces(model, "auto")
    except halfmesh.InputError as error:
        return str(error)
    return "nothing"


UNFINISHED = """
import halfmesh
class Unfinished(halfmesh.AMPPlugin):
    options = halfmesh.Options
number = 3
"""
KEYLESS = "import halfmesh\nclass Keyless(halfmesh.AMPPlugin):\n    pass\n"


@pytest.mark.distributed
def test_a_broken_package_is_named_where_it_is_used_and_breaks_nothing_else(tmp_path):
    groups = ("amp_plugins", "tensor_plans", "partitioners", "hooks")
    paths = [
        add_package(
            tmp_path, "crashing", "raise OSError('no licence')\n", *((group, "crashes = A") for group in groups)
        ),
        add_package(
            tmp_path,
            "unready",
            UNFINISHED,
            ("amp_plugins", "unfinished = Unfinished"),
            ("tensor_plans", "number = number"),
            ("hooks", "number = number"),
        ),
        add_package(tmp_path, "numbers", "number = 3\n", ("amp_plugins", "number = number")),
        add_package(tmp_path, "keyless", KEYLESS, ("amp_plugins", "keyless = Keyless")),
        add_package(tmp_path, "greedy", "A = 1\n", ("amp_plugins", "naive = A")),
    ]
    found = in_a_fresh_process(use_beside_broken_ones, *paths)
    broken = "is registered as '{0}_module:{1}' by the package '{0}', which fails: {2}"
    assert broken.format("crashing", "A", "OSError: no licence") in found["hook"]
    assert (
        broken.format("unready", "number", "3 makes no hook; expected a subclass of halfmesh.Hook")
        in (found["another kind"])
    )
    assert broken.format("crashing", "A", "OSError: no licence") in found["mode"]
    assert (
        broken.format("numbers", "number", "3 is no mode; expected a subclass of halfmesh.AMPPlugin")
        in (found["no mode"])
    )
    assert broken.format("unready", "Unfinished", "Unfinished has no recipe(cls, options, dtype)") in found["no recipe"]
    assert broken.format("keyless", "Keyless", "TypeError: Keyless.options is None") in found["no keys"]
    assert "already registered (halfmesh.amp.naive_amp:NaiveAMP), and entry point" in found["taken"]
    assert "'greedy_module:A' by the package 'greedy' has the same name" in found["taken"]
    assert found["other mode"] == "nothing"
    assert found["cells"] == ["yes", "refused", "refused"]
    assert found["rows"] == 2 + 1 + 2 * 7
    assert found["auto"] == []
    assert broken.format("crashing", "A", "OSError: no licence") in found["by name"][0]
    assert (
        broken.format("unready", "number", "3 is no tensor plan; expected a halfmesh.LayerPlan")
        in (found["no plan"][0])
    )
    assert found["pieces"] == "no partitioner knows Linear"
