"""Nothing of a source is dropped, whatever it holds; and what is written is the config that was converted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmesh.config.load import load_config
from halfmesh.migration import writing
from halfmesh.migration.convert import Origin, convert
from halfmesh.migration.origins import ORIGINS
from halfmesh.migration.outcome import Converted, NotUnderstood, Without
from halfmesh.migration.source import Code


def flatten(data, path=()):
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([64, 2**16, 0.5, 1.0, 2.0, 1e-3, float("inf"), float("nan"), 10**400]),
    st.sampled_from(
        ["auto", "naive", "torch", "apex", "O1", "O2", "dynamic", "fp16", "bf16", "cpu", "FSDP", "1d", "x\ny"]
    ),
    st.sampled_from([(), [], {}, [1, 2], [{"type": "X"}], Code("f(x)"), b"b", {1}]),
)


def known_names(origin: Origin) -> st.SearchStrategy[str]:
    return st.sampled_from([name for name in origin.rules if not name.endswith("*")])


def nested(names):
    """A dict in which each dotted name leads to its value."""
    data: dict = {}
    for name, value in names:
        inner = data
        *parents, last = name.split(".")
        for parent in parents:
            following = inner.get(parent)
            if not isinstance(following, dict):
                following = inner[parent] = {}
            inner = following
        inner[last] = value
    return data


KEYS = st.one_of(
    st.text(max_size=4), st.sampled_from(["A", "NUM", "a.b", "x y", "class"]), st.integers(0, 3), st.none()
)
ANYTHING = st.dictionaries(KEYS, st.recursive(VALUES, lambda more: st.dictionaries(KEYS, more, max_size=3)), max_size=4)


@pytest.mark.parametrize("name", ORIGINS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_key_is_in_exactly_one_list(name, data):
    origin = ORIGINS[name]
    source = nested(data.draw(st.lists(st.tuples(known_names(origin), VALUES), max_size=7)))
    for key, value in data.draw(ANYTHING).items():
        source.setdefault(key, value)
    world_size = data.draw(st.sampled_from([None, 1, 4, 6]))
    conversion = convert(origin, source, world_size)
    lists = [conversion.of(kind) for kind in (Converted, Without, NotUnderstood)]
    assert sum(map(len, lists)) == len(list(flatten(source))) == len(conversion.entries)
    assert len({entry.key for entry in conversion.entries}) == len(conversion.entries), "two values under one name"
    assert [repr(entry.value) for entry in conversion.entries] == [repr(value) for _, value in flatten(source)]
    text = writing.as_python(conversion, "a file", origin.title)
    writing.verify(text, conversion)
    answer = json.loads(json.dumps(writing.as_json(conversion, text)))
    keys = [row["key"] for part in ("converted", "without_equivalent", "not_understood") for row in answer[part]]
    assert sorted(keys) == sorted(entry.key for entry in conversion.entries)
    for entry in conversion.of(Without) + conversion.of(NotUnderstood):
        assert entry.outcome.reason
        assert all(len(line) <= 120 for line in text.splitlines() if line.startswith("#") and " " in line[5:])
    for entry in conversion.of(Converted):
        assert entry.outcome.settings or entry.outcome.says, entry


@pytest.mark.parametrize("name", ORIGINS)
def test_every_setting_comes_from_an_entry_or_a_default(name):
    """A key that no value and no documented default asked for would be one that halfmesh made up."""
    assert convert(ORIGINS[name], {}).entries == ()
    assert convert(ORIGINS[name], {}).settings == ({"fp16": {"mode": "apex"}} if name == "apex" else {})


@pytest.mark.parametrize("name", ORIGINS)
def test_a_value_that_is_not_known_is_never_taken_for_a_text(name):
    origin = ORIGINS[name]
    for key, rule in origin.rules.items():
        if not rule.any_value and not key.endswith("*"):
            (entry,) = convert(origin, nested([(key, Code("args.x"))])).entries
            assert isinstance(entry.outcome, NotUnderstood), key
            assert entry.outcome.reason == "its value is known only when the file runs: args.x"


def test_long_names_that_begin_alike():
    source = {"x" * 300 + "a": 1, "x" * 300 + "b": 2}
    assert [entry.value for entry in convert(ORIGINS["apex"], source).entries] == [1, 2]


def test_two_names_for_one_key_that_contradict():
    found = convert(ORIGINS["sagemaker"], {"partitions": 2, "pipeline_parallel_degree": 4, "microbatches": 8})
    assert found.config.parallel.pipeline.size == 2
    (entry,) = found.of(NotUnderstood)
    assert entry.key == "pipeline_parallel_degree"
    assert entry.outcome.reason == "it contradicts partitions, which sets parallel.pipeline.size, too"
    agreed = convert(ORIGINS["sagemaker"], {"partitions": 2, "pipeline_parallel_degree": 2, "microbatches": 8})
    assert not agreed.of(NotUnderstood)


def test_a_value_that_halfmesh_refuses():
    found = convert(ORIGINS["apex"], {"opt_level": "O2", "loss_scale": -1.0})
    assert found.config.precision.options.opt_level == "O2"
    (entry,) = found.of(NotUnderstood)
    assert entry.key == "loss_scale"
    assert entry.outcome.reason.startswith("halfmesh refuses it: fp16.loss_scale:")


@pytest.mark.parametrize("world_size", [None, 4])
def test_a_combination_that_halfmesh_refuses_is_found_whether_or_not_the_ranks_are_known(world_size):
    source = {"fp16": {"mode": "apex"}, "parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    found = convert(ORIGINS["colossal"], source, world_size)
    (finding,) = found.findings
    assert "apex's contract has no verdict shared by all ranks" in finding
    assert writing.as_json(found, "")["ok"] is False
    data = {"sharded_data_parallel_degree": 4, "partitions": 2, "microbatches": 2}
    assert convert(ORIGINS["sagemaker"], data, world_size and 8).findings == ()


def test_what_is_written_cannot_break_out_of_its_comment(tmp_path):
    source = {"x\nimport os": "y\nfp16 = 3", "NOTE": "a\nb"}
    conversion = convert(ORIGINS["colossal"], source)
    text = writing.as_python(conversion, "file\nfp16 = 3\x00", "Colossal-AI")
    (tmp_path / "config.py").write_text(text)
    assert load_config(tmp_path / "config.py").to_dict() == {"NOTE": "a\nb"}
