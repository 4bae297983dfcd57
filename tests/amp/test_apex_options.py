"""apex.amp's keys: the property table of O0 to O3, overrides, what contradicts itself, and what recipe it comes to."""

import math
from dataclasses import replace

import pytest
import torch

from halfmesh.amp.apex_amp import ApexAMP
from halfmesh.amp.apex_options import OPT_LEVELS, ApexOptions
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError

HALF, FULL = torch.float16, torch.float32
DYNAMIC = LossScale(2.0**16, True, 2.0, 0.5, 2000, 1, 0.0, 2.0**24, verbose=True)
O2 = Recipe(HALF, HALF, False, True, DYNAMIC, FULL, keep_batchnorm_fp32=True, wide_gradients=True)


def options_of(**keys):
    return load_config({"fp16": {"mode": "apex", **keys}}).precision.options


def recipe_of(**keys):
    return ApexAMP.recipe(options_of(**keys), HALF)


def test_the_property_table_is_apexs():
    table = {level: tuple(vars(properties).values()) for level, properties in OPT_LEVELS.items()}
    assert table == {
        "O0": ("float32", False, False, False, 1.0),
        "O1": (None, True, False, False, "dynamic"),
        "O2": ("float16", False, True, True, "dynamic"),
        "O3": ("float16", False, False, False, 1.0),
    }


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({"opt_level": "O0"}, Recipe(param_dtype=FULL, output_dtype=FULL)),
        ({}, Recipe(HALF, autocast=True, cast_lists="apex", loss_scale=DYNAMIC)),
        ({"opt_level": "O2"}, O2),
        ({"opt_level": "O3"}, Recipe(HALF, HALF, output_dtype=FULL)),
        # overrides
        ({"opt_level": "O0", "loss_scale": "dynamic"}, Recipe(FULL, FULL, loss_scale=DYNAMIC, output_dtype=FULL)),
        ({"opt_level": "O0", "cast_model_type": False}, Recipe()),
        (
            {"opt_level": "O0", "keep_batchnorm_fp32": True, "master_weights": True},
            Recipe(FULL, FULL, output_dtype=FULL),
        ),
        ({"opt_level": "O1", "patch_torch_functions": False}, Recipe(loss_scale=DYNAMIC)),
        (
            {"opt_level": "O1", "cast_model_type": False},
            Recipe(HALF, None, True, cast_lists="apex", loss_scale=DYNAMIC),
        ),
        (
            {"opt_level": "O1", "cast_model_type": torch.float32},
            Recipe(HALF, FULL, True, cast_lists="apex", loss_scale=DYNAMIC, output_dtype=FULL),
        ),
        ({"cast_model_outputs": "float32"}, Recipe(HALF, None, True, False, DYNAMIC, FULL, cast_lists="apex")),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "False", "loss_scale": "128.0"},
            replace(O2, keep_batchnorm_fp32=False, loss_scale=LossScale(128.0, dynamic=False)),
        ),
        (
            {"opt_level": "O2", "master_weights": False, "loss_scale": 1.0},
            Recipe(HALF, HALF, False, False, None, FULL, keep_batchnorm_fp32=True),
        ),
        ({"opt_level": "O2", "cast_model_outputs": torch.half}, replace(O2, output_dtype=HALF)),
        ({"opt_level": "O2", "cast_model_type": "float32"}, Recipe(FULL, FULL, False, False, DYNAMIC, FULL)),
        (
            {"opt_level": "O3", "keep_batchnorm_fp32": "True"},
            Recipe(HALF, HALF, output_dtype=FULL, keep_batchnorm_fp32=True),
        ),
        ({"opt_level": "O3", "num_losses": 3}, Recipe(HALF, HALF, output_dtype=FULL, num_losses=3)),
    ],
    ids=str,
)
def test_recipes(keys, recipe):
    assert recipe_of(**keys) == recipe


def test_dynamic_scale_keys():
    scale = recipe_of(min_loss_scale=2.0, max_loss_scale=2.0**10, verbosity=0).loss_scale
    assert scale == LossScale(2.0**10, growth_interval=2000, min_scale=2.0, max_scale=2.0**10)
    assert recipe_of(max_loss_scale=2.0**20).loss_scale.initial == 2.0**16


def test_disabled_does_nothing_at_all():
    assert recipe_of(enabled=False, opt_level="O2", loss_scale=128.0) == FP32
    assert recipe_of(enabled=False, opt_level="O2", num_losses=2) == replace(FP32, num_losses=2)


O1_WEIGHTS = (
    "opt_level='O1': O1 casts around functions and leaves the weights in float32; remove it, or use opt_level='O2'"
)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"opt_level": "01"},
            "fp16.opt_level: '01' is not an opt level; allowed: 'O0', 'O1', 'O2', 'O3'; did you mean 'O1', with",
        ),
        ({"opt_level": "o3"}, "did you mean 'O3', with the letter O?"),
        ({"opt_level": 2}, "fp16.opt_level: 2 is not an opt level; allowed: 'O0', 'O1', 'O2', 'O3'; did you mean 'O2'"),
        ({"opt_level": "O4"}, "fp16.opt_level: 'O4' is not an opt level; allowed: 'O0', 'O1', 'O2', 'O3'"),
        ({"opt_level": None}, "fp16.opt_level: None is not one of 'O0', 'O1', 'O2', 'O3'"),
        ({"cast_model_type": "float16"}, f"fp16: cast_model_type='float16' with {O1_WEIGHTS}"),
        ({"keep_batchnorm_fp32": True}, "fp16: keep_batchnorm_fp32=True with opt_level='O1': O1 casts no weights"),
        ({"keep_batchnorm_fp32": "False"}, "fp16: keep_batchnorm_fp32=False with opt_level='O1'"),
        (
            {"master_weights": True},
            "fp16: master_weights=True with opt_level='O1': under O1 the weights themselves are",
        ),
        ({"master_weights": False}, "fp16: master_weights=False with opt_level='O1'"),
        (
            {"opt_level": "O0", "patch_torch_functions": True},
            "fp16: patch_torch_functions=True with opt_level='O0': only",
        ),
        ({"opt_level": "O2", "patch_torch_functions": True}, "remove it, or use opt_level='O1'"),
        ({"opt_level": "O3", "patch_torch_functions": True}, "only opt_level='O1' casts around functions"),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "yes"},
            "fp16.keep_batchnorm_fp32: 'yes' is not True or False or None",
        ),
        (
            {"opt_level": "O2", "cast_model_type": torch.bfloat16},
            "fp16.cast_model_type: apex has no bf16; use bf16 = dict(",
        ),
        (
            {"opt_level": "O2", "cast_model_type": torch.float64},
            "fp16.cast_model_type: 'float64' is not one of 'float32',",
        ),
        ({"cast_model_outputs": "bfloat16"}, "fp16.cast_model_outputs: apex has no bf16"),
        ({"loss_scale": 0}, "fp16.loss_scale: 0 is not 'dynamic' or a number > 0"),
        ({"loss_scale": "0"}, "fp16.loss_scale: 0.0 is not 'dynamic' or a number > 0"),
        ({"loss_scale": -1.0}, "fp16.loss_scale: -1.0 is not 'dynamic' or a number > 0"),
        ({"loss_scale": math.nan}, "fp16.loss_scale: nan is not 'dynamic' or a number > 0"),
        ({"loss_scale": "inf"}, "fp16.loss_scale: inf is not 'dynamic' or a number > 0"),
        (
            {"loss_scale": "dynamc"},
            "fp16.loss_scale: 'dynamc' is neither a number nor 'dynamic'; did you mean 'dynamic'?",
        ),
        ({"loss_scale": "foo"}, "fp16.loss_scale: 'foo' is neither a number nor 'dynamic'"),
        ({"num_losses": 0}, "fp16.num_losses: 0 is not an integer >= 1"),
        ({"verbosity": -1}, "fp16.verbosity: -1 is not an integer >= 0"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "fp16: min_loss_scale=4 is above max_loss_scale=2; lower it"),
        (
            {"min_loss_scale": 2.0**17},
            "fp16: min_loss_scale=131072 is above the first loss scale, which is 65536; lower it",
        ),
        (
            {"opt_level": "O3", "min_loss_scale": 4.0},
            "fp16: loss_scale=1 is static and beyond min_loss_scale=4, which bounds a dynamic scale only; remove",
        ),
        ({"loss_scale": 8.0, "max_loss_scale": 4.0}, "fp16: loss_scale=8 is static and beyond max_loss_scale=4"),
        ({"opt_lvl": "O2"}, "fp16.opt_lvl: unknown key; did you mean 'opt_level'?"),
    ],
    ids=str,
)
def test_mistakes(keys, message):
    with pytest.raises(ConfigError) as error:
        options_of(**keys)
    assert message in str(error.value)


def test_all_contradictions_at_once():
    with pytest.raises(ConfigError) as error:
        options_of(opt_level="O1", master_weights=True, keep_batchnorm_fp32=True, cast_model_type="half")
    message = str(error.value)
    assert all(
        key in message for key in ("master_weights=True", "keep_batchnorm_fp32=True", "cast_model_type='float16'")
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"opt_level": "O3", "max_loss_scale": 2.0**24},  # apex's default, written out: a static 1 is within
        {"opt_level": "O2", "loss_scale": 2.0**25},  # a static scale is not bound by the default of the dynamic one
        {"loss_scale": 8, "min_loss_scale": 8.0},
        {"opt_level": "O2", "cast_model_type": "torch.float16"},
    ],
    ids=str,
)
def test_what_apex_takes_and_means_no_harm_is_taken(keys):
    assert isinstance(options_of(**keys), ApexOptions)
