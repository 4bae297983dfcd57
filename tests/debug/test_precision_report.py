"""`with engine.precision_report()`: what it measures and advises, the same on all ranks."""

import json

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.checkpoint_runs import make_engine
from tests.support.models import make_data
from tests.support.ranks import run_ranks

COEFFICIENTS = torch.tensor([1.0, 1, 1, 1, 2**-27, 2**-27, 0, 2**-20])
"""The gradients of a layer's output, before they are scaled. Half of float16's smallest number is 2**-25."""


@pytest.mark.parametrize(
    ("fp16", "of_weights"),
    [({"mode": "torch", "init_scale": 1.0}, None), ({"mode": "naive", "loss_scale": 1.0}, 1 / 8)],
)
def test_what_is_small_is_what_can_be_computed_by_hand(fp16, of_weights):
    """Gradients of 2**-27 become zero. In mode "torch" the gradients of weights are in fp32."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    criterion = lambda output: (output.float() * COEFFICIENTS).sum()  # noqa: E731
    engine = halfmesh.initialize(model, sgd, criterion, config={"fp16": fp16}, device="cpu")
    with engine.precision_report() as report:
        engine.backward(engine.criterion(engine(torch.ones(2, 8))))
        engine.step()
    (row,) = report.layers
    assert (row.name, row.kind, row.output_dtype, row.gradient_dtype) == ("0", "Linear", "float16", "float16")
    assert (row.zero_gradients, row.subnormal_gradients, row.subnormal_weight_gradients) == (3 / 8, 1 / 8, of_weights)
    assert (row.largest_gradient, row.gradient_share) == (1.0, pytest.approx(1 / 65504))
    assert report.room == 2.0**14  # two samples: the gradients of weights are 2
    (finding,) = report.findings
    assert "more than 5% of the gradients of 0 are below 6.1e-5" in finding
    assert "the loss scale could be 16384 times larger" in finding
    if of_weights:
        line = str(report).splitlines()[2].split()
        assert line[:5] == ["0", "fp16+masters", "fp16", f"{row.largest_output:.2e}", "<0.01%"]
        assert line[-3:] == ["38%", "12%", "12%"]
    plain = json.loads(json.dumps(report.to_dict()))
    assert (plain["layers"][0]["zero_gradients"], plain["findings"]) == (0.375, [finding])


def test_a_block_without_a_step_is_rejected():
    engine = make_engine("one", "none")
    with pytest.raises(halfmesh.InputError, match="ended without a step"), engine.precision_report():
        engine(make_data(4)[0])
    assert not any(module._forward_hooks for module in engine.model.modules())


def reports_of(rank, world_size, layouts):
    found = []
    for layout in layouts:
        with make_engine(layout, "naive", batch=16, samples=16) as engine:
            x, y = next(iter(engine.dataloader))
            with engine.precision_report() as report:
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
            found.append(report)
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_all_ranks_have_the_same_report():
    found, other = run_ranks(reports_of, 2, ["dp2", "tp2", "pp2", "fsdp"], timeout=120)
    assert other == found
    (alone,) = reports_of(0, 1, ["one"])
    for report in found:
        for mine, theirs in zip(report.layers, alone.layers, strict=True):
            assert (mine.name, mine.param_dtype, mine.masters) == (theirs.name, theirs.param_dtype, theirs.masters)
            if mine.name != "norm":  # statistics of half a batch are others
                assert mine.largest_output == pytest.approx(theirs.largest_output, rel=0.3)
