"""Each file in configs/ loads, can run, says what its name says, and explains itself."""

from pathlib import Path

import pytest
import torch

from halfmesh.amp.plugin import AMP_PLUGINS
from halfmesh.compat import Layout, check, get_layout
from halfmesh.config.load import load_config

FOLDER = Path(__file__).resolve().parents[2] / "configs"
PRECISIONS = {
    "fp32": (None, None),
    "torch_fp16": ("torch", "float16"),
    "torch_bf16": ("torch", "bfloat16"),
    "naive_fp16": ("naive", "float16"),
    "naive_bf16": ("naive", "bfloat16"),
}
APEX = {f"apex_o{level}": ("apex", "float16") for level in range(4)}
# The layout that each makes of so many ranks; up to 8 it fits no other number.
LAYOUTS = {
    "tensor": {2: Layout(1, 1, 2), 4: Layout(1, 2, 2), 6: Layout(1, 3, 2), 8: Layout(1, 4, 2)},
    "data_tensor": {4: Layout(1, 2, 2)},
    "pipeline": {2: Layout(2, 1, 1), 4: Layout(2, 2, 1), 6: Layout(2, 3, 1), 8: Layout(2, 4, 1)},
    "interleaved": {2: Layout(2, 1, 1), 4: Layout(2, 2, 1), 6: Layout(2, 3, 1), 8: Layout(2, 4, 1)},
    "pipeline_tensor": {4: Layout(2, 1, 2), 8: Layout(2, 2, 2)},
    "data_pipeline_tensor": {8: Layout(2, 2, 2)},
    "zero1": {ranks: Layout(1, ranks, 1) for ranks in range(1, 9)},
    "fsdp": {ranks: Layout(1, ranks, 1) for ranks in range(1, 9)},
}
EXPECTED = {
    "base": (None, None),
    **PRECISIONS,
    **APEX,
    **{f"{layout}_{name}": expected for layout in LAYOUTS for name, expected in PRECISIONS.items()},
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
    layout = next((layout for layout in LAYOUTS if name.removeprefix(f"{layout}_") in PRECISIONS), None)
    ranks = max(LAYOUTS[layout]) if layout else 8
    for device in ("cpu", "cuda"):
        assert check(config, ranks, device) == []
    assert (FOLDER / f"{name}.py").read_text().startswith('"""')


@pytest.mark.parametrize("name", [*PRECISIONS, *APEX])
def test_only_the_precision_differs(name):
    changed = load(name).to_dict()
    assert {key for key in changed if key.islower()} <= {"fp16", "bf16"}
    expected = load("base").to_dict() | ({"ADAM_EPS": 1e-4} if name == "apex_o3" else {})
    assert {key: changed[key] for key in CONSTANTS} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRECISIONS)
def test_layouts_of_a_precision(name, layout):
    """Each adds a layout to the precision's own config, the same for all precisions, and nothing else."""
    alone, config = load(name), load(f"{layout}_{name}")
    assert {k: v for k, v in config.to_dict().items() if k != "parallel"} == alone.to_dict()
    assert config.parallel == load(f"{layout}_fp32").parallel
    for ranks in range(1, 9):
        findings = check(config, ranks, "cpu")
        if ranks not in LAYOUTS[layout]:
            assert [finding.where.partition(".")[0] for finding in findings] == ["parallel"]
        else:
            assert findings == []
            assert get_layout(config, ranks) == LAYOUTS[layout][ranks]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_layout_says(layout):
    parallel = load(f"{layout}_fp32").parallel
    assert parallel.tensor.sequence_parallel == ("tensor" in layout and layout != "tensor")
    assert parallel.data.strategy == (layout if layout in ("zero1", "fsdp") else "replicate")
    assert parallel.pipeline.keep_outputs == (parallel.pipeline.size > 1), "train_vit.py measures training accuracy"
    stages = parallel.pipeline.size * parallel.pipeline.chunks
    assert stages == {"interleaved": 4}.get(layout, 2 if "pipeline" in layout else 1)
    assert parallel.data.reduce_dtype == "float32"


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
