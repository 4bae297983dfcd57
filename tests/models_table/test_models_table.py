"""Each cell of docs/models.md: proven as `halfmesh verify` proves a layout, or rejected with its message."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.models import MODES
from tests.support.proofs import FormatAlone, StructureAlone, prove
from tests.support.ranks import find_obstacle

from .page import LAYOUTS, Cell, all_cells, build
from .zoo import SUBJECTS

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

# In the default tier: each model with all axes, or the most of them that it has; and what it is rejected with.
MOST = {"timm ConvNeXt": "pipeline", "timm ResNet": "pipeline", "torchvision ResNet": "pipeline", "T5": "fsdp x tensor"}


def marks(cell: Cell) -> Any:
    is_plain_rejection = cell.rejection is not None and cell.layout in ("tensor", "pipeline")
    is_quick = cell.layout == MOST.get(cell.model, "all") or is_plain_rejection
    return () if cell.mode == "none" and is_quick else pytest.mark.slow


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=marks(cell), id=str(cell)) for cell in all_cells()])
def test_trains_to_parity_or_is_rejected(cell):
    """A layout is proven in float64; a mode in half precision within its rounding."""
    subject, layout = SUBJECTS[cell.model], LAYOUTS[cell.layout]
    if obstacle := find_obstacle(layout.world, sends=layout.pipeline > 1):
        pytest.skip(obstacle)
    given = partial(build, cell.model, not subject.own_loss or layout.pipeline > 1)
    config = MODES[cell.mode] | layout.config(subject) | {"clip_grad_norm": 0.5}
    report = prove(config, given, layout.world, StructureAlone if cell.mode == "none" else FormatAlone)
    if cell.rejection is not None:
        assert cell.rejection in "".join(report.problems), str(report)
        return
    assert report.equal, str(report)
    assert min(phase.compared for phase in report.phases) > 10
