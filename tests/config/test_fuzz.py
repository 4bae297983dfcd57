"""Whatever a config is: a Config comes out, or ConfigError. FUZZ=full tries thousands instead of dozens."""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import os
import random
import threading
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfmesh import AMP_TYPE, compat
from halfmesh.config import Config
from halfmesh.config.load import load_config, load_leniently
from halfmesh.config.schema import Settings
from halfmesh.errors import ConfigError, show

MANY = 3000 if os.environ.get("FUZZ") == "full" else 60
LONGEST = 250_000  # characters of a message

fuzz = settings(
    max_examples=MANY, deadline=60_000, suppress_health_check=list(HealthCheck), derandomize=MANY < 1000, database=None
)


class Rude:
    """An object of which nothing can be asked."""

    def _refuse(self, *args):
        raise RuntimeError("no")

    __eq__ = __repr__ = __str__ = __bool__ = __len__ = __iter__ = __lt__ = __float__ = __index__ = _refuse

    def __hash__(self):
        return 7


class Unhashable(Rude):
    __hash__ = Rude._refuse


class RudeText(str):
    """A string whose own methods do not work."""

    __slots__ = ()

    def _refuse(self, *args):
        raise RuntimeError("no")

    __eq__ = __repr__ = __str__ = lower = upper = isupper = partition = __format__ = _refuse

    def __hash__(self):
        return str.__hash__(self)


class Many(dict):
    """A dict that cannot be copied."""

    def __copy__(self, memo=None):
        raise RuntimeError("no")

    __deepcopy__ = __copy__


class Colour(enum.Enum):
    RED = "torch"


def nested(levels, wrap):
    value = wrap(1)
    for _ in range(levels):
        value = wrap(value)
    return value


def in_itself():
    value = {"tensor": 2}
    value["A"] = [value]
    return value


def laughs(width=10, levels=30):
    """A list that would have 10**30 items if it were copied without looking."""
    value = [1]
    for _ in range(levels):
        value = [value] * width
    return value


ODD = {
    "an object": Rude,
    "without a hash": Unhashable,
    "text": lambda: RudeText("torch"),
    "a text key": lambda: {RudeText("size"): 2},
    "a key": lambda: {Rude(): 2},
    "in itself": in_itself,
    "deep lists": lambda: nested(5000, lambda value: [value]),
    "deep tuples": lambda: nested(5000, lambda value: (value,)),
    "deep dicts": lambda: nested(5000, lambda value: {"size": value}),
    "laughs": laughs,
    "a huge integer": lambda: 10**10_000,
    "a negative one": lambda: -(10**10_000),
    "an integer beyond floats": lambda: 10**400,
    "just too large": lambda: 2**63,
    "a long text": lambda: "x" * 300_000,
    "many": lambda: list(range(20_000)),
    "many keys": lambda: {f"key{i}": i for i in range(5_000)},
    "many other keys": lambda: {i: i for i in range(5_000)},
    "half a character": lambda: "\ud800",
    "zero": lambda: "\0",
    "a function": lambda: lambda: 0,
    "a class": lambda: dict,
    "a lock": lambda: [threading.Lock()],
    "not to be copied": lambda: Many(a=1),
    "a proxy": lambda: types.MappingProxyType({"size": 2}),
    "an enum": lambda: Colour.RED,
    "a mode": lambda: AMP_TYPE.NAIVE,
    "a mode as a key": lambda: {AMP_TYPE.NAIVE: 1},
    "bytes": lambda: b"\xff" * 1000,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "complex": lambda: 1j,
    "a frozenset": lambda: frozenset({1, (2, 3)}),
}

PLACES = [
    *([key] for key in Settings.model_fields),
    *(
        [key, inner]
        for key in ("fp16", "bf16", "compile", "clip_grad_norm")
        for inner in ("mode", "max_norm", "backend")
    ),
    *(["parallel", key] for key in ("tensor", "pipeline", "data", "other")),
    *(["parallel", "tensor", key] for key in ("size", "plan", "mode")),
    ["parallel", "tensor", "plan", "blocks.*"],
    *(
        ["parallel", "pipeline", key]
        for key in ("size", "microbatches", "schedule", "partition", "non_split", "chunks")
    ),
    *(["parallel", "data", key] for key in ("strategy", "size", "reduce_dtype", "bucket_mb", "hybrid", "cpu_offload")),
    ["activation_checkpoint", "patterns"],
    ["CONSTANT"],
    ["CONSTANT", "of", "mine"],
    ["unknown"],
]

VALID = [
    {"fp16": {"mode": "torch", "init_scale": 1024.0}, "parallel": {"tensor": 2, "data": "zero1"}, "N": [1, (2, 3)]},
    {"fp16": {"mode": "naive", "hysteresis": 3}, "clip_grad_norm": 1.0, "gradient_accumulation": 4, "seed": 5},
    {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}, "lr_interval": "epoch"},
    {"bf16": {"mode": "naive"}, "parallel": {"data": {"strategy": "fsdp", "hybrid": 2, "prefetch": 2}}},
    {"parallel": {"pipeline": {"size": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}}},
    {"parallel": {"tensor": {"size": 2, "plan": {"blocks.*.a": "colwise"}}}, "compile": True},
    {"activation_checkpoint": {"every": 2}, "activation_offload": True, "loss_reduction": "sum"},
    {"compile": {"scope": "blocks", "backend": "eager"}, "A": {"b": {1: None, "c": {2}}}, "B": "= <<: ~"},
]


def outcome(config, world_size=4, device="cpu"):
    """The Config, or None after a ConfigError; every other exception is the test's."""
    try:
        loaded = load_config(config)
    except ConfigError as error:
        refusal = error
    else:
        return accepted(config, loaded, world_size, device)
    assert refusal.problems
    assert len(str(refusal)) < LONGEST
    str(refusal).encode()
    assert load_leniently(config)[1] == list(refusal.problems)
    return None


def accepted(config, loaded, world_size, device):
    assert isinstance(loaded, Config)
    assert not plain(loaded.user) or load_leniently(config) == (loaded, [])
    for finding in compat.check(loaded, world_size, device):
        assert len(str(finding)) < LONGEST
    repr(loaded)
    return loaded


def plain(value):
    """Whether YAML can hold `value`, and a value like it is equal to it."""
    try:
        return copy.deepcopy(value) == value and "nan" not in repr(value)
    except Exception:
        return False


def goes_round(loaded):
    """A config comes back from what it writes."""
    if not plain(loaded.to_dict()):
        return
    assert load_config(loaded.to_dict()) == loaded
    with contextlib.suppress(ConfigError):  # what YAML cannot hold
        text = loaded.to_yaml()
        assert load_text(text, ".yaml") == loaded


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("configs")


def load_text(content, suffix):
    path = FOLDER / f"config{suffix}"
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return outcome(path)


def shape(value, seen=None):
    """What `value` is made of, by identity where it cannot be compared: for before and after."""
    seen = set() if seen is None else seen
    if id(value) in seen or len(seen) > 150:
        return "again"
    seen.add(id(value))
    if type(value) in (dict, Many):
        return id(value), [(shape(key, seen), shape(item, seen)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return id(value), len(value), [shape(item, seen) for item in value[:3]]
    return id(value), type(value)


def at(place, value):
    for key in reversed(place):
        value = {key: value}
    return value


def put(config, place, value):
    """`config` with `value` at `place`."""
    key, *rest = place
    inside = config.get(key) if isinstance(config.get(key), dict) else {}
    return {**config, key: put(inside, rest, value) if rest else value}


@pytest.mark.parametrize("name", ODD)
def test_odd_values_in_each_place(name):
    step = 1 if MANY > 1000 else 32 if name == "laughs" else 3  # "laughs" takes a second each
    places = PLACES[list(ODD).index(name) % step :: step]
    for place in places:
        value = ODD[name]()
        config = at(place, value)
        before = shape(config)
        outcome(config)
        assert shape(config) == before, place


@pytest.mark.parametrize("name", ODD)
def test_odd_configs_and_keys(name):
    value = ODD[name]()
    outcome(value if name != "a long text" else value[:300])
    with contextlib.suppress(RuntimeError, TypeError):  # what cannot be a key
        config = {value: 1, "seed": 2}
        outcome(config)
        outcome({"fp16": {"mode": "torch", value: 1}})
        outcome({"parallel": {"tensor": {"plan": {value: "colwise"}}}})


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=20),
    st.sampled_from([2**31, 2**63, -1, 0, 1, 2, 1e308, "torch", "auto", "fsdp", "1e5", "0x10", "O2", "\ud800"]),
    st.sampled_from(list(AMP_TYPE)), st.complex_numbers(), st.dates(),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=8), st.integers(), st.sampled_from([None, True, (1, 2), AMP_TYPE.TORCH, b"x"]))
NAMES = st.sampled_from([*Settings.model_fields, "mode", "size", "strategy", "every", "CONSTANT", "N", "max_norm"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(KEYS, NAMES), inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=20,
)


@fuzz
@given(st.one_of(st.dictionaries(st.one_of(KEYS, NAMES), VALUES, max_size=8), VALUES))
def test_anything(config):
    before = shape(config)
    loaded = outcome(config)
    assert shape(config) == before
    if loaded is not None:
        goes_round(loaded)


@fuzz
@given(st.dictionaries(st.text("ABC_", min_size=1, max_size=3), VALUES, max_size=4))
def test_constants_go_round(constants):
    loaded = outcome({**constants, "seed": 3})
    if loaded is not None:
        goes_round(loaded)


@st.composite
def near_valid(draw):
    config = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(PLACES))
        action = draw(st.sampled_from(["value", "misspelt", "nested", "gone"]))
        if action == "value":
            config = put(config, place, draw(st.one_of(SCALARS, VALUES)))
        elif action == "misspelt":
            key = place[-1]
            cut = draw(st.integers(0, len(key)))
            config = put(config, [*place[:-1], key[:cut] + draw(st.text(max_size=2)) + key[cut + 1 :]], 2)
        elif action == "nested":
            config = put(config, [*place, draw(st.text(max_size=5))], draw(SCALARS))
        else:
            config.pop(place[0], None)
    return config


@fuzz
@given(near_valid(), st.one_of(st.integers(), st.sampled_from([1, 2, 4, 8, 10**9, 2**40])), st.text(max_size=6))
def test_configs_that_are_nearly_right(config, world_size, device):
    before = shape(config)
    loaded = outcome(config, world_size, device)
    assert shape(config) == before
    if loaded is not None:
        goes_round(loaded)


@pytest.mark.parametrize("config", VALID)
def test_valid_configs(config):
    loaded = outcome(config)
    assert loaded is not None
    goes_round(loaded)


TEXTS = [
    "fp16: {mode: naive, loss_scale: dynamic}\nparallel:\n  tensor: 2\n  data: zero1\nseed: 7\nN: &n [1, 2]\nM: *n\n",
    "base: &base {size: 2}\nparallel:\n  tensor:\n    <<: *base\n    plan: auto\nT: !!python/tuple [1, 2]\n",
    '{"fp16": {"mode": "naive"}, "parallel": {"pipeline": {"size": 2, "microbatches": 4}}, "N": [1, 2, null]}',
    "from halfmesh import AMP_TYPE\nfp16 = dict(mode=AMP_TYPE.NAIVE)\nfor n in range(3):\n    N = n\nseed = 1\n",
]
PIECES = [
    *("&a ", "*a", "!!int ", "!!bool x", "!!timestamp x", "!!float .", "!!binary é", "<<: ", "? ", "- ", ": ", "\t"),
    *("{", "}", "[", "]", "'", '"', "|", ">", "%YAML 9.9\n", "---\n", "...\n", "\0", "\ufeff", "\x85", "\ud800", "\n"),
    *("!!python/object/apply:os.system ['false']", "!!set ", "!!omap ", "1_0:99", "=", "1e999", "9" * 5000),
]


@st.composite
def damaged(draw, texts=TEXTS):
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        action = draw(st.sampled_from(["cut", "insert", "drop", "random"]))
        if action == "cut":
            text = text[:at]
        elif action == "insert":
            text = text[:at] + draw(st.sampled_from(PIECES)) + text[at:]
        elif action == "drop":
            text = text[:at] + text[at + draw(st.integers(1, 5)) :]
        else:
            text = text[:at] + draw(st.text(max_size=3)) + text[at:]
    return text


@fuzz
@given(damaged(TEXTS[:3]), st.sampled_from([".yaml", ".json", ".yml"]))
def test_damaged_text(text, suffix):
    load_text(text, suffix)


@fuzz
@given(damaged(TEXTS[3:]))
def test_damaged_python(text):
    load_text(text, ".py")


@fuzz
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60)), st.sampled_from([".yaml", ".json"]))
def test_random_text(content, suffix):
    load_text(content, suffix)


FILES = [
    *(b"\xff\xfe\x00", b"\xef\xbb\xbf", b"seed: 1\x00", b"[" * 100_000, b"{" * 100_000, b"- " * 20_000),
    *(b'{"a":' * 50_000, b"seed = " + b"9" * 5000, b"seed: " + b"9" * 5000, b"A = " + b"-" * 20_000 + b"1", b"\t"),
    *(b"# " + b"x" * 1_000_000, b"if A:\n  pass\n" + b"elif A:\n  pass\n" * 3000, b"raise SystemExit"),
    *(b"class E(Exception):\n def __str__(self): 1 / 0\nraise E", b"raise ValueError('x' * 10**6)"),
]


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".py"])
@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_odd_files(suffix, content):
    load_text(content, suffix)


def test_a_byte_order_mark_is_no_part_of_the_config():
    for suffix, text in ((".yaml", "seed: 7"), (".json", '{"seed": 7}'), (".py", "seed = 7")):
        assert load_text(f"\ufeff{text}\n", suffix).seed == 7


def test_aliases_that_stand_for_too_much():
    lists = ["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))]
    merged = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 30))]
    for lines in (lists, merged, ["A: &a [*a]"], ["A: &a {b: *a}"], ["? &a [*a]\n: 1"]):
        assert load_text("\n".join(lines), ".yaml") is None
    (FOLDER / "laughs.yaml").write_text("\n".join(lists))
    (FOLDER / "itself.yaml").write_text("A: &a [*a]")
    with pytest.raises(ConfigError, match="line 1: an alias stands within what it is an alias of"):
        load_config(FOLDER / "itself.yaml")
    with pytest.raises(ConfigError, match="with aliases written out it holds more than 1000000 values"):
        load_config(FOLDER / "laughs.yaml")
    assert load_text("A: &a [1]\nB: [*a, *a]\n", ".yaml").B == [[1], [1]]


def test_many_keys_take_no_time_each():
    assert load_text("\n".join(f"key{i}: 1" for i in range(3000)), ".yaml") is None
    assert load_text(json.dumps({f"key{i}": 1 for i in range(50_000)}), ".json") is None
    with pytest.raises(ConfigError, match="and 4950 more in fp16"):
        load_config({"fp16": {"mode": "naive", **{f"key{i}": 1 for i in range(5000)}}})
    with pytest.raises(ConfigError, match="and 950 more unknown keys"):
        load_config({f"key{i}": 1 for i in range(1000)})


@pytest.mark.parametrize(
    "path", ["~nobody-of-that-name/a.py", "a" * 5000 + ".yaml", "\0.yaml", "\ud800.yaml", "x\0", ""]
)
def test_odd_paths(path):
    assert outcome(path) is None
    assert outcome(RudeText(path)) is None


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(ConfigError, match=r"it cannot be read .*Permission denied"):
        load_config(path)


def test_messages_name_the_reason():
    for value, reason in (
        (in_itself(), "it contains itself, or is nested more than 100 levels deep"),
        (laughs(), "it holds more than 10000000 values"),
        (Many(a=1), "cannot be used: RuntimeError: no"),
    ):
        with pytest.raises(ConfigError, match=rf"CONSTANT: .*{reason}"):
            load_config({"CONSTANT": value})
    with pytest.raises(ConfigError, match="seed: <an integer of 33220 bits>"):
        load_config({"seed": 10**10_000})
    with pytest.raises(ConfigError, match=r"gradient_accumulation: 9.22e\+18 is too large: integers have 64 bits"):
        load_config({"gradient_accumulation": 2**63})
    with pytest.raises(ConfigError, match=r"N: YAML cannot hold it .*4300 digits"):
        load_config({"N": 10**10_000}).to_yaml()
    finding = compat.check(load_config({"parallel": {"tensor": 2}}), 10**18 + 1, "cpu")[0]
    assert str(finding) == f"world_size: {10**18 + 1} is not a number of ranks; torch counts at most 2147483647"
    assert show(type("list", (Rude,), {})()) == "<list>"


def test_the_command(tmp_path):
    """`halfmesh check` says what is wrong, with the exit status 1."""
    from typer.testing import CliRunner

    from halfmesh.cli import app

    chance = random.Random(0)
    for i in range(MANY // 6):
        suffix, text = chance.choice([(".yaml", TEXTS[0]), (".yaml", TEXTS[1]), (".json", TEXTS[2]), (".py", TEXTS[3])])
        for _ in range(2):
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(PIECES) + text[at + chance.randrange(3) :]
        path = tmp_path / f"config{i}{suffix}"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        asked = ["check", str(path), "--world-size", str(chance.choice([1, 4, 0, 10**12])), "--device", "cpu"]
        result = CliRunner().invoke(app, [*asked, *chance.choice([[], ["--json"]])])
        assert result.exit_code in (0, 1), (text, result.output)
        assert result.exception is None or isinstance(result.exception, SystemExit), (text, result.exception)
