"""apex.amp's keys: the property table of O0 to O3, overrides, what contradicts itself, and what recipe it comes to."""

from dataclasses import replace

import pytest
import torch

from halfmesh.amp.apex_amp import OPT_LEVELS, ApexAMP
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError

HALF, FULL = torch.float16, torch.float32
DYNAMIC = LossScale(2.0**16, True, 2.0, 0.5, 2000, 1, 0.0, 2.0**24, verbose=True)
O1 = Recipe(HALF, autocast=True, cast_lists="apex", loss_scale=DYNAMIC)
O2 = Recipe(HALF, HALF, False, True, DYNAMIC, FULL, keep_batchnorm_fp32=True, wide_gradients=True)
O3 = Recipe(HALF, HALF, output_dtype=FULL)


def options_of(**keys):
    return load_config({"fp16": {"mode": "apex", **keys}}).precision.options


def recipe_of(**keys):
    return ApexAMP.recipe(options_of(**keys), HALF)


@pytest.mark.promise(
    "APEX's levels and overrides", "apex's property table, without apex", of="Colossal-AI", page="migration/apex.md"
)
def test_the_property_table_is_apexs():
    table = {level: tuple(vars(properties).values()) for level, properties in OPT_LEVELS.items()}
    assert table == {
        "O0": ("float32", False, False, False, 1.0),
        "O1": (None, True, False, False, "dynamic"),
        "O2": ("float16", False, True, True, "dynamic"),
        "O3": ("float16", False, False, False, 1.0),
    }


@pytest.mark.parametrize(
    ("level", "keys", "recipe"),
    [
        ("O0", {}, Recipe(param_dtype=FULL, output_dtype=FULL)),
        ("O1", {}, O1),
        ("O2", {}, O2),
        ("O3", {}, O3),
        # overrides
        ("O0", {"loss_scale": "dynamic"}, Recipe(FULL, FULL, loss_scale=DYNAMIC, output_dtype=FULL)),
        ("O0", {"cast_model_type": False}, Recipe()),
        ("O1", {"patch_torch_functions": False}, Recipe(loss_scale=DYNAMIC)),
        ("O1", {"cast_model_type": torch.float32}, replace(O1, param_dtype=FULL, output_dtype=FULL)),
        ("O1", {"cast_model_outputs": "float32"}, replace(O1, output_dtype=FULL)),
        (
            "O2",
            {"keep_batchnorm_fp32": "False", "loss_scale": "128.0"},
            replace(O2, keep_batchnorm_fp32=False, loss_scale=LossScale(128.0, dynamic=False, skips=False)),
        ),
        (
            "O2",
            {"master_weights": False, "loss_scale": 1.0},
            Recipe(HALF, HALF, False, False, None, FULL, keep_batchnorm_fp32=True),
        ),
        ("O2", {"cast_model_type": "float32"}, Recipe(FULL, FULL, False, False, DYNAMIC, FULL)),
        # apex's switch for all of it
        ("O2", {"enabled": False, "loss_scale": 128.0, "num_losses": 2}, replace(FP32, num_losses=2)),
    ],
    ids=str,
)
def test_recipes(level, keys, recipe):
    assert recipe_of(opt_level=level, **keys) == recipe


def test_dynamic_scale_keys():
    scale = recipe_of(min_loss_scale=2.0, max_loss_scale=2.0**10, verbosity=0).loss_scale
    assert scale == LossScale(2.0**10, growth_interval=2000, min_scale=2.0, max_scale=2.0**10)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"opt_level": "01"}, "fp16.opt_level: expected 'O0', 'O1', 'O2' or 'O3', got '01'"),
        ({"master_weights": True}, "fp16: master_weights=True with opt_level='O1', which keeps weights in float32"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "only opt_level='O1' patches functions"),
        ({"opt_level": "O2", "cast_model_type": torch.bfloat16}, "fp16.cast_model_type: apex has no bf16; use bf16"),
        ({"loss_scale": 0}, "fp16.loss_scale: expected 'dynamic' or a number greater than 0, got 0"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "fp16: min_loss_scale=4 is above max_loss_scale=2; lower it"),
        ({"min_loss_scale": 2.0**17}, "fp16: min_loss_scale=131072 is above the first loss scale, which is 65536"),
    ],
    ids=str,
)
def test_mistakes(keys, message):
    with pytest.raises(ConfigError) as error:
        options_of(**keys)
    assert message in str(error.value)
