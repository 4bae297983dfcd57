"""Each cell of docs/models.md: proven as `halfmesh verify` proves a layout, or rejected with its message."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.models import MODES
from tests.support.proofs import FormatAlone, StructureAlone, prove

from .cells import LAYOUTS, Cell, all_cells, build, rejection
from .zoo import SUBJECTS

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

# In the default tier: each model with all axes, or the most of them that it has; and what it is rejected with.
MOST = {"timm ConvNeXt": "pipeline", "timm ResNet": "pipeline", "torchvision ResNet": "pipeline", "T5": "fsdp x tensor"}


def is_slow(cell: Cell) -> bool:
    most = MOST.get(cell.model, "all")
    is_plain_rejection = cell.rejection is not None and cell.layout in ("tensor", "pipeline")
    return cell.mode != "none" or (cell.layout != most and not is_plain_rejection)


CELLS = [pytest.param(cell, marks=[pytest.mark.slow] if is_slow(cell) else [], id=str(cell)) for cell in all_cells()]


@pytest.mark.parametrize("cell", CELLS)
def test_trains_to_parity_or_is_rejected(cell):
    """A layout is proven in float64; a mode in half precision within its rounding."""
    subject, layout = SUBJECTS[cell.model], LAYOUTS[cell.layout]
    if cell.rejection is not None:
        assert all(cell.rejection in message for message in layout.run(rejection, cell))
        return
    layout.skip_obstacles()
    given = partial(build, cell.model, not subject.own_loss or layout.pipeline > 1)
    config = MODES[cell.mode] | layout.config(subject) | {"clip_grad_norm": 0.5}
    report = prove(config, given, layout.world, StructureAlone if cell.mode == "none" else FormatAlone)
    assert report.equal, str(report)
    assert min(phase.compared for phase in report.phases) > 10
