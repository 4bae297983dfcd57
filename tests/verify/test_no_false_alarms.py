"""What is right is called equal: the models of docs/models.md in their layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.models_table.cells import LAYOUTS, all_cells
from tests.models_table.zoo import SUBJECTS
from tests.support.models import MODES
from tests.support.proofs import prove
from tests.support.ranks import PRELOAD

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
PRELOAD.extend(["timm", "torchvision", "halfmesh.verify.run"])
PRELOAD.extend(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5", "mixtral"))


def build_subject(name: str, with_criterion: bool) -> Any:
    """A model of the table, as its users call it: most compute their own loss."""
    subject = SUBJECTS[name]
    batch = {key: value[:8] for key, value in subject.data().items()}
    model = subject.build()
    if not with_criterion:
        return model, batch
    labels = batch.pop("labels")
    return model, (batch.get("x", batch), labels), subject.criterion


MODELS = [cell for cell in all_cells() if cell.refusal is None and cell.layout != "one"]
FAST = ("Llama, fsdp x tensor, none", "BERT, classification, pipeline, none", "timm ResNet, data, none")
CASES = [pytest.param(cell, marks=[] if str(cell) in FAST else [pytest.mark.slow], id=str(cell)) for cell in MODELS]


@pytest.mark.parametrize("cell", CASES)
def test_models_of_the_table_are_equal(cell):
    subject, layout = SUBJECTS[cell.model], LAYOUTS[cell.layout]
    build = partial(build_subject, cell.model, not subject.own_loss or layout.pipeline > 1)
    config = MODES[cell.mode] | layout.config(subject) | {"clip_grad_norm": 0.5}
    assert_equal(prove(config, build, layout.world))


def assert_equal(report):
    assert report.problems == ()
    assert report.first is None
    assert [phase.name for phase in report.phases] == ["structure", "format"]
    assert min(phase.compared for phase in report.phases) > 10
