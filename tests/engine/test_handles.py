"""Outputs and losses of a pipeline: every use before backward says what to do; afterwards they are like values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.engine.pipeline_handles import HandleError, LastStageOutput, PipelineLoss, PipelineOutput

X = torch.ones(())
OF_BOTH = {
    "f-string": lambda h: f"{h.sum():.3f}",
    "add": lambda h: h + 1,
    "tensor times": lambda h: X * h,
    "rdiv": lambda h: 1 / h,
    "neg": lambda h: -h,
    "tensor equal": lambda h: h == X,
    "dtype": lambda h: h.dtype,
    "isfinite": lambda h: torch.isfinite(h).all(),
    "into a sum": lambda h: torch.zeros(2, 3).add_(h),
    "numpy": np.asarray,
}
OF_LOSSES = {"float": float, "int": int, "bool": bool}
OF_OUTPUTS = {
    "matmul": lambda h: h @ torch.ones(3, 2),
    "rmatmul": lambda h: torch.ones(2, 2) @ h,
    "index": lambda h: h[0],
    "unpack": lambda h: [*h],
    "length": len,
    "contains": lambda h: 1 in h,
    "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(2, dtype=torch.int64)),
    "module": nn.Linear(3, 2),
    "in place": lambda h: h.__iadd__(1),
}


def loss() -> PipelineLoss:
    return PipelineLoss(output(), None)


def output() -> PipelineOutput:
    return PipelineOutput(None)


@pytest.mark.parametrize(
    ("make", "uses", "message"),
    [
        (loss, OF_BOTH | OF_LOSSES, r"the loss is computed by engine\.backward\(loss\)"),
        (
            output,
            OF_BOTH | OF_OUTPUTS | {"logits": lambda h: h.logits, "setitem": lambda h: h.__setitem__(0, 1)},
            r"the output of engine\(\.\.\.\) is computed by .*keep_outputs=True",
        ),
        (LastStageOutput, OF_BOTH | OF_OUTPUTS, r"only the ranks with the last stage have the output.*is_last_stage"),
    ],
)
def test_every_use_of_what_is_not_there_says_so(make, uses, message):
    for use in uses.values():
        with pytest.raises(HandleError, match=message):
            use(make())


def test_afterwards_it_is_what_it_stands_for():
    for make, value, uses in ((loss, torch.tensor(0.75), OF_LOSSES), (output, torch.rand(2, 3), OF_OUTPUTS)):
        for name, use in (OF_BOTH | uses).items():
            handle = make()
            handle.resolve(value.clone())
            found, expected = use(handle), use(value.clone())
            assert type(found) is type(expected), name
            assert repr(found) == repr(expected), name


def test_an_output_that_was_not_kept():
    handle = output()
    assert not hasattr(handle, "logits")
    assert {copy.copy(handle): 1, handle: 2}[handle] == 2
    handle.drop()
    with pytest.raises(HandleError, match=r"the output of engine.* was not kept: .*keep_outputs=True"):
        handle.argmax(1)
