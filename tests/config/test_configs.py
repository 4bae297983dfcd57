"""Each file in configs/ loads, can run, says what its name says, and explains itself; and the JSON Schema."""

import json
from pathlib import Path

import jsonschema
import pytest

from halfmesh import ConfigError, load_config
from halfmesh.compat import check, mesh_sizes
from halfmesh.config.load import json_schema
from halfmesh.parallel.registries import DATA_STRATEGIES

FOLDER = Path(__file__).resolve().parents[2] / "configs"
EXPECTED = {  # mode, dtype, and the pipeline, data and tensor ranks of 8
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
READ_BY_EXAMPLES = {"NUM_EPOCHS", "BATCH_SIZE", "LEARNING_RATE", "WARMUP_EPOCHS", "WEIGHT_DECAY", "ADAM_EPS"}
OFFERED_BY_DOCSTRINGS = [
    ("apex", 1, "fp16.opt_level=O3", "ADAM_EPS=1e-4"),
    ("tensor", 4, "parallel.tensor=4"),
    ("pipeline", 2, "parallel.pipeline.schedule=interleaved", "parallel.pipeline.chunks=2"),
    ("three_d", 4, "parallel.data.size=null"),
]


@pytest.mark.promise("ViT on Caltech101")
def test_each_file():
    assert EXPECTED.keys() == {path.stem for path in FOLDER.iterdir() if path.suffix}
    for name, expected in EXPECTED.items():
        config = load_config(FOLDER / f"{name}.py")
        mode = config.precision.mode if config.precision else None
        assert (mode, config.precision_dtype, tuple(mesh_sizes(config, 8).values())) == expected
        assert set(config.user) == READ_BY_EXAMPLES
        assert config.WARMUP_EPOCHS < config.NUM_EPOCHS
        assert check(config, 8, "cpu") == check(config, 8, "cuda") == []
        assert (FOLDER / f"{name}.py").read_text().startswith('"""')
    for name, ranks, *overrides in OFFERED_BY_DOCSTRINGS:
        assert check(load_config(FOLDER / f"{name}.py", overrides), ranks, "cpu") == [], name


RIGHT = [
    {"fp16": {"mode": "naive", "hysteresis": 2}, "clip_grad_norm": 1.0, "compile": True, "checkpoint": "folder"},
    {"bf16": {"mode": "torch"}, "fp16": None, "activation_checkpoint": "full", "NUM_EPOCHS": 3, "seed": 1},
    {"parallel": {"tensor": {"size": 2, "plan": {"*.fc": "colwise"}}, "pipeline": {"size": 2, "partition": ["a"]}}},
    {"parallel": {"data": {"strategy": "fsdp", "prefetch": 2}, "context": 2}},
    *({"parallel": {"data": name}} for name in DATA_STRATEGIES.names()),
]
WRONG = [
    {"gradient_acumulation": 2},
    {"fp16": {"mode": "naive", "hysterisis": 2}},
    {"fp16": {"hysteresis": 2}},
    {"parallel": {"tensor": 0}},
    {"parallel": {"pipeline": {"size": 2, "schedule": "1f2b"}}},
    {"parallel": {"data": {"strategy": "zero1", "prefetch": 2}}},
]


def test_what_the_json_schema_takes_is_loaded_and_what_is_a_mistake_to_it_is_one_to_halfmesh():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for config in RIGHT:
        load_config(config)
        assert list(validator.iter_errors(config)) == []
    for config in WRONG:
        assert list(validator.iter_errors(config)), config
        with pytest.raises(ConfigError):
            load_config(config)
