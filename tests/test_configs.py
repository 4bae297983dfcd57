"""Each file in configs/ loads, can run, says what its name says, and explains itself."""

from pathlib import Path

import pytest
import torch

from halfmesh.amp.plugin import AMP_PLUGINS
from halfmesh.compat import Layout, check, get_layout
from halfmesh.config.load import load_config

FOLDER = Path(__file__).resolve().parents[1] / "configs"
PRECISIONS = {
    "fp32": (None, None),
    "torch_fp16": ("torch", "float16"),
    "torch_bf16": ("torch", "bfloat16"),
    "naive_fp16": ("naive", "float16"),
    "naive_bf16": ("naive", "bfloat16"),
}
APEX = {f"apex_o{level}": ("apex", "float16") for level in range(4)}
EXPECTED = {
    "base": (None, None),
    **PRECISIONS,
    **APEX,
    **{f"{layout}_{name}": expected for layout in ("tensor", "data_tensor") for name, expected in PRECISIONS.items()},
    "accumulation_clipping": ("naive", "float16"),
    "vit_base_caltech101": ("naive", "float16"),
}
# What the examples read.
CONSTANTS = {"NUM_EPOCHS", "BATCH_SIZE", "LEARNING_RATE", "WARMUP_EPOCHS", "WEIGHT_DECAY", "ADAM_EPS"}


def load(name):
    return load_config(FOLDER / f"{name}.py")


def test_every_file_is_tested():
    assert {path.stem for path in FOLDER.iterdir() if path.suffix} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_config(name):
    config = load(name)
    mode = config.precision.mode if config.precision else None
    assert (mode, config.precision_dtype) == EXPECTED[name]
    assert set(config.user) == CONSTANTS
    assert config.WARMUP_EPOCHS < config.NUM_EPOCHS
    ranks = 4 if name.startswith("data_tensor_") else 8
    for device in ("cpu", "cuda"):
        assert check(config, ranks, device) == []
    assert (FOLDER / f"{name}.py").read_text().startswith('"""')


@pytest.mark.parametrize("name", [*PRECISIONS, *APEX])
def test_only_the_precision_differs(name):
    changed = load(name).to_dict()
    assert {key for key in changed if key.islower()} <= {"fp16", "bf16"}
    expected = load("base").to_dict() | ({"ADAM_EPS": 1e-4} if name == "apex_o3" else {})
    assert {key: changed[key] for key in CONSTANTS} == expected


@pytest.mark.parametrize("name", PRECISIONS)
def test_layouts_of_a_precision(name):
    """Each adds a layout to the precision's own config, the same for all precisions, and nothing else."""
    alone, tensor, both = load(name), load(f"tensor_{name}"), load(f"data_tensor_{name}")
    for config in (tensor, both):
        assert {k: v for k, v in config.to_dict().items() if k != "parallel"} == alone.to_dict()
    assert [get_layout(tensor, ranks) for ranks in (2, 4)] == [Layout(1, 1, 2), Layout(1, 2, 2)]
    assert not tensor.parallel.tensor.sequence_parallel
    assert get_layout(both, 4) == Layout(1, 2, 2)
    assert both.parallel.tensor.sequence_parallel
    assert both.parallel.data.reduce_dtype == "float32"
    [finding] = check(both, 8)
    assert finding.where == "parallel.data.size"


@pytest.mark.parametrize("level", range(4))
def test_apex_levels(level):
    assert load(f"apex_o{level}").fp16.options.opt_level == f"O{level}"


def test_accumulation_keeps_the_batch_of_an_update():
    config, base = load("accumulation_clipping"), load("base")
    assert config.BATCH_SIZE * config.gradient_accumulation == base.BATCH_SIZE
    assert (config.gradient_accumulation, config.clip_grad_norm.max_norm) == (4, 1.0)
    assert config.fp16 == load("naive_fp16").fp16


@pytest.mark.parametrize("name", ["torch_fp16", "naive_fp16"])
def test_the_scale_can_grow_within_the_demo(name):
    """The demo makes 22 updates an epoch on 2 ranks; its picture is to show a scale that falls and grows."""
    config = load(name)
    plugin = AMP_PLUGINS.get(config.fp16.mode)
    assert plugin.recipe(config.fp16.options, torch.float16).loss_scale.growth_interval < config.NUM_EPOCHS * 22 / 2
