"""What a person reads, and what a program does."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from halfmesh.verify import phases
from halfmesh.verify.report import Difference, Phase, VerifyReport

FORWARD = Difference(
    step=1,
    what="output",
    module="blocks.3.attn",
    difference=4.1e-3,
    allowed=1e-9,
    ranks=(0, 1),
    where="forward of blocks.3.attn: its inputs agree, its output differs by 4.1e-03 (allowed 1e-09) on ranks 0, 1",
    cause="the style 'colwise' does not fit qkv",
    advice="plan={'qkv': 'colwise_split'}",
)
SKIPPED = {f"grad_output of blocks.{n}": "it has no rows" for n in range(6)} | {"output of the model": "other shape"}
GOOD = Phase(
    "structure", "float64", True, None, 812, SKIPPED, {"gradient": 0.02, "output": 1e-5}, 10.24, ("it draws: rand",)
)
BAD = Phase("format", "naive float16", False, FORWARD, 40, {}, {"output": 4.1e6}, 2.0)


def test_a_person_reads_one_line_for_each_phase() -> None:
    report = VerifyReport(True, None, (GOOD, replace(BAD, equal=True, first=None, largest={})), "pp 2 x tp 2", 4, 64)
    assert str(report) == (
        "equal: pp 2 x tp 2 (4 ranks, in place of 64) compared with one process\n"
        "  - structure, float64: equal (812 tensors compared, 7 skipped; 10.2 s); largest difference: gradient, 0.02 "
        "of what is allowed\n"
        "    skipped: grad_output of blocks.0, grad_output of blocks.1, grad_output of blocks.2, "
        "grad_output of blocks.3, grad_output of blocks.4 and 1 more: it has no rows\n"
        "    skipped: output of the model: other shape\n"
        "    note: it draws: rand\n"
        "  - format, naive float16: equal (40 tensors compared; 2.0 s)"
    )


def test_a_person_reads_where_it_differs_first() -> None:
    assert str(VerifyReport(False, FORWARD, (GOOD, BAD), "tp 2", 2)).splitlines()[-4:] == [
        "  - format, naive float16: differs (40 tensors compared; 2.0 s)",
        "first difference: update 1, forward of blocks.3.attn: its inputs agree, its output differs by 4.1e-03 "
        "(allowed 1e-09) on ranks 0, 1",
        "likely cause: the style 'colwise' does not fit qkv",
        "to try: plan={'qkv': 'colwise_split'}",
    ]


def test_the_traceback_of_a_rank_that_failed_is_no_cause() -> None:
    failed = replace(FORWARD, what="failed", where="rank 1 failed: ValueError: x", cause="Traceback: x", advice="")
    assert str(failed) == "first difference: update 1, rank 1 failed: ValueError: x\nTraceback: x"


def test_a_rejection_has_its_reasons() -> None:
    report = VerifyReport(False, None, (), "tp 3", 3, None, ("4 heads cannot be shared by 3 ranks", "another"))
    assert str(report) == (
        "rejected: tp 3 (3 ranks) compared with one process\n  - 4 heads cannot be shared by 3 ranks\n  - another"
    )


def test_json_has_no_infinity() -> None:
    copies = replace(FORWARD, difference=math.inf)
    report = VerifyReport(False, copies, (replace(BAD, largest={"update": math.nan, "loss": 0.5}),), "dp 2", 2)
    answer = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert answer["first"] | {"where": "", "cause": "", "advice": ""} == {
        "step": 1,
        "what": "output",
        "module": "blocks.3.attn",
        "difference": None,
        "allowed": 1e-9,
        "ranks": [0, 1],
        "where": "",
        "cause": "",
        "advice": "",
    }
    assert VerifyReport(True, None, (GOOD,), "dp 2", 2).to_dict()["phases"][0]["skipped"] == SKIPPED
    [phase] = answer["phases"]
    assert (phase["name"], phase["equal"], phase["largest"]) == ("format", False, {"update": None, "loss": 0.5})
    assert (answer["equal"], answer["world_size"], answer["problems"]) == (False, 2, [])


@pytest.mark.parametrize(
    ("device", "shrink", "ranks"),
    [("cpu", None, 4), ("cpu", False, 16), ("cuda", None, 16), ("cuda", True, 4), ("cuda", False, 16)],
)
def test_a_layout_is_shrunk_on_a_cpu_or_if_asked(monkeypatch, device, shrink, ranks) -> None:
    monkeypatch.setattr(phases.Work, "phases", lambda self, folder: [GOOD])
    config = {"parallel": {"tensor": 4}}
    report = phases.verify(config, lambda: None, world_size=16, device=device, shrink=shrink)
    assert (report.world_size, report.shrunk_from) == (ranks, None if ranks == 16 else 16)
