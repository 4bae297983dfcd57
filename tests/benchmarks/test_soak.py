"""benchmarks.soak: a short one holds, and what does not hold is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import soak


@pytest.mark.distributed
def test_a_short_one():
    courses = soak.run(200, 20)
    assert [problem for problem in soak.judge(courses) if "objects" not in problem] == []
    assert [course.skipped for course in courses] == [course.injected for course in courses]
    assert courses[0].skipped > 1
    assert courses[0].last_loss < courses[0].first_loss
    assert len(courses[0].looks) == 20
    text = soak.render(courses, 200, {"Python": "3"}, [])
    assert "Everything held." in text
    assert f"| {courses[1].skipped} of {courses[1].injected} |" in text


def course(**kib_of_step):
    looks = [soak.Look(int(step[1:]), kib, 1000, 2, 12) for step, kib in kib_of_step.items()]
    return soak.Course(looks, save_every=1)


def test_what_grows_is_found():
    steady = course(**{f"s{step}": 5000 + step % 2000 // 1000 for step in range(1000, 21000, 1000)})
    assert soak.judge([steady]) == []
    growing = course(**{f"s{step}": 5000 + step * 0.03 for step in range(1000, 21000, 1000)})
    assert soak.slope(growing.looks)[0] == pytest.approx(30)
    assert soak.judge([steady, growing]) == ["rank 1: memory grows by 30.0 KiB in 1,000 steps"]
    for name, by in (("threads", 1), ("descriptors", 1), ("objects", 201)):
        last = replace(steady.looks[-1], **{name: getattr(steady.looks[-1], name) + by})
        changed = replace(steady, looks=[*steady.looks[:-1], last])
        assert soak.judge([changed]) == [f"rank 0: {by} more {name} than after the warm-up"]
    assert soak.judge([replace(steady, violations=["step 3: the scale is 0"])]) == ["rank 0: step 3: the scale is 0"]


def test_overflows_are_the_same_on_all_ranks_and_on_either():
    found = [soak.overflows(step) for step in range(5000)]
    assert {one for one in found if one} == {(rank, micro) for rank in range(2) for micro in range(2)}
    assert 60 < sum(one is not None for one in found) < 140
