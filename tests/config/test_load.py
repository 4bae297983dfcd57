"""load_config: every kind of source, which names of a .py config are settings, and overrides."""

import re
import sys
import textwrap
import types

import pytest

from halfmesh import ConfigError, get_default_parser, load_config
from halfmesh.cli.run import read_options


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write_file


@pytest.fixture(autouse=True)
def nothing_stays():
    """Loading leaves sys.path as it was, and no config in sys.modules."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    libraries = ("torch.", "halfmesh.", "sympy.")  # which an error may be the first to need
    new = {name for name in set(sys.modules) - modules if not name.startswith(libraries)}
    assert [name for name in new if "config" in name or name == "base"] == []
    assert sys.path == path


def test_the_same_config_from_every_source(write):
    expected = load_config({"fp16": {"mode": "naive"}, "clip_grad_norm": 1.0, "N": [1]})
    assert load_config(write("a.py", "fp16 = dict(mode='naive')\nclip_grad_norm = 1.0\nN = [1]\n")) == expected
    assert load_config(write("a.yml", "fp16:\n  mode: naive\nclip_grad_norm: 1\nN:\n- 1\n")) == expected
    assert load_config(str(write("a.json", '{"fp16": {"mode": "naive"}, "clip_grad_norm": 1, "N": [1]}'))) == expected
    assert load_config(types.MappingProxyType(expected.to_dict())) == expected
    assert load_config(expected) is expected
    assert load_config(write("empty.yaml", "# nothing\n")) == load_config({})
    assert load_config(write("marked.yaml", "\ufeffseed: 7\n")).seed == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ymal", "", "its suffix is '.ymal'; allowed: .py, .yaml, .yml, .json"),
        ("a.yaml", "- 1\n", "its top level is of type list, but a config must map keys to values"),
        ("a.yaml", "seed: 3\nseed: 4\n", "not valid YAML: line 2, column 1: 'seed' is given twice"),
        ("a.json", '{"seed": 3, "seed": 4}', "not valid JSON: 'seed' is given twice"),
        ("a.yaml", "seed: 1\nfp16: {mode: [\n", "line 3, column 1: expected the node content"),
        ("a.yaml", "seed: !!python/object:os.system {}", "line 1, column 7: could not determine a constructor"),
        ("a.py", "seed = 3\nlr = = 2\n", "a.py:2: SyntaxError: invalid syntax"),
        ("a.py", "def f():\n    return [][1]\nseed = f()\n", "a.py:2: IndexError: list index out of range"),
        ("a.py", "from broken import *\n", "broken.py:2: NameError: name 'x' is not defined"),
        ("a.py", "raise SystemExit(3)\n", "a.py:1: SystemExit: 3"),
        ("a.py", "seed = len\n", "seed: "),
        ("none/config.py", None, "there is no such file in"),
        ([("seed", 3)], None, "a list was given, but a config must be a path (.py, .yaml, .yml, .json), a dict ({} tr"),
    ],
)
def test_what_cannot_be_read(write, name, text, message):
    """The one problem that is reported, and where."""
    write("broken.py", "seed = 3\nseed = x\n")
    source = name if text is None else write(name, text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(source)
    assert len(caught.value.problems) == 1
    assert text is None or caught.value.source == str(source)


def test_numbers_with_an_exponent_in_yaml(write):
    numbers = {"1e-3": 1e-3, "1E5": 1e5, "-5e-4": -5e-4, "+2e+3": 2e3, "1.5e5": 1.5e5, ".5e1": 5.0, "6.e-2": 0.06}
    strings = ("'1e-3'", "1e-3b", "e-3", "1e", "0x1e-3", "1 e-3")
    text = "".join(f"N{i}: {number}\n" for i, number in enumerate([*numbers, *strings]))
    values = list(load_config(write("a.yaml", f"clip_grad_norm: 1e-3\n{text}")).user.values())
    assert values == [*numbers.values(), *(string.strip("'") for string in strings)]


def test_helpers_and_imports_are_no_settings(write):
    code = """
        from __future__ import annotations
        import functools
        import os.path as timeout
        from math import pi as PI
        from torch import compile
        from halfmesh import AMP_TYPE
        class Helper: seed: int = 3
        def make(mode): return dict(mode=mode)
        _helper = 3
        make_half = functools.partial(make)
        for _i in range(3):
            seed = _i
        fp16 = make(AMP_TYPE.NAIVE)
        TOTAL = sum(n for n in range(3)) + Helper().seed
        KIND = Helper
        """
    config = load_config(write("config.py", code))
    expected = {"fp16": {"mode": "naive"}, "seed": 2, "TOTAL": 6, "PI": pytest.approx(3.14159)}
    assert config.to_dict() == expected | {"KIND": config.KIND}


def test_what_is_imported_from_siblings(write):
    """Those of two folders do not mix, and are read again."""
    write("base.py", "clip_grad_norm = 2.0\nseed = 5\nEPOCHS = 3\ndef helper(): return 7\n_hidden = 3\n")
    star = write("config.py", "from base import *\nseed = 6\nEPOCHS += helper()\n")
    assert load_config(star) == load_config({"seed": 6, "clip_grad_norm": 2.0, "EPOCHS": 10})
    assert load_config(write("config.py", "from .base import clip_grad_norm")) == load_config({"clip_grad_norm": 2.0})
    for name, seed in (("one", 1), ("two", 2), ("one", 3)):
        write(f"{name}/base.py", f"seed = {seed}\n")
        assert load_config(write(f"{name}/config.py", "from base import *\n")).seed == seed
    before = sys.modules["json"]  # a name of a real module hides nothing
    write("json.py", "seed = 5\n")
    code = "import json\nORIGIN = json.dumps(1)\nfrom .json import seed\n"
    assert load_config(write("config.py", code)).to_dict() == {"seed": 5, "ORIGIN": "1"}
    assert sys.modules["json"] is before


BASE = {"fp16": {"mode": "torch"}, "parallel": {"tensor": 2}, "clip_grad_norm": 1.0, "NUM_EPOCHS": 9}


@pytest.mark.parametrize(
    ("overrides", "equal"),
    [
        (["parallel.tensor.sequence_parallel=true"], {"parallel": {"tensor": {"size": 2, "sequence_parallel": True}}}),
        (["parallel.data=zero1"], {"parallel": {"tensor": 2, "data": "zero1"}}),
        (["parallel.pipeline={size: 2}"], {"parallel": {"tensor": 2, "pipeline": {"size": 2}}}),
        (["parallel.context=2", "parallel.context.size=1"], {"parallel": {"tensor": 2, "context": {"size": 1}}}),
        (["fp16.mode=naive", "fp16.hysteresis=4"], {"fp16": {"mode": "naive", "hysteresis": 4}}),
        (["fp16=null", "bf16.mode=torch"], {"fp16": None, "bf16": {"mode": "torch"}}),
        (["clip_grad_norm.norm_type=inf"], {"clip_grad_norm": {"max_norm": 1.0, "norm_type": "inf"}}),
        (["seed=1", "seed=2", "LR=1e-3"], {"seed": 2, "LR": 1e-3}),
    ],
)
def test_an_override_is_as_if_it_stood_in_the_config(overrides, equal, write):
    expected = load_config({**BASE, **equal})
    path = write("config.py", "\n".join(f"{key} = {value!r}" for key, value in BASE.items()))
    for source in (BASE, path, load_config(BASE)):
        assert load_config(source, overrides) == expected
    assert BASE["parallel"] == {"tensor": 2}  # the user's own dict stays as it was


def test_mistakes_in_an_override():
    for override, message in (
        ("paralel.tensor=2", r"paralel: unknown key; did you mean 'parallel'\?"),
        ("parallel.tensor", r"an override is key=value, such as"),
        ("fp16.mode={", r"is not valid YAML"),
        ("NUM_EPOCHS.a=1", r"NUM_EPOCHS is 9, which has no keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(BASE, [override])


def test_the_parser_and_halfmesh_run_collect_overrides():
    given = ["--config", "a.py", "--set", "parallel.tensor=4", "--set=seed=7"]
    assert get_default_parser().parse_args(given).overrides == ["parallel.tensor=4", "seed=7"]
    place = "--host h --port 5 --world-size 4 --rank 1 --local-rank 1 --backend gloo"
    expected = {"host": "h", "port": 5, "world_size": 4, "rank": 1, "local_rank": 1, "backend": "gloo"}
    for text in (place, place.replace("world-size", "world_size").replace("local-rank", "local_rank")):
        assert vars(get_default_parser().parse_args(text.split())) == expected | {"config": None, "overrides": []}
    assert read_options(["-v", *given, "--configs", "b.py"]) == ("a.py", ["parallel.tensor=4", "seed=7"])
