"""load_config: every kind of source, and the namespace in which a .py config runs."""

import re
import sys
import textwrap
import types

import pytest

from halfmesh.config import Config
from halfmesh.config.load import load_config, load_leniently
from halfmesh.errors import ConfigError


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
    """Loading must leave sys.path as it was, and no config in sys.modules."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    assert [name for name in set(sys.modules) - modules if "config" in name or name in ("base", "numbers_here")] == []
    assert sys.path == path


def fails(source, message, count=1):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(source)
    assert len(caught.value.problems) == count
    return caught.value


# --- sources -------------------------------------------------------------------------------------------------------


def test_the_same_config_from_every_source(write):
    expected = load_config({"fp16": {"mode": "naive"}, "clip_grad_norm": 1.0, "N": [1]})
    assert load_config(write("a.py", "fp16 = dict(mode='naive')\nclip_grad_norm = 1.0\nN = [1]\n")) == expected
    assert load_config(write("a.yaml", "fp16: {mode: naive}\nclip_grad_norm: 1.0\nN: [1]\n")) == expected
    assert load_config(write("a.yml", "fp16:\n  mode: naive\nclip_grad_norm: 1\nN:\n- 1\n")) == expected
    assert load_config(str(write("a.json", '{"fp16": {"mode": "naive"}, "clip_grad_norm": 1, "N": [1]}'))) == expected
    assert load_config(types.MappingProxyType(expected.to_dict())) == expected
    assert load_config(expected) is expected


def test_empty_yaml_is_an_empty_config(write):
    assert load_config(write("a.yaml", "# nothing\n")) == load_config({})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "", "its suffix is '.toml'; allowed: .py, .yaml, .yml, .json"),
        ("a.ymal", "", "its suffix is '.ymal'; allowed: .py, .yaml, .yml, .json; did you mean '.yml'?"),
        ("a", "", "its suffix is ''; allowed"),
        ("a.yaml", "- 1\n", "its top level is of type list, but a config is a mapping of keys to values"),
        ("a.json", "3", "its top level is of type int, but a config is a mapping of keys to values"),
        ("a.yaml", "seed: 3\nseed: 4\n", "not valid YAML: line 2: 'seed' is given twice"),
        ("a.json", '{"seed": 3, "seed": 4}', "not valid JSON: 'seed' is given twice"),
        ("a.yaml", "seed: 1\nfp16: {mode: [\n", "not valid YAML: line 3: "),
        ("a.yaml", "seed: \x00", "not valid YAML: unacceptable character"),
        ("a.yaml", "seed: !!python/object:os.system {}", "not valid YAML: line 1: could not determine a constructor"),
        ("a.json", '{"seed":\n 3,}', "not valid JSON: line "),
        ("a.yaml", "clip_grad_norm: 1e-3\n", "'1e-3' is not a number >= 0; write 1.0e-3 without quotes"),
        ("a.yaml", "fp16:\n  mode: naive\n  hysterisis: 2\n", "fp16.hysterisis: unknown key; did you mean"),
    ],
)
def test_bad_files(write, name, text, message):
    path = write(name, text)
    assert fails(path, message).source == str(path)


def test_yaml_merge_keys_may_override(write):
    path = write("a.yaml", "BASE: &base {a: 1, b: 2}\nFULL:\n  <<: *base\n  a: 3\n")
    assert load_config(path).FULL == {"a": 3, "b": 2}
    path = write("b.yaml", "ROOT: &root {a: 1}\nA: {B: &b {<<: *root, a: 3}}\nFULL: {<<: *b}\n")
    assert load_config(path).FULL == {"a": 3}


def test_missing_files(write, tmp_path):
    write("config.py", "")
    fails(tmp_path / "confg.py", f"there is no such file in {tmp_path}; did you mean 'config.py'?")
    fails(tmp_path / "none" / "config.py", f"there is no such file, and no directory {tmp_path / 'none'}")
    (tmp_path / "dir.py").mkdir()
    fails(tmp_path / "dir.py", "it is a directory; give the config file in it")


@pytest.mark.parametrize("source", [None, 3, [("seed", 3)]])
def test_source_of_a_wrong_type(source):
    fails(source, f"a {type(source).__name__} was given, but a config is a path (.py, .yaml, .yml, .json), a dict or a")


def test_load_leniently_keeps_what_is_right():
    raw = {"fp16": {"mode": "apex", "hysterisis": 2}, "seed": 3, "timeout": 0, "lr": 1, "parallel": {"tensor": 2}}
    config, problems = load_leniently(raw)
    assert config == load_config({"fp16": {"mode": "apex"}, "seed": 3, "parallel": {"tensor": 2}})
    assert len(problems) == 3
    both, problems = load_leniently({"fp16": {"mode": "apex"}, "bf16": {"mode": "apex"}, "seed": 3})
    assert both == load_config({"seed": 3})
    assert len(problems) == 1
    assert load_leniently({"fp16": {"mode": "apx"}, "seed": 3})[0] == load_config({"seed": 3})
    assert load_leniently("none.py")[0] is None
    assert load_leniently(both) == (both, [])


# --- which names of a .py config are settings ----------------------------------------------------------------------


def user_and_settings(config: Config):
    return {key: value for key, value in config.to_dict().items() if not callable(value)}


def test_names_that_are_not_settings(write):
    path = write(
        "config.py",
        """
        from __future__ import annotations
        import functools
        import math
        import os.path as timeout
        from dataclasses import dataclass
        from math import pi
        from halfmesh.amp.plugin import AMP_TYPE

        @dataclass
        class Helper:
            seed: int = 3

        def lr_interval(): ...

        def make(mode):
            inner = dict(mode=mode)
            return inner

        _helper = 3
        make_again = make
        make_half = functools.partial(make)
        Kind = Helper
        maths = math
        for seed in range(3):
            squares = seed ** 2
        while (steps := 3) < 2:
            pass
        with open(__file__) as debug:
            text_length = 3 if (walrus := 4) else 0
            del text_length
        try:
            raise ValueError
        except ValueError as compile:
            pass
        match dict(a=[1, 2]):
            case {"a": [gradient_accumulation, *max_consecutive_skips], **resume}:
                pass
        fp16 = make(AMP_TYPE.NAIVE)
        fp16["hysteresis"] = 4
        TOTAL = sum(n for n in range(3))
        """,
    )
    config = load_config(path)
    assert config.to_dict() == {"fp16": {"mode": "naive", "hysteresis": 4}, "TOTAL": 3}


@pytest.mark.parametrize(
    "code",
    [
        "{} = 3",
        "{}: int = 3",
        "A, ({}, *B) = 1, (2, 3)",
        "if True:\n    {} = 3",
        "if False:\n    pass\nelse:\n    {} = 3",
        "try:\n    {} = 3\nfinally:\n    pass",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {} = 3",
        "with open(__file__) as _f:\n    {} = 3",
        "match 3:\n    case 3:\n        {} = 3",
        "{} = 3\nfor {} in range(4):\n    pass",
    ],
)
def test_assignments_count_wherever_they_stand(write, code):
    assert load_config(write("good.py", code.replace("{}", "seed"))).seed in (2, 3)
    message = "sed: unknown key; did you mean 'seed'?"
    fails(write("bad.py", code.replace("{}", "sed")), message)


def test_the_loaders_own_future_imports_do_not_leak(write):
    assert load_config(write("config.py", "A: int = 3\nKIND = __annotations__['A'].__name__\n")).KIND == "int"


def test_augmented_assignment_and_deletion(write):
    config = load_config(write("config.py", "seed = 3\nseed += 1\nlr = 2\ndel lr\nA = 1\nA += 1\n"))
    assert config.to_dict() == {"seed": 4, "A": 2}


def test_loop_bodies_and_dynamic_names_count_if_they_name_a_key(write):
    code = """
    for _i in range(3):
        seed = _i
        other = 3
        LAST = _i
    globals()["timeout"] = 5
    if (debug := "sync"):
        pass
    """
    assert load_config(write("config.py", code)).to_dict() == {"seed": 2, "timeout": 5, "debug": "sync", "LAST": 2}


def test_unlike_any_key_gets_the_hint(write):
    path = write("config.py", "batch = 3\n")
    hint = "batch: unknown key; a constant of your own is written in UPPERCASE, a helper starts with an underscore"
    assert fails(path, hint).source == str(path)


def test_uppercase_names_pass_whatever_they_are(write):
    path = write(
        "config.py", "from math import pi as PI\nimport math as M\nclass NET: ...\nACT = len\nCLS = int\nMOD = M\n"
    )
    assert list(load_config(path).user) == ["PI", "ACT", "CLS"]


# --- siblings ------------------------------------------------------------------------------------------------------

BASE = """
import math
fp16 = dict(mode="torch")
clip_grad_norm = 2.0
seed = 5
EPOCHS = 3
def helper(): return 7
_hidden = 3
"""


def test_star_import_takes_the_siblings_settings(write):
    write("base.py", BASE)
    config = load_config(write("config.py", "from base import *\nseed = 6\nEPOCHS += helper()\n"))
    assert config.to_dict() == {"fp16": {"mode": "torch"}, "seed": 6, "clip_grad_norm": {"max_norm": 2.0}, "EPOCHS": 10}


@pytest.mark.parametrize("statement", ["from base import clip_grad_norm", "from .base import clip_grad_norm"])
def test_from_import_takes_one(write, statement):
    write("base.py", BASE)
    assert load_config(write("config.py", statement)).to_dict() == {"clip_grad_norm": {"max_norm": 2.0}}


def test_import_takes_none(write):
    write("base.py", BASE)
    config = load_config(write("config.py", "import base\nimport base as seed\ntimeout = base.seed\n"))
    assert config.to_dict() == {"timeout": 5.0}


def test_a_siblings_mistake_is_reported(write):
    write("base.py", "sed = 3\n")
    fails(write("config.py", "from base import *\n"), "sed: unknown key; did you mean 'seed'?")
    fails(write("other.py", "from base import sed\n"), "sed: unknown key; did you mean 'seed'?")


def test_siblings_of_siblings(write):
    write("base.py", BASE)
    write("middle.py", "from base import *\ntimeout = 7\n")
    config = load_config(write("config.py", "from middle import *\n"))
    assert (config.seed, config.timeout, config.EPOCHS) == (5, 7.0, 3)


def test_siblings_may_import_each_other(write):
    write("base.py", "seed = 5\nfrom config import *\n")
    assert load_config(write("config.py", "timeout = 7\nfrom base import *\n")).to_dict() == {"seed": 5, "timeout": 7.0}


def test_two_directories_do_not_mix(write):
    for name, seed in (("one", 1), ("two", 2)):
        write(f"{name}/base.py", f"seed = {seed}\n")
        write(f"{name}/config.py", "from base import *\n")
    assert [load_config(write(f"{name}/config.py", "from base import *")).seed for name in ("one", "two", "one")] == [
        1,
        2,
        1,
    ]


def test_a_changed_sibling_is_read_again(write):
    config = write("config.py", "from base import *\n")
    assert [load_config(config).seed for seed in (1, 2) if write("base.py", f"seed = {seed}\n")] == [1, 2]


def test_a_sibling_named_like_an_imported_module(write, monkeypatch):
    taken = types.ModuleType("base")
    taken.seed = 99
    monkeypatch.setitem(sys.modules, "base", taken)
    write("base.py", "seed = 5\n")
    assert load_config(write("config.py", "import base\nseed = base.seed\n")).seed == 5
    assert sys.modules["base"] is taken


@pytest.mark.parametrize("name", ["json", "torch", "halfmesh"])
def test_a_config_named_like_a_real_module_hides_nothing(write, name):
    __import__(name)
    before = sys.modules[name]
    assert load_config(write(f"{name}.py", "seed = 5\n")).seed == 5
    assert sys.modules[name] is before
    code = f"import {name}\nORIGIN = {name}.__name__\nfrom .{name} import seed\n"
    assert load_config(write("config.py", code)).to_dict() == {"seed": 5, "ORIGIN": name}


def test_helper_dataclass_with_postponed_annotations(write):
    code = """
    from __future__ import annotations
    from dataclasses import dataclass, InitVar
    import dataclasses as _d
    @dataclass
    class Size:
        width: int
        height: dataclasses.InitVar[int] = 3
    seed = Size(4).width
    """
    assert load_config(write("config.py", code)).seed == 4


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("seed = 3\nlr = = 2\n", "config.py:2: SyntaxError: invalid syntax"),
        ("seed = 3\n\nseed = 1 / 0\n", "config.py:3: ZeroDivisionError: division by zero"),
        ("def f():\n    return [][1]\nseed = f()\n", "config.py:2: IndexError: list index out of range"),
        ("import halfmesh_no_such\n", "config.py:1: ModuleNotFoundError: No module named 'halfmesh_no_such'"),
        ("from base import fp61\n", "config.py:1: ImportError: cannot import name 'fp61'"),
        ("from broken import *\n", "broken.py:2: NameError: name 'x' is not defined"),
        ("from garbled import *\n", "garbled.py:1: SyntaxError"),
        ("raise SystemExit(3)\n", "config.py:1: SystemExit: 3"),
        ("from ..up import x\n", "config.py:1: ImportError: attempted relative import"),
    ],
)
def test_a_config_that_fails_says_where(write, tmp_path, code, message):
    write("base.py", BASE)
    write("broken.py", "seed = 3\nseed = x\n")
    write("garbled.py", "seed = (\n")
    fails(write("config.py", code), f"{tmp_path}/{message}")
