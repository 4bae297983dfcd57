"""The composition table, and the check of a config before a run, which has the same source."""

import pytest

from halfmesh import AMP_PLUGINS, AMPPlugin, Composes, Options, Recipe
from halfmesh import load_config as load
from halfmesh.compat import check, composition_table, get_columns, get_rows, mesh_sizes, raise_for, render_table
from halfmesh.config.composition import Setup, find_advice
from halfmesh.errors import ConfigError, HalfmeshError, IncompatibleConfigError

APEX = {"fp16": {"mode": "apex"}}
TWO_STAGES = {"pipeline": {"size": 2, "microbatches": 2}}
HYBRID = {"data": {"strategy": "fsdp", "hybrid": 4}}


def find(raw, world_size=1, device="cpu"):
    """The findings, as lines."""
    return [str(finding) for finding in check(load(raw), world_size, device)]


# --- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", get_columns())
@pytest.mark.parametrize("row", get_rows(), ids=str)
def test_check_agrees_with_the_table(row, column):
    axes = {"pipeline": TWO_STAGES} | {axis: {axis: 2} for axis in ("tensor", "context", "expert")}
    parallel = axes.get(column, {"data": column})
    found = find({"parallel": parallel} | ({row.key: {"mode": row.mode}} if row.key else {}), 2)
    assert ("rejected" if found else "yes") == composition_table()[str(row)][column]


def test_the_tables_rejections():
    table = composition_table()
    modes = [f"{mode} {key}" for mode in ("torch", "naive", "apex") for key in ("fp16", "bf16", "fp8")]
    assert list(table) == ["none", *modes]
    assert set(table["none"]) == {"tensor", "pipeline", "context", "expert", "replicate", "zero1", "fsdp"}
    rejected = {(row, column) for row, cells in table.items() for column, cell in cells.items() if cell == "rejected"}
    apex = {("apex fp16", column) for column in ("tensor", "pipeline", "context", "expert", "zero1", "fsdp")}
    without = {(row, column) for row in ("apex bf16", "apex fp8", "naive fp8") for column in table["none"]}
    assert rejected == apex | without
    lines = render_table().splitlines()
    assert lines[0] == "| | tensor | pipeline | context | expert | replicate | zero1 | fsdp |"
    assert len(lines) == 2 + 7, "without modes in a format that they do not have"
    assert lines[-1] == f"| apex fp16 | {'**rejected** | ' * 4}yes | **rejected** | **rejected** |"


@pytest.mark.parametrize(
    ("parallel", "cell"),
    [({"tensor": 2}, "tensor"), (TWO_STAGES, "pipeline"), ({"data": "zero1"}, "zero1"), ({"data": "fsdp"}, "fsdp")],
)
def test_apex_is_rejected_with_its_reason(parallel, cell):
    [line] = find(APEX | {"parallel": parallel}, 2)
    assert line.startswith(f"apex fp16 x {cell}: each rank of apex decides alone")
    assert "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch'" in line
    assert find({"fp16": {"mode": "apex", "enabled": False}, "parallel": parallel}, 2) == []


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


# --- degrees and devices -------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "one config, whose degrees fit the number of ranks",
    "others are rejected; SageMaker's key names get a message with ours",
    of="SageMaker",
    page="config.md",
)
@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        (
            {"tensor": 3},
            8,
            "parallel: tensor=3 x pipeline=1 = 3 does not divide the 8 ranks; choose sizes whose product "
            "does, or start 6 or 9 ranks",
        ),
        (
            {"tensor": 2},
            1,
            "parallel: tensor=2 x pipeline=1 = 2 ranks, but there is 1; start them with "
            "`torchrun --standalone --nproc-per-node 2 train.py`, or with `halfmesh run`",
        ),
        (
            {"data": {"size": 4}, "tensor": 2},
            4,
            "parallel.data.size: 4 x tensor=2 x pipeline=1 = 8, but there are 4 ranks; remove it, or start 8",
        ),
        (HYBRID, 6, "parallel.data.hybrid: 4 does not divide the 6 data ranks; use a divisor"),
        ({}, 0, "world_size: 0 is not a number of ranks; it must be at least 1"),
        ({}, 7, None),
        ({"tensor": 2, "data": {"size": 3}}, 6, None),
    ],
)
def test_degrees_fit_the_number_of_ranks(parallel, world_size, message):
    assert find({"parallel": parallel}, world_size) == ([message] if message else [])


@pytest.mark.promise("one config, whose degrees fit the number of ranks")
def test_layout():
    config = load({"parallel": {"tensor": 2, "pipeline": {"size": 3, "microbatches": 3}}})
    assert list(mesh_sizes(config, 12).items()) == [("pp", 3), ("dp", 2), ("tp", 2)]  # outermost first


def test_devices():
    assert find({"fp16": {"mode": "torch"}}, 1, "cuda:3") == []
    for given, near in {"cud": "'cuda'", "gpu": "'cuda'", "tpu": "", "mps": ""}.items():
        said = f"device: '{given}' is not supported; allowed: cpu, cuda{near and f'; did you mean {near}?'}"
        assert find({}, 1, given) == [said]


# --- keys ----------------------------------------------------------------------------------------------------------

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}


@pytest.mark.promise("batches that microbatches do not divide")
@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"size": 4}, "microbatches: is required when pipeline.size > 1; for example 8"),
        ({"size": 4, "microbatches": 3}, "microbatches: 3 is fewer than the 4 stages; use more, or schedule='gpipe'"),
        (
            {"size": 4, "microbatches": 6, **INTERLEAVED},
            "microbatches: 6 is not a multiple of the 4 ranks, as 'interleaved' needs",
        ),
        (
            {"size": 2, "microbatches": 2, "schedule": "interleaved"},
            "chunks: 1 chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'",
        ),
        (
            {"size": 2, "microbatches": 2, "chunks": 2, "schedule": "gpipe"},
            "chunks: 2 chunks per rank need schedule='interleaved'; schedule='gpipe' has one",
        ),
        ({"size": 4, "microbatches": 1, "schedule": "gpipe"}, None),
        ({"size": 2, "microbatches": 4, **INTERLEAVED}, None),
        ({"size": 1, "schedule": "interleaved", "microbatches": 3}, None),
    ],
)
def test_pipelines_that_cannot_run(pipeline, message):
    found = find({"parallel": {"pipeline": pipeline}}, 4)
    assert len(found) == (message is not None)
    assert all(line.startswith(f"parallel.pipeline.{message}") for line in found)


@pytest.mark.parametrize(
    ("raw", "rejected"),
    [
        ({}, True),
        ({"fp16": {"mode": "torch", "enabled": False}}, True),
        ({"fp16": {"mode": "torch"}}, False),
        ({"fp16": {"mode": "apex", "opt_level": "O0"}}, True),
        ({"fp16": {"mode": "apex", "num_losses": 2}}, True),  # unscaled before they are reduced
        ({"fp16": {"mode": "apex", "num_losses": 2, "loss_scale": 8.0}}, False),
    ],
)
def test_reducing_in_float16_needs_a_loss_scale(raw, rejected):
    message = "parallel.data.reduce_dtype: without a loss scale, sums of gradients leave the range of float16"
    found = find({**raw, "parallel": {"data": {"reduce_dtype": "float16"}}})
    assert [line.startswith(message) for line in found] == [True] * rejected
    assert find({**raw, "parallel": {"data": {"reduce_dtype": "bfloat16"}}}) == []


TWO_LOSSES = {"fp16": {"mode": "apex", "num_losses": 2}, "loss_reduction": "weighted"}
GRAPHS = {"compile": {"mode": "reduce-overhead"}, "gradient_accumulation": 2}
ONE_BATCH = {"gradient_accumulation": 1}
FSDP_KEYS = dict.fromkeys(("param_dtype", "output_dtype", "buffer_dtype"), "float32")
FSDP_KEYS |= {"reshard_after_forward": False, "prefetch": 2, "cpu_offload": True, "hybrid": 2}


@pytest.mark.parametrize("key", FSDP_KEYS)
def test_fsdp_keys_need_fsdp(key):
    given = {key: FSDP_KEYS[key]}
    with pytest.raises(ConfigError) as rejected:
        load({"parallel": {"data": given | {"strategy": "zero1"}}})
    message = f"parallel.data.{key}: only strategy='fsdp' has this key, and the strategy is 'zero1'; remove it"
    assert rejected.value.problems == (message,)
    assert find({"parallel": {"data": given | {"strategy": "fsdp"}}}, 2) == []


def test_keys_of_another_strategy_may_have_their_defaults():
    data = load({"parallel": {"data": {"strategy": "zero1", "cpu_offload": False, "prefetch": 1}}}).parallel.data
    assert data == load({"parallel": {"data": "zero1"}}).parallel.data
    assert not hasattr(data, "cpu_offload")


@pytest.mark.promise("FSDP mixed precision")
def test_fsdp_param_dtype_is_the_modes():
    data = {"strategy": "fsdp", "param_dtype": "float16"}
    message = "parallel.data.param_dtype: 'float16' is not bfloat16, in which the mode computes; remove it"
    [line] = find({"bf16": {"mode": "torch"}, "parallel": {"data": data}})
    assert line.startswith(message)
    assert find({"fp16": {"mode": "torch"}, "parallel": {"data": data}}) == []


@pytest.mark.parametrize(
    ("raw", "message", "instead"),
    [
        ({"bf16": {"mode": "apex"}}, "apex bf16: apex has no bf16; use bf16 = dict(mode='torch') or dict(", APEX),
        (TWO_LOSSES, "loss_reduction: 'weighted' joins batches of one loss, not of num_losses=2; use 'mean'", APEX),
        ({"resume": "auto"}, "resume: 'auto' needs checkpoint.directory; set", {"checkpoint": "x"}),
        (GRAPHS, "compile.mode: 'reduce-overhead' makes CUDA graphs, and with gradient_accumulation > 1", ONE_BATCH),
    ],
)
def test_what_else_does_not_go_together(raw, message, instead):
    [line] = find(raw)
    assert line.startswith(message)
    assert find(({} if "bf16" in raw else raw) | instead) == []


def test_rejections_are_raised_together():
    raise_for([])
    findings = check(load({"resume": "auto", "parallel": {"tensor": 3}}), 8, "cpu")
    with pytest.raises(IncompatibleConfigError, match=r"in config.py:\n  - parallel: .*\n  - resume: ") as caught:
        raise_for(findings, "config.py")
    assert (caught.value.problems, caught.value.source) == (tuple(map(str, findings)), "config.py")
    assert issubclass(IncompatibleConfigError, ConfigError)
    assert issubclass(ConfigError, (HalfmeshError, ValueError))


@pytest.mark.parametrize(
    ("raw", "data", "expected"),
    [
        ({}, {}, ["parallel.data.param_dtype: weights are gathered in float32"]),
        ({"fp8": {"mode": "torch"}}, {}, []),
        ({"bf16": {"mode": "naive"}}, {}, []),
        ({"bf16": {"mode": "torch"}}, {"param_dtype": "bfloat16"}, []),
    ],
)
def test_advice_about_fsdp(raw, data, expected):
    config = load(raw | {"parallel": {"data": {"strategy": "fsdp"} | data}})
    found = [str(advice) for advice in find_advice(Setup.of(config, 2))]
    assert [line[: len(words)] for line, words in zip(found, expected, strict=True)] == expected
    assert list(find_advice(Setup.of(load(raw | {"parallel": {"data": "zero1"}}), 2))) == []
