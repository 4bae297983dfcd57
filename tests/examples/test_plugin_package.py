"""examples/plugin, a package with entry points: it joins, is checked, trains; and what a broken one does to others."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from importlib.util import find_spec

import pytest

from tests.support.example_runs import ROOT

PACKAGE = ROOT / "examples" / "plugin"
GROUPS = ("amp_plugins", "tensor_plans", "hooks")


def python(*args, path, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add_package(site, name, entry_points):
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    parser = ConfigParser()
    parser.read_dict(entry_points)
    with (info / "entry_points.txt").open("w") as file:
        parser.write(file)


QUESTIONS = """
import json, sys
import halfmesh
from halfmesh.compat import composition_table

def said(call, *args):
    try:
        call(*args)
    except (halfmesh.ConfigError, halfmesh.RegistryError) as error:
        return str(error)
    return "nothing"

def load(mode, **keys):
    halfmesh.load_config({"fp16": {"mode": mode, **keys}})

def fit(hook):
    import torch
    model, loss, config = torch.nn.Linear(4, 2), torch.nn.MSELoss(), {"fp16": {"mode": "torch"}}
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters()), loss, config=config, device="cpu")
    halfmesh.Trainer(engine).fit([(torch.randn(4, 4), torch.randn(4, 2))], epochs=1, hooks=[hook])

print(json.dumps([
    [sorted(halfmesh.AMP_PLUGINS.names()), "gated_mlp" in halfmesh.TENSOR_PLANS.names(),
     "skip_rate" in halfmesh.HOOKS.names(), "halfmesh_plugin_example" in sys.modules],
    composition_table()["keepnorm fp16"],
    said(lambda: load("keepnorm", initial_scal=2)),
    *(said(load, mode) for mode in ("keepnrom", "crashes", "number", "naive", "torch")),
    *(said(fit, hook) for hook in ("skip_rate", "crashes", "memory")),
]))
"""


def test_names_of_packages_are_registered_and_a_broken_one_breaks_nothing_else(tmp_path):
    site = tmp_path / "site"
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    add_package(site, "halfmesh_plugin_example", project["entry-points"])
    add_package(site, "crashing", {f"halfmesh.{group}": {"crashes": "crashing:A"} for group in GROUPS})
    add_package(site, "numbers", {"halfmesh.amp_plugins": {"number": "numbered:number", "naive": "numbered:number"}})
    (site / "crashing.py").write_text("raise OSError('no licence')\n")
    (site / "numbered.py").write_text("number = 3\n")
    printed = python("-c", QUESTIONS, path=[site, PACKAGE / "src"], cwd=tmp_path)
    names, cells, *said = json.loads(printed.splitlines()[-1])
    assert names == [["apex", "crashes", "keepnorm", "naive", "number", "torch"], True, True, False], "not imported"
    assert {column for column, cell in cells.items() if cell == "yes"} == {"tensor", "replicate"}
    crashes = "is registered as 'crashing:A' by the package 'crashing', which fails: OSError: no licence"
    words = ["fp16.initial_scal: unknown key; did you mean 'initial_scale'?", "did you mean 'keepnorm'", crashes]
    words += ["which fails: 3 is not a mode; expected a subclass of halfmesh.AMPPlugin"]
    words += ["nothing"] * 3 + [crashes, "nothing"]  # halfmesh's own names are not replaced
    assert [each in found for each, found in zip(words, said, strict=True)] == [True] * 9, said


@pytest.mark.slow
@pytest.mark.distributed
def test_installed_by_pip_it_works_and_its_own_tests_pass(tmp_path):
    if find_spec("pip") is None:
        pytest.skip("pip is not installed")
    source = shutil.copytree(PACKAGE, tmp_path / "source")  # pip writes into the folder that it builds
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    python(*pip, "--no-build-isolation", "--target", site, source, path=[], cwd=tmp_path)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", source / "tests"]
    assert "23 passed" in python(*tests, path=[site], cwd=tmp_path)
