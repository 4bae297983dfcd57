"""examples/plugin, a package with entry points: it joins, is checked, trains; and what a broken one does to others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from tests.support.example_runs import ROOT

PACKAGE = ROOT / "examples" / "plugin"
GROUPS = ("amp_plugins", "tensor_plans", "hooks")


def python(*args, path, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=200)


def add_package(site, name, entry_points):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


ANSWERS = """
import json, sys
import halfmesh
from halfmesh.compat import composition_table

def said(config):
    try:
        halfmesh.load_config(config)
    except halfmesh.ConfigError as error:
        return str(error)
    return "nothing"

def fit(hooks):
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    model = torch.nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)), batch_size=4)
    loss, config = torch.nn.CrossEntropyLoss(), {"fp16": {"mode": "torch"}}
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters()), loss, data, config, device="cpu")
    try:
        halfmesh.Trainer(engine).fit(epochs=1, hooks=hooks)
    except halfmesh.RegistryError as error:
        return str(error)
    return "nothing"
"""


def ask(code, path, tmp_path):
    done = python("-c", f"{ANSWERS}\nprint('=', json.dumps({code}))", path=path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("= ")[2])


def test_names_of_packages_are_registered_and_a_broken_one_breaks_nothing_else(tmp_path):
    entry_points = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    site = add_package(tmp_path / "site", "halfmesh_plugin_example", entry_points)
    add_package(site, "crashing", {f"halfmesh.{group}": {"crashes": "crashing:A"} for group in GROUPS})
    add_package(site, "numbers", {"halfmesh.amp_plugins": {"number": "numbered:number", "naive": "numbered:number"}})
    (site / "crashing.py").write_text("raise OSError('no licence')\n")
    (site / "numbered.py").write_text("number = 3\n")
    code = """[
        [sorted(halfmesh.AMP_PLUGINS.names()), "gated_mlp" in halfmesh.TENSOR_PLANS.names(),
         "skip_rate" in halfmesh.HOOKS.names(), "halfmesh_plugin_example" in sys.modules],
        composition_table()["keepnorm fp16"],
        said({"fp16": {"mode": "keepnorm", "initial_scal": 2}}),
        *(said({"fp16": {"mode": mode}}) for mode in ("keepnrom", "crashes", "number", "naive", "torch")),
        *(fit([hook]) for hook in ("skip_rate", "crashes", "memory")),
    ]"""
    found = ask(code, [site, PACKAGE / "src"], tmp_path)
    assert found[0] == [["apex", "crashes", "keepnorm", "naive", "number", "torch"], True, True, False], "not imported"
    assert {column for column, cell in found[1].items() if cell == "yes"} == {"tensor", "replicate"}
    assert "fp16.initial_scal: unknown key; did you mean 'initial_scale'?" in found[2]
    assert "did you mean 'keepnorm'" in found[3]
    words = "is registered as 'crashing:A' by the package 'crashing', which fails: OSError: no licence"
    assert words in found[4]
    assert "which fails: 3 is not a mode; expected a subclass of halfmesh.AMPPlugin" in found[5]
    assert found[6:9] == ["nothing"] * 3, "halfmesh's own names are not replaced"
    assert words in found[9]
    assert found[10] == "nothing"


@pytest.mark.slow
@pytest.mark.distributed
def test_installed_by_pip_it_works_and_its_own_tests_pass(tmp_path):
    if find_spec("pip") is None:
        pytest.skip("pip is not installed")
    source = shutil.copytree(PACKAGE, tmp_path / "source")  # pip writes into the folder that it builds
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = python(*pip, "--no-build-isolation", "--target", site, source, path=[], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", source / "tests", path=[site], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "23 passed" in done.stdout
