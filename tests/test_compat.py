"""The composition table, and the check of a config before a run, which has the same source."""

import pytest

from halfmesh import AMP_PLUGINS, AMPPlugin, Composes, ConfigError, IncompatibleConfigError, Options, Recipe
from halfmesh import load_config as load
from halfmesh.compat import check, composition_table, get_columns, get_rows, mesh_sizes, raise_for, render_table
from halfmesh.config.composition import Setup, find_advice

APEX = {"fp16": {"mode": "apex"}}
TWO_STAGES = {"pipeline": {"size": 2, "microbatches": 2}}


def find(raw, world_size=1, device="cpu"):
    """The findings, as lines."""
    return [str(finding) for finding in check(load(raw), world_size, device)]


def test_check_agrees_with_the_table():
    axes = {"pipeline": TWO_STAGES} | {axis: {axis: 2} for axis in ("tensor", "context", "expert")}
    for row in get_rows():
        for column in get_columns():
            raw = {"parallel": axes.get(column, {"data": column})} | ({row.key: {"mode": row.mode}} if row.key else {})
            assert ("rejected" if find(raw, 2) else "yes") == composition_table()[str(row)][column], (row, column)


def test_the_tables_rejections():
    table = composition_table()
    modes = [f"{mode} {key}" for mode in ("torch", "naive", "apex") for key in ("fp16", "bf16", "fp8")]
    assert list(table) == ["none", *modes]
    rejected = {(row, column) for row, cells in table.items() for column, cell in cells.items() if cell == "rejected"}
    apex = {("apex fp16", column) for column in ("tensor", "pipeline", "context", "expert", "zero1", "fsdp")}
    without = {(row, column) for row in ("apex bf16", "apex fp8", "naive fp8") for column in table["none"]}
    assert rejected == apex | without
    lines = render_table().splitlines()
    assert lines[0] == "| | tensor | pipeline | context | expert | replicate | zero1 | fsdp |"
    assert len(lines) == 2 + 7, "without modes in a format that they do not have"
    assert lines[-1] == f"| apex fp16 | {'**rejected** | ' * 4}yes | **rejected** | **rejected** |"


def test_a_third_partys_mode_without_reasons_gets_general_ones():
    class Picky(AMPPlugin):
        options = Options
        composes = Composes(parallel=frozenset(), devices=frozenset({"cpu"}), dtypes=frozenset({"float16"}))

        @classmethod
        def recipe(cls, options, dtype):
            return Recipe()

    AMP_PLUGINS.register("picky", Picky)
    try:
        found = find({"bf16": {"mode": "picky"}, "parallel": {"tensor": 2}}, 2, "cuda")
        assert found == [
            "picky bf16: mode 'picky' has no bf16; it has fp16",
            "picky bf16 on cuda: mode 'picky' does not run on cuda; it runs on cpu",
            "picky bf16 x tensor: mode 'picky' does not work with tensor; choose another mode, or leave tensor out",
        ]
        assert find({"fp16": {"mode": "picky"}}) == []
    finally:
        AMP_PLUGINS.unregister("picky")


@pytest.mark.promise("one config, whose degrees fit the number of ranks")
def test_layout():
    config = load({"parallel": {"tensor": 2, "pipeline": {"size": 3, "microbatches": 3}}})
    assert list(mesh_sizes(config, 12).items()) == [("pp", 3), ("dp", 2), ("tp", 2)]  # outermost first


INTERLEAVED = {"size": 2, "schedule": "interleaved", "chunks": 2}


@pytest.mark.promise("batches that microbatches do not divide")
@pytest.mark.promise(
    "one config, whose degrees fit the number of ranks",
    "others are rejected; SageMaker's key names get a message with ours",
    of="SageMaker",
    page="config.md",
)
@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        ({"tensor": 3}, 8, "parallel: tensor=3 x pipeline=1 = 3 does not divide the 8 ranks; choose sizes whose"),
        ({"data": {"size": 4}, "tensor": 2}, 4, "parallel.data.size: 4 x tensor=2 x pipeline=1 = 8, but there are 4"),
        ({"data": {"strategy": "fsdp", "hybrid": 4}}, 6, "parallel.data.hybrid: 4 does not divide the 6 data ranks"),
        ({}, 0, "world_size: 0 is not a number of ranks; it must be at least 1"),
        ({"expert": 4}, 6, "parallel.expert: 4 does not divide the 6 data ranks, of which the expert ranks are"),
        ({}, 7, None),
        ({"tensor": 2, "data": {"size": 3}}, 6, None),
        ({"pipeline": {"size": 4}}, 4, "parallel.pipeline.microbatches: is required when pipeline.size > 1"),
        (
            {"pipeline": {"size": 4, "microbatches": 3}}, 4,
            "parallel.pipeline.microbatches: 3 is fewer than the 4 stages, which schedule='1f1b' has to",
        ),
        (
            {"pipeline": INTERLEAVED | {"size": 4, "microbatches": 6}}, 4,
            "parallel.pipeline.microbatches: 6 is not a multiple of the 4 ranks, which schedule='interleaved' needs",
        ),
        (
            {"pipeline": INTERLEAVED | {"microbatches": 2, "chunks": 1}}, 4,
            "parallel.pipeline.chunks: 1 chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'",
        ),
        (
            {"pipeline": {"size": 2, "microbatches": 2, "chunks": 2, "schedule": "gpipe"}}, 4,
            "parallel.pipeline.chunks: 2 chunks per rank need schedule='interleaved'; schedule='gpipe' has one",
        ),
        ({"pipeline": {"size": 4, "microbatches": 1, "schedule": "gpipe"}}, 4, None),
        ({"pipeline": INTERLEAVED | {"microbatches": 4}}, 4, None),
    ],
)  # fmt: skip
def test_sizes(parallel, world_size, message):
    found = find({"parallel": parallel}, world_size)
    assert [line.startswith(message or "") for line in found] == [True] * bool(message)


REDUCED = "parallel.data.reduce_dtype: without a loss scale, sums of gradients leave the range of float16"


@pytest.mark.promise("FSDP mixed precision")
@pytest.mark.parametrize(
    ("raw", "data", "message"),
    [
        ({}, {"reduce_dtype": "float16"}, REDUCED),
        ({"fp16": {"mode": "torch"}}, {"reduce_dtype": "float16"}, None),
        ({"fp16": {"mode": "apex", "num_losses": 2}}, {"reduce_dtype": "float16"}, REDUCED),  # unscaled before reduced
        ({"fp16": {"mode": "apex", "num_losses": 2, "loss_scale": 8.0}}, {"reduce_dtype": "float16"}, None),
        ({}, {"reduce_dtype": "bfloat16"}, None),
        (
            {"bf16": {"mode": "torch"}}, {"strategy": "fsdp", "param_dtype": "float16"},
            "parallel.data.param_dtype: 'float16' is not the dtype that the mode computes in (bfloat16); remove it",
        ),
        ({"fp16": {"mode": "torch"}}, {"strategy": "fsdp", "param_dtype": "float16"}, None),
        (
            {"fp16": {"mode": "apex", "num_losses": 2}, "loss_reduction": "weighted"}, {},
            "loss_reduction: 'weighted' joins batches of one loss, not of num_losses=2",
        ),
        ({"resume": "auto"}, {}, "resume: 'auto' needs checkpoint.directory; set"),
        ({"resume": "auto", "checkpoint": "x"}, {}, None),
        ({"bf16": {"mode": "apex"}}, {}, "apex bf16: apex has no bf16; use bf16 = dict(mode='torch') or dict(mode='na"),
        (APEX, {"strategy": "zero1"}, "apex fp16 x zero1: each rank of apex decides alone"),
    ],
)  # fmt: skip
def test_keys(raw, data, message):
    found = find(raw | {"parallel": {"data": data}})
    assert [line.startswith(message or "") for line in found] == [True] * bool(message)


def test_devices_and_a_mode_that_is_switched_off():
    assert find({"fp16": {"mode": "torch"}}, 1, "cuda:3") == []
    assert find({}, 1, "gpu") == ["device: 'gpu' is not supported; allowed: cpu, cuda"]
    assert find({"fp16": {"mode": "apex", "enabled": False}, "parallel": {"tensor": 2}}, 2) == []


def test_fsdp_keys_need_fsdp():
    for key, value in {"param_dtype": "float32", "prefetch": 2, "cpu_offload": True, "hybrid": 2}.items():
        with pytest.raises(ConfigError) as rejected:
            load({"parallel": {"data": {key: value, "strategy": "zero1"}}})
        message = f"parallel.data.{key}: only strategy='fsdp' has this key, and the strategy is 'zero1'; remove it"
        assert rejected.value.problems == (message,)


def test_rejections_are_raised_together():
    raise_for([])
    findings = check(load({"resume": "auto", "parallel": {"tensor": 3}}), 8, "cpu")
    with pytest.raises(IncompatibleConfigError, match=r"in config.py:\n  - parallel: .*\n  - resume: ") as caught:
        raise_for(findings, "config.py")
    assert caught.value.problems == tuple(map(str, findings))


@pytest.mark.parametrize(
    ("raw", "data", "expected"),
    [
        ({}, {}, ["parallel.data.param_dtype: weights are gathered in float32"]),
        ({"fp8": {"mode": "torch"}}, {}, []),
        ({"bf16": {"mode": "torch"}}, {"param_dtype": "bfloat16"}, []),
    ],
)
def test_advice_about_fsdp(raw, data, expected):
    config = load(raw | {"parallel": {"data": {"strategy": "fsdp"} | data}})
    found = [str(advice) for advice in find_advice(Setup.of(config, 2))]
    assert [line[: len(words)] for line, words in zip(found, expected, strict=True)] == expected
