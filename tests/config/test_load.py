"""load_config: every kind of source, and which names of a .py config are settings."""

import re
import sys
import textwrap
import types

import pytest

from halfmesh import ConfigError, load_config


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


def fails(source, message):
    """The one problem that is reported."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(source)
    assert len(caught.value.problems) == 1
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
    assert load_config(write("empty.yaml", "# nothing\n")) == load_config({})
    assert load_config(write("marked.yaml", "\ufeffseed: 7\n")).seed == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ymal", "", "its suffix is '.ymal'; allowed: .py, .yaml, .yml, .json"),
        ("a.yaml", "- 1\n", "its top level is of type list, but a config must map keys to values"),
        ("a.yaml", "seed: 3\nseed: 4\n", "not valid YAML: line 2, column 1: 'seed' is given twice"),
        ("a.json", '{"seed": 3, "seed": 4}', "not valid JSON: 'seed' is given twice"),
        ("a.yaml", "seed: 1\nfp16: {mode: [\n", "not valid YAML: line 3, column 1: "),
        (
            "a.yaml",
            "seed: !!python/object:os.system {}",
            "not valid YAML: line 1, column 7: could not determine a constructor",
        ),
        ("a.json", '{"seed":\n 3,}', ": line 2 column "),
        ("a.yaml", "clip_grad_norm: '1e-3'\n", "expected a number, got the string '1e-3'; write 0.001"),
        ("a.yaml", "fp16:\n  mode: naive\n  hysterisis: 2\n", "fp16.hysterisis: unknown key; did you mean"),
        ("a.py", "batch = 3\n", "write your own constants in UPPERCASE, and begin helpers with an underscore"),
    ],
)
def test_bad_files(write, name, text, message):
    path = write(name, text)
    assert fails(path, message).source == str(path)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lr", "give it to the optimizer in your script, or keep it here as an UPPERCASE constant"),
        ("num_workers", "give it to the DataLoader"),
        ("epochs", "give it to Trainer.fit or your loop, or keep it here as an UPPERCASE constant"),
        ("optimizer", "build it in your script, and pass it to initialize"),
    ],
)
def test_keys_that_belong_elsewhere(key, hint):
    fails({key: 1}, f"{key}: unknown key; {hint}")


def test_numbers_with_an_exponent_in_yaml(write):
    numbers = {"1e-3": 1e-3, "1E5": 1e5, "-5e-4": -5e-4, "+2e+3": 2e3, "1.5e5": 1.5e5, ".5e1": 5.0, "6.e-2": 0.06}
    strings = ("'1e-3'", '"5e-4"', "1e-3b", "e-3", "1e", "0x1e-3", "1e-3 ms", "1 e-3")
    text = "".join(f"N{i}: {number}\n" for i, number in enumerate([*numbers, *strings]))
    values = list(load_config(write("a.yaml", f"clip_grad_norm: 1e-3\n{text}")).user.values())
    assert values == [*numbers.values(), *(string.strip("'\"") for string in strings)]
    assert load_config(write("b.yaml", "clip_grad_norm: 1e-3\n")).clip_grad_norm.max_norm == 1e-3


def test_missing_files_and_wrong_types(tmp_path):
    fails(tmp_path / "config.py", f"there is no such file in {tmp_path}")
    fails(tmp_path / "none" / "config.py", f"there is no such file in {tmp_path}/none")
    (tmp_path / "config.py").touch()
    (tmp_path / "confg.txt").touch()
    fails(tmp_path / "confg.py", f"there is no such file in {tmp_path}; did you mean 'config.py'?")
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "confg.py")
    assert raised.value.__suppress_context__
    fails(
        [("seed", 3)],
        "a list was given, but a config must be a path (.py, .yaml, .yml, .json), a dict ({} trains in fp32)",
    )


# --- which names of a .py config are settings ----------------------------------------------------------------------


def test_helpers_and_imports_are_no_settings(write):
    path = write(
        "config.py",
        """
        from __future__ import annotations
        import functools
        import os.path as timeout
        from dataclasses import dataclass
        from math import pi as PI
        from halfmesh import AMP_TYPE

        @dataclass
        class Helper:
            seed: int = 3

        def lr_interval(): ...

        def make(mode):
            inner = dict(mode=mode)
            return inner

        _helper = 3
        make_half = functools.partial(make)
        for _i in range(3):
            seed = _i
        fp16 = make(AMP_TYPE.NAIVE)
        fp16["hysteresis"] = 4
        TOTAL = sum(n for n in range(3))
        TOTAL += Helper().seed
        KIND = Helper
        lr = 2
        del lr
        """,
    )
    config = load_config(path)
    assert config.KIND.__name__ == "Helper"
    expected = {"fp16": {"mode": "naive", "hysteresis": 4}, "seed": 2, "TOTAL": 6, "PI": pytest.approx(3.14159)}
    assert config.to_dict() == expected | {"KIND": config.KIND}


# --- siblings ------------------------------------------------------------------------------------------------------

BASE = """
fp16 = dict(mode="torch")
clip_grad_norm = 2.0
seed = 5
EPOCHS = 3
def helper(): return 7
_hidden = 3
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "from base import *\nseed = 6\nEPOCHS += helper()\n",
            {"fp16": {"mode": "torch"}, "seed": 6, "clip_grad_norm": {"max_norm": 2.0}, "EPOCHS": 10},
        ),
        ("from base import clip_grad_norm", {"clip_grad_norm": {"max_norm": 2.0}}),
        ("from .base import clip_grad_norm", {"clip_grad_norm": {"max_norm": 2.0}}),
        ("seed = __import__('base', fromlist=['seed']).seed", {"seed": 5}),
        ("NAME = __import__('os.path', level=0, fromlist=['join']).join.__name__", {"NAME": "join"}),
        ("import base\nimport base as seed\ntimeout = base.seed\n", {"timeout": 5.0}),
    ],
)
def test_what_is_imported_from_a_sibling(write, code, expected):
    write("base.py", BASE)
    assert load_config(write("config.py", code)).to_dict() == expected


def test_siblings_of_two_folders_do_not_mix_and_are_read_again(write):
    for name, seed in (("one", 1), ("two", 2)):
        write(f"{name}/base.py", f"seed = {seed}\n")
        write(f"{name}/config.py", "from base import *\n")
    seeds = [load_config(write(f"{name}/config.py", "from base import *")).seed for name in ("one", "two", "one")]
    assert seeds == [1, 2, 1]
    write("one/base.py", "seed = 3\n")
    assert load_config(write("one/config.py", "from base import *")).seed == 3


@pytest.mark.parametrize("name", ["json", "halfmesh"])
def test_a_config_named_like_a_real_module_hides_nothing(write, name):
    before = __import__(name)
    assert load_config(write(f"{name}.py", "seed = 5\n")).seed == 5
    code = f"import {name}\nORIGIN = {name}.__name__\nfrom .{name} import seed\n"
    assert load_config(write("config.py", code)).to_dict() == {"seed": 5, "ORIGIN": name}
    assert sys.modules[name] is before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("seed = 3\nlr = = 2\n", "config.py:2: SyntaxError: invalid syntax"),
        ("def f():\n    return [][1]\nseed = f()\n", "config.py:2: IndexError: list index out of range"),
        ("from base import fp61\n", "config.py:1: ImportError: cannot import name 'fp61'"),
        ("from broken import *\n", "broken.py:2: NameError: name 'x' is not defined"),
        ("raise SystemExit(3)\n", "config.py:1: SystemExit: 3"),
    ],
)
def test_a_config_that_fails_says_where(write, tmp_path, code, message):
    write("base.py", BASE)
    write("broken.py", "seed = 3\nseed = x\n")
    fails(write("config.py", code), f"{tmp_path}/{message}")


def test_a_setting_that_is_a_function_is_told_and_one_that_is_imported_is_none(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("from torch import compile\n")
    assert load_config(path) == load_config({})
    path.write_text("seed = len\n")
    with pytest.raises(ConfigError, match="seed: "):
        load_config(path)
