"""The public surface: frozen, importable, and cheap to import."""

from __future__ import annotations

import ast
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

import halfmesh
from halfmesh.errors import ConfigError, HalfmeshError, IncompatibleConfigError

SURFACE = """
AMPPlugin AMP_PLUGINS AMP_TYPE AXES BlockPartition Call CheckpointError Composes Config ConfigError
CosineAnnealingWarmupLR DATA_STRATEGIES Diagnosis EXIT_PREEMPTED Engine HOOKS HalfmeshError Hook
IncompatibleConfigError InputError Launch LaunchError LayerPlan LinearWarmupLR LossScale MultiStepWarmupLR
NonFiniteError Options Outcome PARTITIONERS ParallelContext Piece PolynomialWarmupLR PrecisionReport Preempted Recipe
Registry RegistryError RunFolder SCHEDULES StepResult SyncError TENSOR_PLANS TENSOR_STYLES Trainer VerifyReport
__version__ compute_batch convert_to_amp deferred_init float_function get_dataloader get_default_parser get_logger
half_function initialize launch launch_from_openmpi launch_from_slurm launch_from_torch load_config model_creation
promote_function shard_dataloader verify write_report
"""


def test_the_surface_is_frozen():
    assert sorted(halfmesh.__all__) == sorted(SURFACE.split())
    assert dir(halfmesh) == sorted(SURFACE.split())
    assert all(getattr(halfmesh, name) is not None for name in SURFACE.split())


@pytest.mark.parametrize("used", ["halfmesh.hooks.MetricHook", "halfmesh.compat.check"])
def test_modules_that_are_used_by_their_names(used):
    code = f"import halfmesh; assert callable({used})"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


@pytest.mark.parametrize(
    "code",
    [
        "import halfmesh; verify = halfmesh.verify",
        "import halfmesh; from halfmesh.verify.report import VerifyReport; verify = halfmesh.verify",
        "import halfmesh.verify.report, halfmesh; verify = halfmesh.verify",
        "from halfmesh import verify; import halfmesh.verify.phases",
        "import halfmesh; first = halfmesh.verify; import halfmesh.verify.phases as phases; verify = halfmesh.verify; "
        "assert first is verify and verify.phases is phases",
    ],
)
def test_verify_is_called_by_the_name_of_its_package(code):
    call = "; print(verify({'fp16': {'mode': 'apex'}, 'parallel': {'tensor': 3}}, 'x:y', world_size=2).problems[0])"
    done = subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, timeout=120, check=True)
    assert "3 does not divide" in done.stdout


def test_unknown_names():
    with pytest.raises(
        AttributeError, match="module 'halfmesh' has no attribute 'intialize'; did you mean 'initialize'"
    ):
        _ = halfmesh.intialize


def test_importing_halfmesh_imports_nothing_heavy():
    code = (
        "import torch, sys; before = set(sys.modules); import halfmesh; new = set(sys.modules) - before; "
        "print(len([m for m in new if not m.startswith('halfmesh')]), 'pydantic' in new)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "False"]


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(halfmesh.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {node.module: {a.name for a in node.names} for node in block.body if isinstance(node, ast.ImportFrom)}
    assert seen == {module: set(names.split()) for module, names in halfmesh._NAMES.items()}


def test_the_names_are_known_without_the_source(tmp_path):
    """As in an image with .pyc files only."""
    source = Path(halfmesh.__file__)
    py_compile.compile(str(source), str(tmp_path / "halfmesh" / "__init__.pyc"), doraise=True)
    code = "import halfmesh; print(halfmesh.__file__.rpartition('.')[2], 'Engine' in halfmesh.__all__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pyc", "True"]


def test_a_config_error_has_all_problems_and_is_a_value_error():
    error = ConfigError(["a: wrong", "b: wrong"], "config.py")
    assert (error.problems, error.source) == (("a: wrong", "b: wrong"), "config.py")
    assert str(error) == "2 problems in config.py:\n  - a: wrong\n  - b: wrong"
    assert issubclass(IncompatibleConfigError, ConfigError)
    assert issubclass(ConfigError, (HalfmeshError, ValueError))
