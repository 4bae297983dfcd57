"""Estimates beside dry runs."""

from __future__ import annotations

import pytest

from halfmesh.plan.candidates import Candidate, Mesh
from halfmesh.plan.dry_run import dry_run_with
from halfmesh.plan.estimates import under_way
from halfmesh.plan.model_facts import find_facts
from halfmesh.plan.profiles import find_profiles
from halfmesh.plan.search import estimated, measured
from halfmesh.plan.workers import Workers
from tests.support.llama import SMALL

KINDS = [("naive-bf16", "off"), ("torch-bf16", "full"), ("fp32", "selective")]
FOUR = Mesh(1, 4, 1, 2)
LAYOUTS = [
    {"mesh": Mesh(1, 1, 1, 2), "strategy": "replicate", "rows": 8},
    {"mesh": FOUR, "strategy": "replicate", "rows": 8, "cycle": 4},
    {"mesh": FOUR, "strategy": "zero1", "rows": 8},
    {"mesh": FOUR, "strategy": "fsdp", "rows": 8, "cycle": 2},
    {"mesh": Mesh(1, 2, 2, 2), "strategy": "fsdp", "rows": 8},
    {"mesh": Mesh(1, 1, 4, 4), "strategy": "replicate", "rows": 8},
    {"mesh": Mesh(2, 2, 1, 2), "strategy": "zero1", "rows": 16, "microbatches": 8},
    {"mesh": Mesh(2, 1, 1, 2), "strategy": "replicate", "rows": 16, "microbatches": 2, "schedule": "gpipe"},
]


@pytest.fixture(scope="module")
def known():
    facts = find_facts(SMALL, (), [1, 2, 4], [1, 2, 4])
    profiles, problems = find_profiles(KINDS, Workers(1, False), SMALL, (), facts)
    assert problems == {}
    return facts, profiles


PAIRS = [(KINDS[0], layout) for layout in LAYOUTS] + [(kind, LAYOUTS[place]) for kind in KINDS[1:] for place in (1, 6)]


@pytest.mark.parametrize(("kind", "layout"), PAIRS, ids=range(len(PAIRS)))
def test_estimates_are_near_dry_runs(known, kind, layout):
    """Within a fifth of the bytes that are needed, and a tenth of those that are sent."""
    facts, profiles = known
    mode, checkpoint = kind
    candidate = Candidate(mode=mode, checkpoint=checkpoint, **layout)
    said = estimated(candidate, profiles[kind], facts, 1)
    mesh = candidate.mesh
    size = mesh.pipeline * mesh.data * mesh.tensor
    run = dry_run_with(Workers(1, False), candidate.config, size, SMALL, rows=candidate.rows)
    assert run.problems == []
    assert run.rows == candidate.rows
    real = measured(said, run)
    assert said.memory == pytest.approx(real.memory, rel=0.2)
    assert said.within == pytest.approx(real.within, rel=0.1)
    assert said.across == pytest.approx(real.across, rel=0.1)
    assert said.bubble == real.bubble


def test_what_is_known_of_the_model(known):
    facts, profiles = known
    assert facts.rows == 8
    assert [stage.blocks for stage in facts.stages[4]] == [0.25] * 4
    assert sum(stage.numel for stage in facts.stages[2]) == facts.numel
    assert facts.root == 2 * 256 * 64 + 64  # embedding, head and last norm
    assert profiles["naive-bf16", "off"].fixed < 100
    assert profiles["torch-bf16", "full"].fixed > facts.numel  # autocast's copies of the last blocks


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches", "expected"),
    [
        ("1f1b", 1, 8, [4, 3, 2, 1]),
        ("1f1b", 1, 4, [4, 3, 2, 1]),
        ("gpipe", 1, 3, [3, 3, 3, 3]),
        ("interleaved", 2, 8, [5.5, 4.5, 3.5, 2.5]),
    ],
)
def test_microbatches_under_way(schedule, chunks, microbatches, expected):
    candidate = Candidate("fp32", Mesh(4, 1, 1, 8), "replicate", 8, 1, schedule, chunks, microbatches)
    assert [under_way(candidate, rank) for rank in range(4)] == expected
