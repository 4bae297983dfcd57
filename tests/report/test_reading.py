"""What is read of a run's folder, also where it is damaged, and how numbers come into a chart."""

from __future__ import annotations

import json
import math
import random

import pytest

from halfmesh.errors import InputError
from halfmesh.report.axes import in_bytes, make_axis, readable
from halfmesh.report.compare import Row, changes, set_keys
from halfmesh.report.page import as_data, make_page
from halfmesh.report.run import Series, read_run, read_runs
from halfmesh.report.thinning import find_ranges, in_words, thin
from tests.support.report_runs import PRECISION, make_config, make_plan, make_records, write_run


def test_a_whole_run(tmp_path):
    run = read_run(write_run(tmp_path / "one"))
    assert run.notes == []
    assert run.skipped == [3, 4, 57, 200, 201, 202]
    assert (run.skipped_count, run.last_step) == (6, 400)
    assert run.series["eval_loss"].steps == [100, 200, 300, 400]
    assert run.series["loss"].values[19] is None
    assert "skipped_steps" not in run.series
    assert run.session["argv"] == ["train.py", "--config", "config.py"]


def test_a_killed_run(tmp_path):
    folder = write_run(tmp_path / "one", precision=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "loss": 0.')
    (folder / "plan.json").unlink()
    (folder / "config.json").write_text('{"sessions": [')
    run = read_run(folder)
    assert run.last_step == 400
    assert run.notes == [
        "the last line of metrics.jsonl was cut off, as when a run is killed, and is left out",
        "config.json cannot be read (JSONDecodeError)",
        "plan.json is missing",
    ]
    page = make_page([run])
    assert all(note in page for note in run.notes)
    assert "3-4, 57, 200-202" in page


def test_lines_that_are_no_records(tmp_path):
    lines = ["[1, 2]", '{"loss": 3}', '{"step": "x"}', '{"step": NaN}', '{"step": -1}', "\x00\x00", '{"step": 1e999}']
    lines += ["[" * 100_000, '{"step": 2, "loss": 1.5, "note": "text", "flag": true}', "", '{"step": 1, "loss": NaN}']
    folder = write_run(tmp_path / "one", records=[])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert run.notes == ["8 line(s) of metrics.jsonl are no records, and are left out"]
    assert run.series == {"loss": Series([1, 2], [None, 1.5])}


def test_skips_without_a_number(tmp_path):
    records = [{"step": 10, "skipped_steps": 5, "skipped": [2, 3]}, {"step": 20, "skipped_steps": 5}]
    run = read_run(write_run(tmp_path / "one", records=records))
    assert run.skipped == [2, 3]
    assert run.notes[0].startswith("3 of 5 skipped updates have no number")


def test_no_records_at_all(tmp_path):
    folder = write_run(tmp_path / "one", records=[])
    assert "has no records" in read_run(folder).notes[0]
    (folder / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in read_run(folder).notes[0]
    assert "metrics.jsonl is missing" in make_page([read_run(folder)])


@pytest.mark.parametrize("seed", range(100))
def test_any_damage_makes_a_page(tmp_path, seed):
    """Some values anywhere in the files are something else."""
    chance = random.Random(seed)
    odd = [None, [], {}, "", "text", "</script>", -1, 0, 1.5, True, 10**400, 1e308, -1e308, math.inf, math.nan, [[]]]
    odd += [[None], {"a": {}}, "\ud800", "\x00", 5e-324, 10**18, ["1"], "2026-99-99"]

    def spoil(value):
        if chance.random() < 0.12:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        return [spoil(item) for item in value] if isinstance(value, list) else value

    folder = write_run(
        tmp_path / "one",
        spoil(make_config()),
        spoil(make_plan()),
        [spoil(record) for record in make_records(steps=60, every=3)],
        spoil(PRECISION),
    )
    runs = read_runs([folder] * chance.choice([1, 2]))
    page = make_page(runs)
    assert page.encode().startswith(b"<!doctype html>")
    assert page.count("</script>") == 2
    json.dumps(as_data(runs))


def test_what_is_no_run(tmp_path):
    write_run(tmp_path / "first")
    write_run(tmp_path / "second")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "frist": r"there is no folder .*frist; did you mean '.*first'\?",
        "else": "there is no folder .*else; runs beside it: .*first, .*second",
        "empty": r"empty is no run's folder: it has none of config\.json, .*; runs beside it: .*first",
        "first/metrics.jsonl": r"is a file, but a run is a folder; give .*first",
        ".": "holds runs and is none itself: give first, second",
    }.items():
        with pytest.raises(InputError, match=message):
            read_runs([tmp_path / name])
    with pytest.raises(InputError, match="there is no run to report"):
        read_runs([])


def test_names_of_runs_differ(tmp_path):
    paths = [write_run(tmp_path / name) for name in ("a/run", "b/run", "c")]
    assert [run.name for run in read_runs([*paths, paths[0]])] == ["a/run (1)", "b/run", "c", "a/run (4)"]


# -- thinning ----------------------------------------------------------------------------------------------------


def test_thinning_keeps_extremes_gaps_and_ends():
    values: list[float | None] = [math.sin(n / 1000) for n in range(100_000)]
    values[50_001], values[70_003], values[30_007] = 99.0, -99.0, None
    thinned = thin(Series(list(range(1, 100_001)), values), 400)
    kept = dict(zip(thinned.steps, thinned.values, strict=True))
    assert len(kept) <= 400 * 3 + 2
    assert (kept[50_002], kept[70_004], kept[30_008]) == (99.0, -99.0, None)
    assert {1, 100_000} <= set(kept)
    assert thinned.steps == sorted(kept)
    few = Series([1, 2, 3], [1.0, None, 2.0])
    assert thin(few, 400) is few


def test_ranges():
    assert find_ranges([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]
    assert in_words([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert in_words([]) == ""


# -- axes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "base", "expected"),
    [
        ([0.01, 2.3], None, ["0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        ([1.0, 65536.0], 2, ["2⁰", "2⁴", "2⁸", "2¹²", "2¹⁶"]),
        ([65536.0], 2, ["2¹⁵", "2¹⁶", "2¹⁷"]),
        ([1e-3, 50.0], 10, ["10⁻³", "10⁻²", "10⁻¹", "10⁰", "10¹", "10²"]),
        ([0.0, 8.0], 2, ["0", "2", "4", "6", "8"]),
        ([0.0, 1e5], None, ["0", "20k", "40k", "60k", "80k", "100k"]),
        ([10_000.0, 12_345.0], None, ["10.0k", "10.5k", "11.0k", "11.5k", "12.0k", "12.5k"]),
        ([3e-6, 2e-4], None, ["0", "5e-5", "1.0e-4", "1.5e-4", "2.0e-4"]),
        ([5.0, 5.0], None, ["4.4", "4.6", "4.8", "5.0", "5.2", "5.4", "5.6"]),
    ],
)
def test_ticks(values, base, expected):
    assert [text for _, text in make_axis(values, 5, base).ticks] == expected


@pytest.mark.parametrize("base", [None, 2, 10])
def test_an_axis_holds_any_values(base):
    chance = random.Random(0)
    for _ in range(2000):
        values = [chance.choice([-1, 1]) * chance.random() * 10.0 ** chance.randint(-320, 308) for _ in range(3)]
        axis = make_axis(values, 5, base)
        assert 2 <= len(axis.ticks) <= 14
        assert len({text for _, text in axis.ticks}) == len(axis.ticks)
        assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick, _ in axis.ticks)
        assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values if abs(value) < 1e300)


def test_an_axis_of_updates_ends_where_they_do():
    axis = make_axis([0, 997], 5, whole=True)
    assert axis.high == 997
    assert [text for _, text in axis.ticks] == ["0", "200", "400", "600", "800"]
    assert [text for _, text in make_axis([0, 1], 9, whole=True).ticks] == ["0", "1"]


def test_values_in_tables():
    assert [readable(v) for v in (None, 3.0, 12345.6, 0.0123456, 1e20)] == ["-", "3", "12,346", "0.012346", "1e+20"]
    assert [in_bytes(v) for v in (12, 3 * 2**20, 2**50)] == ["12 B", "3.0 MiB", "1024.0 TiB"]


# -- configs -----------------------------------------------------------------------------------------------------


def test_differences_of_configs(tmp_path):
    config = {"bf16": {"mode": "naive"}, "NUM_EPOCHS": 3, "clip_grad_norm": {"max_norm": 1.0}}
    settings = {"fp16": None, "bf16": {"mode": "naive"}, "clip_grad_norm": {"max_norm": 1.0}, "seed": 7}
    other = write_run(tmp_path / "two", make_config(config=config, settings=settings))
    rows = set_keys(read_runs([write_run(tmp_path / "one"), other]))
    assert {row.key: row.values for row in rows if row.differs} == {
        "fp16.mode": ("naive", None),
        "fp16.initial_scale": ("65536.0", None),
        "bf16.mode": (None, "naive"),
        "clip_grad_norm.max_norm": (None, "1.0"),
        "seed": ("1024", "7"),
    }
    assert Row("NUM_EPOCHS", ("3", "3")) in rows


def test_what_a_run_went_on_with(tmp_path):
    config = make_config()
    again = {**config["sessions"][0], "from_step": 150, "settings": {"seed": 7}, "world_size": 4}
    run = read_run(write_run(tmp_path / "one", {"sessions": [*config["sessions"], again]}))
    assert "one, from update 150: seed 1024 -> 7" in changes([run])
