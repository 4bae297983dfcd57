"""engine.precision_report(): what it measures, what it advises, and that all ranks have the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp.recipe import FP32, Recipe
from halfmesh.engine.health.findings import find
from halfmesh.engine.health.layer_sizes import odd_sizes
from halfmesh.engine.health.precision_report import LayerPrecision, PrecisionReport
from tests.support.checkpoint_runs import LAYOUTS, Net, make_engine
from tests.support.models import make_data
from tests.support.ranks import run_ranks

COEFFICIENTS = torch.tensor([1.0, 1, 1, 1, 2**-27, 2**-27, 0, 2**-20])
"""The gradients of a layer's output, before they are scaled. Half of float16's smallest number is 2**-25."""


def static(mode, scale):
    return {
        "torch": {"fp16": {"mode": "torch", "init_scale": scale}},
        "naive": {"fp16": {"mode": "naive", "loss_scale": scale}},
        "o2": {"fp16": {"mode": "apex", "loss_scale": scale, "opt_level": "O2"}},
    }[mode]


def weighed(output, y=None):
    return (output.float() * COEFFICIENTS).sum()


def train_once(model, config, criterion=weighed, x=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = halfmesh.initialize(model, optimizer, criterion, config=config, device="cpu", **options)
    engine.backward(engine.criterion(engine(torch.ones(2, 8) if x is None else x)))
    engine.step()
    return engine


def layer(bias=False):
    return nn.Sequential(nn.Linear(8, 8, bias=bias))


@pytest.mark.parametrize("mode", ["torch", "naive", "o2"])
def test_what_is_lost_is_what_can_be_computed_by_hand(mode):
    report = train_once(layer(), static(mode, 1.0)).precision_report()
    (row,) = report.layers
    assert report.factor == 4096.0  # 4096 / the largest gradient, 1
    assert (row.name, row.kind, row.output_dtype, row.gradient_dtype) == ("0", "Linear", "float16", "float16")
    assert row.lost_gradients == 2 / 8
    assert row.subnormal_gradients == 1 / 8
    assert row.lost_weight_gradients == 2 / 8
    assert row.largest_gradient == 1.0
    assert row.gradient_share == pytest.approx(1 / 65504)
    assert report.room == 2.0**14  # two samples: the gradients of weights are 2
    (finding,) = report.findings
    assert "more than 5% of the gradients of 0 are lost to zero: the loss scale could be 16384 times larger" in finding


@pytest.mark.parametrize("mode", ["torch", "naive", "o2"])
def test_a_larger_scale_loses_nothing(mode):
    report = train_once(layer(), static(mode, 1024.0)).precision_report()
    (row,) = report.layers
    assert (report.loss_scale, report.factor, report.room) == (1024.0, 4.0, 16.0)
    assert (row.lost_gradients, row.lost_weight_gradients) == (0, 0)
    assert row.subnormal_gradients == 2 / 8
    assert row.largest_gradient == 1.0
    assert row.gradient_share == pytest.approx(1024 / 65504)
    assert report.findings == ()
    assert "nothing that is worth a change was found" in str(report)


def test_activations():
    model = layer(bias=True)
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.fill_(-20000.0)
    report = train_once(model, static("naive", 1.0)).precision_report()
    (row,) = report.layers
    assert row.largest_output == pytest.approx(20000, rel=1e-3)
    assert row.output_share == pytest.approx(20000 / 65504, rel=1e-3)
    assert row.param_dtype == "float16"
    assert row.masters
    assert any("outputs of 0 reach above 25% of float16's largest number" in line for line in report.findings)


def test_no_room_above():
    report = train_once(layer(), static("naive", 2.0**13)).precision_report()
    assert report.factor is None
    assert "gradients reach 8.19e+03 at this loss scale, and have no room above" in report.not_measured
    assert report.layers[0].lost_gradients is None
    assert "lost: not measured: gradients reach 8.19e+03" in " ".join(str(report).split())


def test_an_overflow():
    report = train_once(layer(), static("naive", 2.0**17)).precision_report()
    assert report.room is None
    assert report.not_measured == "not measured: gradients are inf or nan at this loss scale"
    assert report.findings[0].startswith("inf or nan in outputs or gradients of 0")


@pytest.mark.parametrize(("scale", "room"), [(2.0**10, 2.0**5), (0.5, 2.0**16)])
def test_several_losses(scale, room):
    """Their complete gradients carry no scale: only those of activations tell of the room."""
    config = {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2, "max_loss_scale": scale}}
    model = layer()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), weighed, config=config, device="cpu"
    )
    for loss_id in (0, 1):
        engine.backward(engine.criterion(engine(torch.ones(2, 8))), loss_id)
    engine.step()
    report = engine.precision_report()
    assert (report.loss_scale, report.room) == (scale, room)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({}, "float32"), ({"bf16": {"mode": "torch"}}, "bfloat16"), ({"bf16": {"mode": "naive"}}, "bfloat16")],
)
def test_formats_with_the_range_of_fp32(config, dtype):
    report = train_once(layer(), config).precision_report()
    assert report.not_measured == f"nothing, as {dtype} has the exponents of fp32"
    assert (report.factor, report.room, report.loss_scale) == (None, None, None)
    assert report.layers[0].lost_gradients is None
    assert report.layers[0].subnormal_gradients is None
    assert report.layers[0].output_dtype == dtype


def test_the_report_looks_at_the_whole_batch_and_the_last_updates():
    config = {"fp16": {"mode": "torch", "init_scale": 2.0**17}}
    model = layer()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), weighed, config=config, device="cpu"
    )
    for _ in range(5):
        engine.backward(engine.criterion(engine(torch.ones(2, 8))))
        engine.step()
    report = engine.precision_report()
    assert (report.skipped, report.updates, report.loss_scale, report.is_dynamic) == (3, 5, 2.0**14, True)
    assert any(line.startswith("3 of the last 5 updates were skipped") for line in report.findings)
    assert engine.loss_scale == 2.0**14


def test_updates_of_another_run_do_not_count():
    engine = train_once(layer(), static("torch", 1.0))
    state = engine.state_dict()
    engine.backward(engine.criterion(engine(torch.ones(2, 8))))
    engine.step()
    assert engine.precision_report().updates == 2
    engine.load_state_dict(state)
    assert engine.precision_report().updates == 0


# -- what is printed -------------------------------------------------------------------------------------------------


def test_the_table_and_the_dict():
    model = nn.Sequential()
    inner = nn.Sequential(nn.Linear(8, 8))
    model.add_module("a_name_that_is_longer_than_what_fits_into_the_table", inner)
    report = train_once(model, static("naive", 1.0)).precision_report()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 120
    row = next(line for line in lines if line.startswith("..."))
    assert row.split()[0] == "..." + report.layers[0].name[-27:]
    assert row.split()[1:5] == ["fp16+masters", "fp16", f"{report.layers[0].largest_output:.2e}", "<0.01%"]
    assert "25%" in row
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["layers"][0]["lost_gradients"] == 0.25
    assert plain["layers"][0]["name"] == "a_name_that_is_longer_than_what_fits_into_the_table.0"
    assert plain["findings"] == list(report.findings)
    assert isinstance(report, halfmesh.PrecisionReport)


def test_modules_that_are_not_called_and_parameters_without_gradient():
    class Uses(nn.Module):
        """Uses the weight of a module that it does not call, and another not at all."""

        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return nn.functional.linear(x, self.used.weight)

    report = train_once(Uses(), static("naive", 1.0)).precision_report()
    used, unused = report.layers
    assert (used.output_dtype, used.largest_output, used.lost_gradients) == ("", None, None)
    assert unused.without_gradient == ("unused.weight",)
    assert used.without_gradient == ()
    assert any("no gradient came to unused.weight" in line for line in report.findings)


def test_only_the_forward_where_the_loop_computes_the_loss():
    model = layer()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.0), config=static("naive", 1.0), device="cpu"
    )
    engine.backward(weighed(engine(torch.ones(2, 8))))
    engine.step()
    report = engine.precision_report()
    assert report.layers[0].largest_output is not None
    assert report.layers[0].gradient_dtype == ""
    assert report.not_measured == "not measured: there were no gradients of layers' outputs"
    assert "only the forward was looked at" in str(report)
    assert report.findings == ()


# -- what is refused -------------------------------------------------------------------------------------------------


def test_before_the_first_forward():
    engine = make_engine("one", "none")
    with pytest.raises(halfmesh.InputError, match="no batch went forward in training mode yet"):
        engine.precision_report()
    x, _ = make_data(4)
    engine.eval()(x)
    with pytest.raises(halfmesh.InputError, match="no batch went forward in training mode yet"):
        engine.precision_report()


def test_within_a_cycle():
    engine = make_engine("one", "none", gradient_accumulation=2)
    x, y = make_data(4)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()
    with pytest.raises(halfmesh.InputError, match=r"engine.precision_report\(\) was called after microbatch 1 of 2"):
        engine.precision_report()


def test_in_evaluation_mode_after_closing_and_with_apex_itself():
    engine = train_once(layer(), {})
    engine.eval()
    with pytest.raises(halfmesh.InputError, match=r"the model is in evaluation mode; call engine.train\(\) first"):
        engine.precision_report()
    engine.train()
    engine._update.replays = False
    with pytest.raises(halfmesh.InputError, match="backend='apex' keeps state of its own"):
        engine.precision_report()
    engine.close()
    with pytest.raises(halfmesh.InputError, match="this engine is closed"):
        engine.precision_report()


# -- findings --------------------------------------------------------------------------------------------------------

ROW = LayerPrecision(
    *("a", "Linear", "float32", False, "float16", 1.0, 0.0, "float16", 1.0, 0.0, 0.0, 0.0, 0.0, 0, (), ())
)
REPORT = PrecisionReport("float16", 1024.0, True, 0, 60, 16.0, None, 8.0, (ROW,), (), ())
HALF = Recipe(compute_dtype=torch.float16, param_dtype=torch.float16)
AUTOCAST = Recipe(compute_dtype=torch.float16, autocast=True)


@pytest.mark.parametrize(
    ("row", "report", "recipe", "words"),
    [
        ({}, {}, AUTOCAST, None),
        ({}, {"loss_scale": 0.5}, AUTOCAST, "the loss scale is 0.5, below 1"),
        ({}, {"loss_scale": 1.0}, AUTOCAST, None),
        ({}, {"loss_scale": 2.0**24}, AUTOCAST, None),
        ({}, {"loss_scale": 2.0**25}, AUTOCAST, "the loss scale is 3.35544e+07, above 2**24"),
        ({}, {"skipped": 3}, AUTOCAST, None),
        ({}, {"skipped": 4}, AUTOCAST, "4 of the last 60 updates were skipped"),
        ({"output_share": 0.26}, {}, AUTOCAST, "outputs of a reach above 25%"),
        ({"output_share": 0.26, "output_dtype": "float32"}, {}, AUTOCAST, None),
        ({"lost_gradients": 0.06}, {}, AUTOCAST, "8 times larger (a dynamic one grows by itself: start higher"),
        ({"lost_gradients": 0.04}, {}, AUTOCAST, None),
        ({"lost_weight_gradients": 0.06}, {"is_dynamic": False}, AUTOCAST, "the loss scale could be 8 times larger"),
        (
            {"lost_weight_gradients": 0.06},
            {"room": 1.0},
            AUTOCAST,
            "has no room above, as gradients elsewhere are large",
        ),
        ({}, {}, HALF, "a have fp32 parameters within a model in float16"),
        ({"param_dtype": "float16"}, {}, HALF, None),
        ({"param_dtype": "float16"}, {}, AUTOCAST, "a have half-precision parameters, without fp32 masters"),
        ({"param_dtype": "bfloat16"}, {}, FP32, "a have half-precision parameters, without fp32 masters"),
        ({"without_gradient": ("a.bias",)}, {}, AUTOCAST, "no gradient came to a.bias"),
        ({"odd_sizes": ("out_features=10",)}, {}, AUTOCAST, "tensor cores want in half precision: a (out_features=10)"),
        ({"nonfinite": 1}, {}, AUTOCAST, "inf or nan in outputs or gradients of a"),
    ],
)
def test_findings(row, report, recipe, words):
    found = find(replace(REPORT, layers=(replace(ROW, **row),), **report), recipe)
    if words is None:
        assert found == []
    else:
        (line,) = found
        assert words in line


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.Linear(8, 16), ()),
        (nn.Linear(12, 10), ("in_features=12", "out_features=10")),
        (nn.Embedding(100, 12), ("embedding_dim=12",)),
        (nn.Conv2d(3, 16, 3), ()),
        (nn.Conv2d(6, 9, 3), ("in_channels=6", "out_channels=9")),
        (nn.LayerNorm(3), ()),
    ],
)
def test_sizes(module, sizes):
    assert odd_sizes(module) == sizes


# -- over ranks ------------------------------------------------------------------------------------------------------


def report_of(rank, world_size, layout):
    engine = make_engine(layout, "naive", batch=16)
    for x, y in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    report = engine.precision_report()
    engine.close()
    return report


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [layout for layout, (ranks, _) in LAYOUTS.items() if ranks > 1])
def test_all_ranks_have_the_same_report(layout):
    reports = run_ranks(report_of, LAYOUTS[layout][0], layout, timeout=120)
    assert all(report == reports[0] for report in reports)
    alone = report_of(0, 1, "one")
    names = [name for name, module in Net().named_modules() if any(True for _ in module.parameters(recurse=False))]
    assert [row.name for row in reports[0].layers] == names
    for mine, theirs in zip(reports[0].layers, alone.layers, strict=True):
        assert mine.kind.endswith(theirs.kind)  # ColwiseLinear, in a tensor group
        assert (mine.param_dtype, mine.masters) == (theirs.param_dtype, theirs.masters)
        assert mine.output_dtype == theirs.output_dtype == "float16"
        assert mine.gradient_dtype == theirs.gradient_dtype
        assert mine.without_gradient == ()
        if mine.name != "norm":  # statistics of half a batch are others
            assert mine.largest_output == pytest.approx(theirs.largest_output, rel=0.3)
    assert (reports[0].loss_scale, reports[0].updates) == (alone.loss_scale, alone.updates)


def lost_over_ranks(rank, world_size, data):
    """Rank 1's gradients are as small as they can be without being lost."""
    criterion = weighed if rank == 0 else lambda output: (output.float() * 2**-27).sum()
    report = train_once(layer(), {**static("naive", 1.0), "parallel": {"data": data}}, criterion).precision_report()
    return report.layers[0]


@pytest.mark.distributed
@pytest.mark.parametrize("data", ["replicate", "zero1", "fsdp"])
def test_what_is_lost_over_ranks(data):
    rows = run_ranks(lost_over_ranks, 2, data, timeout=60)
    assert rows[0] == rows[1]
    assert rows[0].lost_gradients == (2 + 8) / 16
    # Of weights only where it is lost on both: the mean over the ranks is not zero elsewhere.
    assert rows[0].lost_weight_gradients == 3 / 8
    assert rows[0].largest_gradient == 1.0
