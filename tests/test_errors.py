"""The words that all messages share."""

import pytest

from halfmesh.errors import (
    ConfigError,
    HalfmeshError,
    IncompatibleConfigError,
    bullet_list,
    did_you_mean,
    find_near,
    shorten,
)


@pytest.mark.parametrize(
    ("name", "near"), [("hysterisis", "hysteresis"), ("1FB1", "1f1b"), ("zzz", None), (3, None), ("", None)]
)
def test_find_near(name, near):
    assert find_near(name, ["hysteresis", "1f1b"]) == near


def test_did_you_mean_returns_the_name_as_it_is_written():
    assert did_you_mean("num_epoch", ["NUM_EPOCHS"]) == "; did you mean 'NUM_EPOCHS'?"
    assert did_you_mean("x", ["NUM_EPOCHS"]) == ""


def test_shorten_counts_the_rest():
    assert shorten(["a", "b"], most=2) == "a, b"
    assert shorten(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


def test_bullet_list():
    assert bullet_list("title", ["a", "b"]) == "title\n  - a\n  - b"


def test_config_error_has_all_problems():
    error = ConfigError(["a: wrong", "b: wrong"], "config.py")
    assert error.problems == ("a: wrong", "b: wrong")
    assert error.source == "config.py"
    assert str(error) == "2 problem(s) in config.py:\n  - a: wrong\n  - b: wrong"


def test_hierarchy():
    assert issubclass(IncompatibleConfigError, ConfigError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, HalfmeshError)
