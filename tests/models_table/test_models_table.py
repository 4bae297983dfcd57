"""Each cell of docs/models.md: trained to the weights of one process, or refused with its message."""

from __future__ import annotations

import pytest

from .cells import LAYOUTS, Cell, all_cells, find_problems, train

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

# In the default tier: each model with all axes, or the most of them that it has; and what it is refused with.
MOST = {"timm ConvNeXt": "pipeline", "timm ResNet": "pipeline", "torchvision ResNet": "pipeline", "T5": "fsdp x tensor"}


def is_slow(cell: Cell) -> bool:
    most = MOST.get(cell.model, "all")
    is_plain_refusal = cell.refusal is not None and cell.layout in ("tensor", "pipeline")
    return cell.mode != "none" or (cell.layout != most and not is_plain_refusal)


CELLS = [pytest.param(cell, marks=[pytest.mark.slow] if is_slow(cell) else [], id=str(cell)) for cell in all_cells()]


@pytest.mark.parametrize("cell", CELLS)
def test_trains_to_parity_or_is_refused(cell):
    outcomes = LAYOUTS[cell.layout].run(train, cell)
    assert list(find_problems(cell, outcomes)) == []
