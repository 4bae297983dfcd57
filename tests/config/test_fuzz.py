"""Whatever a config is: a Config that comes back from its own YAML, or ConfigError. FUZZ=full tries thousands."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest

from halfmesh import AMP_TYPE, ConfigError, compat, load_config

pytestmark = pytest.mark.slow
TRIES = 20_000 if os.environ.get("FUZZ") == "full" else 600

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
ODD = [None, True, 0, -1, 2, 2**63, 0.5, float("nan"), float("inf"), "", "2", "1e-3", "auto", "fsdp", "\ud800", b"x"]
ODD += [[], {}, [1], {"size": 2}, {1: 2}, (1, {"mode": "naive"}), {"mode": "torch"}, AMP_TYPE.NAIVE, object(), len]


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something can be changed in nested dicts."""
    inner = value.items() if isinstance(value, dict) else ()
    return [path, *(found for key, item in inner for found in paths_of(item, (*path, key)))]


def spoiled(chance: random.Random) -> Any:
    """A valid config with one to three changes."""
    config = copy.deepcopy(chance.choice(VALID))
    for _ in range(chance.randint(1, 3)):
        *parents, last = chance.choice(paths_of(config)[1:] or [("seed",)])
        place = config
        for key in parents:
            place = place[key]
        action = chance.choice(["value", "misspell", "remove"])
        value = place.pop(last, None)
        if action == "value":
            place[last] = chance.choice(ODD)
        elif action == "misspell":
            place[str(last)[:-1] + chance.choice("axz_é")] = value
    return config


def test_configs_that_are_nearly_right(tmp_path):
    chance = random.Random(0)
    loaded = 0
    for _ in range(TRIES):
        source = spoiled(chance)
        before = repr(source)
        try:
            config = load_config(source)
            compat.check(config, chance.choice([1, 4, 10**12]), "cpu")
            loaded += 1
            text = config.to_yaml()  # which cannot hold every constant
        except ConfigError:
            continue
        finally:
            assert repr(source) == before
        (tmp_path / "config.yaml").write_text(text)
        assert load_config(tmp_path / "config.yaml").to_yaml() == text
    assert loaded > TRIES / 20
