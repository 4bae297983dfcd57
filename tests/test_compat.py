"""The composition table and the check that shares its source."""

import re

import pytest

from halfmesh.amp.plugin import AMP_PLUGINS, AMPPlugin, Composes
from halfmesh.amp.recipe import FP32
from halfmesh.compat import (
    HALF_DTYPES,
    Row,
    check,
    composition_table,
    get_columns,
    get_layout,
    get_rows,
    raise_for,
    render_table,
)
from halfmesh.config import Config
from halfmesh.config.load import load_config
from halfmesh.errors import IncompatibleConfigError
from halfmesh.key_checks import Finding, find_advice
from halfmesh.options import Options
from halfmesh.parallel.registries import DATA_STRATEGIES


def find(raw, world_size=1, device="cpu", kind="refused"):
    """The findings of one kind, as lines."""
    return [str(finding) for finding in check(load_config(raw), world_size, device) if finding.kind == kind]


class NoOptions(Options):
    pass


@pytest.fixture
def picky():
    """A mode that composes with nothing but one CPU process in fp16, without reasons of its own."""

    class Picky(AMPPlugin):
        options = NoOptions
        composes = Composes(data=frozenset(), devices=frozenset({"cpu"}), dtypes=frozenset({"float16"}))

        @classmethod
        def recipe(cls, options, dtype):
            return FP32

    AMP_PLUGINS.register("picky", Picky)
    yield Picky
    AMP_PLUGINS.unregister("picky")


# --- the table -----------------------------------------------------------------------------------------------------


def minimal_config(row: Row, column: str) -> Config:
    parallel = {
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": {"size": 2, "microbatches": 2}},
    }.get(column, {"data": column})
    return load_config({"parallel": parallel} | ({row.key: {"mode": row.mode}} if row.key else {}))


def verdict_of(findings):
    return "refused" if findings else "yes"


@pytest.mark.parametrize("column", get_columns())
@pytest.mark.parametrize("row", get_rows(), ids=str)
def test_check_agrees_with_the_table(row, column):
    assert verdict_of(check(minimal_config(row, column), 2, "cpu")) == composition_table()[str(row)][column]


def test_the_tables_refusals():
    table = composition_table()
    assert list(table) == ["none", "torch fp16", "torch bf16", "naive fp16", "naive bf16", "apex fp16", "apex bf16"]
    assert {column for cells in table.values() for column in cells} == {
        "tensor", "pipeline", "replicate", "zero1", "fsdp",
    }  # fmt: skip
    refused = {(row, column) for row, cells in table.items() for column, cell in cells.items() if cell == "refused"}
    apex = {("apex fp16", column) for column in ("tensor", "pipeline", "zero1", "fsdp")}
    assert refused == apex | {("apex bf16", column) for column in table["none"]}


def test_what_runs_today():
    table = composition_table()
    for row in ("none", "torch fp16", "torch bf16", "naive fp16", "naive bf16", "apex fp16"):
        assert table[row]["replicate"] == "yes"


def test_markdown():
    lines = render_table().splitlines()
    assert lines[0] == "| | tensor | pipeline | replicate | zero1 | fsdp |"
    assert lines[1] == "|---|---|---|---|---|---|"
    assert re.match(r"\| none \| .* \| yes \| ", lines[2])
    assert [line for line in lines if line.startswith("| apex bf16 | **refused** | **refused** | **refused** |")]
    assert len(lines) == 2 + len(get_rows())


# --- degrees -------------------------------------------------------------------------------------------------------

DEGREES = [
    (
        {"tensor": 3},
        8,
        "parallel: tensor=3 x pipeline=1 = 3 does not divide the 8 ranks; use tensor=2, pipeline=1 or tensor=4, "
        "pipeline=1, or start 6 or 9 ranks",
    ),
    (
        {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}},
        2,
        "parallel: tensor=2 x pipeline=2 = 4 does not divide the 2 ranks; use tensor=1, pipeline=2 or tensor=2, "
        "pipeline=1, or start 4 ranks",
    ),
    (
        {"data": {"size": 3}},
        8,
        "parallel.data.size: 3 x tensor=1 x pipeline=1 = 3, but there are 8 ranks; "
        "remove it (the other axes leave 8), or start 3 ranks",
    ),
    (
        {"data": {"size": 4}, "tensor": 2},
        4,
        "parallel.data.size: 4 x tensor=2 x pipeline=1 = 8, but there are 4 ranks; "
        "remove it (the other axes leave 2), or start 8 ranks",
    ),
    ({}, 0, "world_size: 0 is not a number of ranks; it must be at least 1"),
]


@pytest.mark.parametrize(("parallel", "world_size", "message"), DEGREES)
def test_degrees_that_do_not_fit(parallel, world_size, message):
    assert find({"parallel": parallel}, world_size) == [message]


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [({}, 1), ({}, 7), ({"tensor": 2}, 6), ({"tensor": 2, "data": {"size": 3}}, 6), ({"data": {"size": 1}}, 1)],
)
def test_degrees_that_fit(parallel, world_size):
    assert find({"parallel": parallel}, world_size) == []


def test_layout():
    config = load_config({"parallel": {"tensor": 2, "pipeline": {"size": 3, "microbatches": 3}}})
    layout = get_layout(config, 12)
    assert (layout.pipeline, layout.data, layout.tensor) == (3, 2, 2)
    assert get_layout(config, 5).data == 1
    assert get_layout(load_config({"parallel": {"data": {"size": 4}}}), 9).data == 4


# --- modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "cell"),
    [
        ({"tensor": 2}, "apex fp16 x tensor"),
        ({"pipeline": {"size": 2, "microbatches": 2}}, "apex fp16 x pipeline"),
        ({"data": "zero1"}, "apex fp16 x zero1"),
        ({"data": "fsdp"}, "apex fp16 x fsdp"),
    ],
)
def test_apex_is_refused_with_its_reason(parallel, cell):
    [line] = find({"fp16": {"mode": "apex"}, "parallel": parallel}, 2)
    assert line.startswith(f"{cell}: apex's contract has no verdict shared by all ranks")
    assert "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch'" in line


def test_apex_has_no_bf16():
    message = "apex bf16: apex has no bf16; use bf16 = dict(mode='torch') or dict(mode='naive')"
    assert find({"bf16": {"mode": "apex"}}) == [message]


def test_a_mode_without_reasons_gets_general_ones(picky):
    parallel = {"tensor": 2, "pipeline": {"size": 2, "microbatches": 2}}
    assert find({"bf16": {"mode": "picky"}, "parallel": parallel}, 8, "cuda") == [
        "picky bf16: mode 'picky' has no bfloat16; it has fp16",
        "picky bf16 on cuda: mode 'picky' does not run on cuda; it runs on cpu",
        "picky bf16 x tensor: mode 'picky' does not work with tensor; choose another mode, or leave tensor out",
        "picky bf16 x pipeline: mode 'picky' does not work with pipeline; choose another mode, or leave pipeline out",
        "picky bf16 x replicate: mode 'picky' does not work with replicate; "
        "choose another mode, or leave replicate out",
    ]
    assert find({"fp16": {"mode": "picky"}}, 1, "cpu") == []


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_known_devices(device):
    assert check(load_config({"fp16": {"mode": "torch"}}), 1, device) == []


@pytest.mark.parametrize(("device", "end"), [("mps", ""), ("cud", "; did you mean 'cuda'?")])
def test_unknown_devices(device, end):
    assert find({}, 1, device) == [f"device: {device!r} is not supported; allowed: cpu, cuda{end}"]


# --- pipeline and data ---------------------------------------------------------------------------------------------

PIPELINES = [
    (
        {"size": 4},
        "parallel.pipeline.microbatches: is required when pipeline.size > 1; "
        "pipeline=dict(size=4, microbatches=8) is a start",
    ),
    (
        {"size": 4, "microbatches": 3},
        "parallel.pipeline.microbatches: 3 is fewer than the 4 stages, which schedule='1f1b' has to fill; "
        "use 4 or more, or schedule='gpipe'",
    ),
    (
        {"size": 4, "microbatches": 6, "schedule": "interleaved", "chunks": 2},
        "parallel.pipeline.microbatches: 6 is not a multiple of the 4 stages, which schedule='interleaved' needs; "
        "use 4 or 8",
    ),
    (
        {"size": 4, "microbatches": 2, "schedule": "interleaved", "chunks": 2},
        "parallel.pipeline.microbatches: 2 is not a multiple of the 4 stages, which schedule='interleaved' needs; "
        "use 4",
    ),
    (
        {"size": 2, "microbatches": 2, "schedule": "interleaved"},
        "parallel.pipeline.chunks: 1 chunk leaves nothing to interleave; use chunks=2 or more, or schedule='1f1b'",
    ),
    (
        {"size": 2, "microbatches": 2, "chunks": 2, "schedule": "gpipe"},
        "parallel.pipeline.chunks: 2 chunks per rank need schedule='interleaved'; schedule='gpipe' has one",
    ),
]


@pytest.mark.parametrize(("pipeline", "message"), PIPELINES)
def test_pipelines_that_cannot_run(pipeline, message):
    assert find({"parallel": {"pipeline": pipeline}}, 4) == [message]


@pytest.mark.parametrize(
    "pipeline",
    [
        {"size": 4, "microbatches": 4},
        {"size": 4, "microbatches": 1, "schedule": "gpipe"},
        {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
        {"size": 1, "schedule": "interleaved", "microbatches": 3},
    ],
)
def test_pipelines_that_can(pipeline):
    assert find({"parallel": {"pipeline": pipeline}}, 4) == []


FLOAT16 = {"data": {"reduce_dtype": "float16"}}
NO_SCALE = "without a loss scale, gradients leave float16's range while they are summed; use 'float32'"


@pytest.mark.parametrize(
    ("raw", "refused"),
    [
        ({}, True),
        ({"bf16": {"mode": "naive"}}, True),
        ({"fp16": {"mode": "torch", "enabled": False}}, True),
        ({"fp16": {"mode": "torch"}}, False),
        ({"fp16": {"mode": "naive", "loss_scale": 8.0}}, False),
        ({"fp16": {"mode": "apex"}}, False),
        ({"fp16": {"mode": "apex", "opt_level": "O0"}}, True),
        ({"fp16": {"mode": "apex", "num_losses": 2}}, True),  # unscaled before they are reduced
        ({"fp16": {"mode": "apex", "num_losses": 2, "loss_scale": 8.0}}, False),
    ],
)
def test_reducing_in_float16_needs_a_loss_scale(raw, refused):
    assert find({**raw, "parallel": FLOAT16}) == ([f"parallel.data.reduce_dtype: {NO_SCALE}"] if refused else [])
    assert find({**raw, "parallel": {"data": {"reduce_dtype": "bfloat16"}}}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_dtype", "float32"),
        ("output_dtype", "float32"),
        ("buffer_dtype", "float32"),
        ("reshard_after_forward", False),
        ("prefetch", 2),
        ("cpu_offload", True),
        ("hybrid", 2),
    ],
)
def test_fsdp_keys_need_fsdp(key, value):
    message = f"parallel.data.{key}: only strategy='fsdp' has it, and the strategy is 'replicate'; remove it"
    assert find({"parallel": {"data": {key: value}}}) == [message]
    assert find({"parallel": {"data": {key: value, "strategy": "fsdp"}}}, 2) == []


def test_weighted_losses_are_of_one_kind():
    message = "loss_reduction: 'weighted' joins the batches of one loss, but num_losses is 2; use 'mean' or 'sum'"
    raw = {"fp16": {"mode": "apex", "num_losses": 2}, "loss_reduction": "weighted"}
    assert find(raw) == [message]
    assert find(raw | {"fp16": {"mode": "apex"}}) == []


def test_a_mode_that_is_switched_off_composes_like_none():
    raw = {"fp16": {"mode": "apex", "enabled": False}, "parallel": {"tensor": 2}}
    assert find(raw, 2) == []
    assert find({"fp16": {"mode": "apex"}, "parallel": {"tensor": 2}}, 2) != []


def test_fsdp_param_dtype_is_the_modes():
    data = {"strategy": "fsdp", "param_dtype": "float16"}
    message = "parallel.data.param_dtype: 'float16' is not what the mode computes in (bfloat16); remove it: the mode"
    [line] = find({"bf16": {"mode": "torch"}, "parallel": {"data": data}})
    assert line.startswith(message)
    assert find({"fp16": {"mode": "torch"}, "parallel": {"data": data}}) == []


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_resume_needs_a_folder():
    [line] = find({"resume": "auto"})
    assert line == (
        "resume: 'auto' goes on from the newest checkpoint of checkpoint.directory, which is not set; set "
        "checkpoint='checkpoints', or give resume a folder"
    )
    assert find({"resume": "auto", "checkpoint": "x"}) == find({"resume": "x"}) == []


def test_keys_that_go_together():
    raw = {
        "checkpoint": "x", "resume": "auto",
        "gradient_accumulation": 2, "clip_grad_norm": 1.0, "loss_reduction": "sum", "lr_interval": "epoch",
        "gradient_dtype": "float32", "fused": False, "on_nonfinite": "skip", "max_consecutive_skips": 3, "seed": 3,
        "timeout": 3.0, "track_grad_norm": True, "compile": True,
        "activation_checkpoint": "full", "activation_offload": True,
        "parallel": {"data": {"bucket_mb": 1.0, "max_inflight": 2}},
    }  # fmt: skip
    assert check(load_config(raw), 2, "cpu") == []


def test_third_party_strategy_is_a_column():
    DATA_STRATEGIES.register("gossip", object())
    try:
        assert composition_table()["none"]["gossip"] == "yes"
        assert composition_table()["naive fp16"]["gossip"] == "refused"
        [line] = find({"fp16": {"mode": "naive"}, "parallel": {"data": "gossip"}}, 2)
        assert line.startswith("naive fp16 x gossip: mode 'naive' does not work with gossip")
    finally:
        DATA_STRATEGIES.unregister("gossip")


# --- raising -------------------------------------------------------------------------------------------------------


def test_nothing_found_raises_nothing():
    raise_for([])


def test_refusals_are_raised_together():
    findings = [Finding("refused", "a", "is wrong"), Finding("refused", "b", "is wrong")]
    with pytest.raises(IncompatibleConfigError, match=r"in config.py:\n  - a: is wrong\n  - b: is wrong") as caught:
        raise_for(findings, "config.py")
    assert caught.value.problems == ("a: is wrong", "b: is wrong")


def test_check_has_no_side_effects(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("started a group"))
    config = load_config({"fp16": {"mode": "naive"}, "parallel": {"data": "zero1"}})
    assert check(config, 4, "cuda") == check(config, 4, "cuda")


def test_half_dtypes_agree_with_the_config():
    for key, dtype in HALF_DTYPES.items():
        assert load_config({key: {"mode": "torch"}}).precision_dtype == dtype


ADVICE = {
    "float32 weights": ({}, ["parallel.data.param_dtype: weights are gathered in float32"]),
    "naive": ({"bf16": {"mode": "naive"}}, []),
    "bf16 under torch": ({"bf16": {"mode": "torch"}, "data": {"param_dtype": "bfloat16"}}, []),
    "fp16 sums": (
        {"fp16": {"mode": "naive"}, "data": {"reduce_dtype": "float16"}},
        ["parallel.data.reduce_dtype: gradients are summed over the ranks in float16"],
    ),
    "both": (
        {"data": {"reduce_dtype": "bfloat16"}},
        ["parallel.data.reduce_dtype: gradients", "parallel.data.param_dtype: weights"],
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_about_fsdp(name):
    raw, expected = ADVICE[name]
    raw = dict(raw)
    for strategy in ("fsdp", "zero1"):
        data = {"strategy": strategy, **{k: v for k, v in raw.get("data", {}).items() if k == "reduce_dtype"}}
        data |= raw.get("data", {}) if strategy == "fsdp" else {}
        config = load_config({k: v for k, v in raw.items() if k != "data"} | {"parallel": {"data": data}})
        found = [str(advice) for advice in find_advice(config)]
        wanted = expected if strategy == "fsdp" else []
        assert len(found) == len(wanted)
        assert all(line.startswith(words) for line, words in zip(found, wanted, strict=True))
