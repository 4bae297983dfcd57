"""What is rejected under schedules that compute the gradients of a stage's inputs and of its weights apart."""

from __future__ import annotations

import pytest
import torch

from halfmesh.compat import check
from halfmesh.config.load import load_config
from tests.support.pipeline_parts import SCHEDULES, pipe
from tests.support.versions import TORCH

SPLIT = ("zero_bubble", "zbv", "dualpipev")
pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="rejected: torch counts some weights twice")


def config_of(schedule, **more):
    return {**pipe(microbatches=4, schedule=schedule, **SCHEDULES[schedule]), **more}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parallel": {"data": "fsdp"}}, "which 'fsdp' would miss; use data='zero1', or schedule='interleaved'"),
        ({"compile": True}, "compiled code has one backward for both; remove compile"),
        ({"activation_checkpoint": "full"}, "activations would be computed or fetched twice; remove that"),
        ({"activation_offload": True}, "activations would be computed or fetched twice"),
        (
            {"gradient_dtype": "float32"},
            "adds up the gradients of weights in the dtype of the weights; remove gradient_dtype",
        ),
    ],
)
def test_what_needs_whole_backwards_is_rejected(more, words):
    for schedule in SPLIT:
        config = config_of(schedule)
        config["parallel"] |= more.get("parallel", {})
        found = check(load_config({**config, **more, "parallel": config["parallel"]}), 4, "cpu")
        assert [finding.where for finding in found] == ["parallel.pipeline.schedule"]
        assert words in found[0].message
    assert check(load_config(config_of("interleaved")), 4, "cpu") == []


def test_torch_that_counts_weights_twice_is_rejected(monkeypatch):
    """Those that a stage uses several times: a GRU's, those of a layer that is called twice, tied ones."""
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cpu"))
    for schedule in SPLIT:
        (found,) = check(load_config(config_of(schedule)), 2, "cpu")
        assert "where torch 2.12.1+cpu counts some twice" in found.message
    assert check(load_config(config_of("interleaved")), 2, "cpu") == []
