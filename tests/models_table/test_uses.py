"""Dict and dataclass outputs, several inputs, dict batches and own losses: as one process, in each layout and mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.models import TOLERANCES, said
from tests.support.ranks import RankFailure, run_jobs, run_ranks
from tests.support.versions import TORCH

from .cells import LAYOUTS
from .uses import Use, difference, expected_form, reference, train

pytestmark = pytest.mark.distributed

DATA = ("one", "data", "zero1", "fsdp", "tensor")
USES = [
    *(Use(kind, "own loss", layout) for layout in DATA for kind in ("dict", "tuple", "answer")),
    *(Use("answer", "names", layout) for layout in (*DATA, "pipeline")),
    *(Use("dict", "positions", layout) for layout in ("data", "pipeline")),
    *(Use("tuple", "positions", layout) for layout in ("tensor", "pipeline")),
    *(Use("answer", "own loss", layout, "naive_fp16") for layout in DATA),
    *(Use("dict", "names", layout, "naive_bf16") for layout in ("one", "fsdp", "pipeline")),
    *(Use("tuple", "own loss", layout, "torch_bf16") for layout in ("one", "tensor")),
    *(Use("dict", "own loss", "one", mode) for mode in ("torch_fp16", "apex_o1", "apex_o2")),
    Use("answer", "positions", "pipeline", "torch_fp16"),
]


class Results:
    """All uses of as many ranks run in one launch."""

    def __init__(self) -> None:
        self._known: dict[Use, Any] = {}

    def of(self, use: Use) -> Any:
        if use not in self._known:
            world = LAYOUTS[use.layout].world
            group = [each for each in USES if LAYOUTS[each.layout].world == world]
            self._known |= dict(zip(group, run_jobs([partial(train, use=u) for u in group], world), strict=True))
        return self._known[use]


@pytest.fixture(scope="module")
def results() -> Results:
    return Results()


def trained(results, use):
    found = results.of(use)
    if use.kind == "answer" and use.layout == "fsdp" and TORCH < (2, 13):  # it cannot look into a dataclass
        assert "dataclasses since torch 2.13" in str(found)
        pytest.skip("refused with this version of torch")
    assert not isinstance(found, RankFailure), str(found)
    return found


@pytest.mark.parametrize("use", USES, ids=str)
def test_weights_are_those_of_one_process(use, results):
    found = trained(results, use)
    for weights, _ in found:
        assert difference(weights, reference()) < TOLERANCES[use.mode]


@pytest.mark.parametrize("use", USES, ids=str)
def test_outputs_keep_their_form(use, results):
    found = trained(results, use)
    assert {words for _, words in found} == {expected_form(use)}


def refused(rank: int, world_size: int, use: Use) -> str:
    return said(train, rank, world_size, use)


OWN = "the model's own loss (output.loss) is on the last stage of the pipeline only, one for each microbatch; give a"


@pytest.mark.parametrize(
    ("kind", "words"), [("dict", OWN), ("answer", OWN), ("tuple", "Pass it to engine.criterion(output, target) as it")]
)
def test_an_own_loss_is_refused_under_a_pipeline(kind, words):
    assert all(words in message for message in run_ranks(refused, 2, Use(kind, "own loss", "pipeline")))
