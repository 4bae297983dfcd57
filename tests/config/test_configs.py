"""Each file in configs/ loads, can run, says what its name says, and explains itself."""

from pathlib import Path

import pytest

from halfmesh import load_config
from halfmesh.compat import check, mesh_sizes

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Mode, dtype, and the pipeline, data and tensor ranks of 8.
EXPECTED = {
    "torch_bf16": ("torch", "bfloat16", (1, 8, 1)),
    "torch_fp16": ("torch", "float16", (1, 8, 1)),
    "naive_fp16": ("naive", "float16", (1, 8, 1)),
    "apex": ("apex", "float16", (1, 8, 1)),
    "tensor": ("torch", "bfloat16", (1, 4, 2)),
    "pipeline": ("torch", "bfloat16", (2, 4, 1)),
    "fsdp": ("naive", "bfloat16", (1, 8, 1)),
    "three_d": ("naive", "bfloat16", (2, 2, 2)),
    "accumulation_clipping": ("naive", "float16", (1, 8, 1)),
    "vit_base_caltech101": ("naive", "float16", (1, 8, 1)),
}
# What the examples read.
CONSTANTS = {"NUM_EPOCHS", "BATCH_SIZE", "LEARNING_RATE", "WARMUP_EPOCHS", "WEIGHT_DECAY", "ADAM_EPS"}


def load(name, *overrides):
    return load_config(FOLDER / f"{name}.py", overrides)


@pytest.mark.promise("ViT on Caltech101")
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir() if path.suffix))
def test_config(name):
    config = load(name)
    mode = config.precision.mode if config.precision else None
    assert (mode, config.precision_dtype, tuple(mesh_sizes(config, 8).values())) == EXPECTED[name]
    assert set(config.user) == CONSTANTS
    assert config.WARMUP_EPOCHS < config.NUM_EPOCHS
    for device in ("cpu", "cuda"):
        assert check(config, 8, device) == []
    text = (FOLDER / f"{name}.py").read_text()
    assert text.startswith('"""')


def test_what_the_docstrings_offer_can_run():
    for name, ranks, *overrides in (
        ("apex", 1, "fp16.opt_level=O3", "ADAM_EPS=1e-4"),
        ("tensor", 4, "parallel.tensor=4"),
        ("pipeline", 2, "parallel.pipeline.schedule=interleaved", "parallel.pipeline.chunks=2"),
        ("three_d", 4, "parallel.data.size=null"),
    ):
        assert check(load(name, *overrides), ranks, "cpu") == [], name
