"""Each file in configs/ loads, can run, says what its name says, and explains itself."""

from pathlib import Path

import pytest

from halfmesh import load_config
from halfmesh.compat import Layout, check, get_layout

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
    for device in ("cpu", "cuda"):
        assert check(config, max(LAYOUTS[layout]) if layout else 8, device) == []
    assert (FOLDER / f"{name}.py").read_text().startswith('"""')


@pytest.mark.parametrize("name", [*PRECISIONS, *APEX])
def test_only_the_precision_differs(name):
    changed = load(name).to_dict()
    assert {key for key in changed if key.islower()} <= {"fp16", "bf16"}
    expected = load("base").to_dict() | ({"ADAM_EPS": 1e-4} if name == "apex_o3" else {})
    assert {key: changed[key] for key in CONSTANTS} == expected
    if name in APEX:
        assert load(name).fp16.options.opt_level == f"O{name[-1]}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_the_same_in_each_precision(layout):
    parallel = load(f"{layout}_fp32").parallel
    assert parallel.tensor.sequence_parallel == ("tensor" in layout and layout != "tensor")
    assert parallel.data.strategy == (layout if layout in ("zero1", "fsdp") else "replicate")
    assert parallel.pipeline.keep_outputs == (parallel.pipeline.size > 1), "train_vit.py measures training accuracy"
    stages = parallel.pipeline.size * parallel.pipeline.chunks
    assert stages == {"interleaved": 4}.get(layout, 2 if "pipeline" in layout else 1)
    for name in PRECISIONS:
        config = load(f"{layout}_{name}")
        assert {k: v for k, v in config.to_dict().items() if k != "parallel"} == load(name).to_dict()
        assert config.parallel == parallel
        for ranks in range(1, 9):
            findings = check(config, ranks, "cpu")
            assert {finding.where.partition(".")[0] for finding in findings} <= {"parallel"}
            assert (findings == []) == (ranks in LAYOUTS[layout])
            assert findings or get_layout(config, ranks) == LAYOUTS[layout][ranks]
