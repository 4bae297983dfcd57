"""What a person reads, and what a program does."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from halfmesh.verify import phases
from halfmesh.verify.report import Difference, Phase, VerifyReport

WHERE = "forward of blocks.3.attn: its inputs agree, its output differs by 4.1e-03 (allowed 1e-09) on ranks 0, 1"
FORWARD = Difference(
    1, "output", "blocks.3.attn", 4.1e-3, 1e-9, (0, 1), WHERE, "the style does not fit qkv", "plan={'qkv': ...}"
)
SKIPPED = {f"grad_output of blocks.{n}": "it has no rows" for n in range(6)} | {"output of the model": "other shape"}
GOOD = Phase("structure", "float64", True, None, 812, SKIPPED, {"gradient": 0.02, "output": 1e-5}, 10.24, ("a note",))
BAD = Phase("format", "naive float16", False, FORWARD, 40, {}, {"output": 4.1e6}, 2.0)


def test_what_a_person_reads() -> None:
    report = VerifyReport(False, FORWARD, (GOOD, BAD), "pp 2 x tp 2", 4, 64)
    assert str(report) == (
        "differs: pp 2 x tp 2 (4 ranks, in place of 64) compared with one process\n"
        "  - structure, float64: equal (812 tensors compared, 7 skipped; 10.2 s); largest difference: gradient, 0.02 "
        "of what is allowed\n"
        "    skipped: grad_output of blocks.0, grad_output of blocks.1, grad_output of blocks.2, "
        "grad_output of blocks.3, grad_output of blocks.4 and 1 more: it has no rows\n"
        "    skipped: output of the model: other shape\n"
        "    note: a note\n"
        "  - format, naive float16: differs (40 tensors compared; 2.0 s)\n"
        f"first difference: update 1, {WHERE}\n"
        "likely cause: the style does not fit qkv\n"
        "to try: plan={'qkv': ...}"
    )
    failed = replace(FORWARD, what="failed", where="rank 1 failed: ValueError: x", cause="Traceback: x", advice="")
    assert str(failed) == "first difference: update 1, rank 1 failed: ValueError: x\nTraceback: x"
    rejected = VerifyReport(False, None, (), "tp 3", 3, None, ("4 heads cannot be shared by 3 ranks", "another"))
    assert str(rejected) == (
        "rejected: tp 3 (3 ranks) compared with one process\n  - 4 heads cannot be shared by 3 ranks\n  - another"
    )


def test_json_has_no_infinity() -> None:
    copies = replace(FORWARD, difference=math.inf)
    report = VerifyReport(False, copies, (replace(BAD, largest={"update": math.nan, "loss": 0.5}),), "dp 2", 2)
    answer = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    names = ["step", "what", "module", "difference", "allowed", "ranks", "where", "cause", "advice"]
    assert list(answer["first"]) == names
    assert (answer["first"]["difference"], answer["first"]["ranks"]) == (None, [0, 1])
    assert answer["phases"][0]["largest"] == {"update": None, "loss": 0.5}


@pytest.mark.parametrize(("device", "shrink", "ranks"), [("cpu", None, 4), ("cpu", False, 16), ("cuda", None, 16)])
def test_a_layout_is_shrunk_on_a_cpu_or_if_asked(monkeypatch, device, shrink, ranks) -> None:
    monkeypatch.setattr(phases.Work, "phases", lambda self, folder: [GOOD])
    report = phases.verify({"parallel": {"tensor": 4}}, lambda: None, world_size=16, device=device, shrink=shrink)
    assert (report.world_size, report.shrunk_from) == (ranks, None if ranks == 16 else 16)
