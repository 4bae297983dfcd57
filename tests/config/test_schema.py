"""The schema: defaults, shorthands, one message per mistake, user constants, and configs as values."""

import copy
import math
import pathlib
import pickle
import re

import pytest

from halfmesh import AMP_PLUGINS, AMP_TYPE, ConfigError, Options, load_config


def test_forms_of_a_value():
    config = load_config({"fp16": {"mode": AMP_TYPE.NAIVE, "hysteresis": 4}})
    assert config == load_config({"fp16": {"mode": "NAIVE", "hysteresis": 4, "loss_scale": "dynamic"}, "bf16": None})
    assert [type(config.fp16.mode), config.fp16.mode, config.precision_dtype] == [str, "naive", "float16"]
    short = {"parallel": {"tensor": 2, "pipeline": None, "data": "ZERO1"}, "clip_grad_norm": 1.5, "checkpoint": "here"}
    long = {
        "parallel": {"tensor": {"size": 2}, "pipeline": {"size": 1}, "data": {"strategy": "zero1"}},
        "clip_grad_norm": {"max_norm": 1.5, "norm_type": 2},
        "checkpoint": {"directory": "here"},
    }
    assert load_config(short) == load_config(long)
    assert load_config({"checkpoint": pathlib.Path("here"), "parallel": {"pipeline": 1}}).checkpoint.directory == "here"
    assert load_config({"parallel": None}) == load_config({})
    assert load_config({"clip_grad_norm": {"max_norm": 1, "norm_type": "inf"}}).clip_grad_norm.norm_type == math.inf
    assert load_config({"parallel": {"pipeline": {"non_split": ["a"]}}}).parallel.pipeline.non_split == ("a",)
    assert load_config({"activation_checkpoint": True}).activation_checkpoint.every == 1
    assert load_config({"compile": True}).compile.enabled


MISTAKES = [
    # misspelt and misplaced keys
    ({"paralel": {}}, "paralel: unknown key; did you mean 'parallel'?"),
    ({"fp16": {"mode": "naive", "hysterisis": 2}}, "fp16.hysterisis: unknown key; did you mean 'hysteresis'?"),
    ({"microbatches": 4}, "microbatches: unknown key; it belongs at 'parallel.pipeline.microbatches'"),
    ({"opt_level": "O2"}, "opt_level: unknown key; it belongs at 'fp16.opt_level'"),
    ({"fp16": {"mode": "torch", "qqq": 2}}, "fp16.qqq: unknown key; allowed: mode, init_scale, growth_factor, backoff"),
    ({"qqq": 2}, "qqq: unknown key; write your own constants in UPPERCASE"),
    ({3: 2}, "3: keys must be strings, not int"),
    ({"parallel": {"data": {"foo": 1}}}, "parallel.data.foo: unknown key; allowed: strategy, size, reduce_dtype, buck"),
    # other libraries' keys
    ({"NUM_MICRO_BATCHES": 4}, "NUM_MICRO_BATCHES: set parallel.pipeline.microbatches instead"),
    ({"pipeline_parallel_degree": 2}, "unknown key; set parallel.pipeline.size instead"),
    ({"fp16": {"mode": "naive", "delayed_shift": 2}}, "fp16.delayed_shift: unknown key; set hysteresis instead"),
    ({"batch_size": 32}, "batch_size: unknown key; give it to the DataLoader: the batch size of one data rank"),
    ({"parallel": {"dp": 2}}, "parallel.dp: unknown key; omit it: data ranks are what the other axes leave; or set"),
    # precision
    ({"fp16": {"mod": "naive"}}, "fp16: unknown key 'mod'; did you mean 'mode'?"),
    ({"fp16": {}}, "fp16: mode is missing; write dict(mode='torch', ...); modes: 'torch', 'naive', 'apex'"),
    ({"fp16": True}, "fp16: True is not a dict; write dict(mode='torch'); modes: 'torch', 'naive', 'apex'"),
    ({"fp16": {"mode": "naiv"}}, "mode='naiv' is not a registered mode; allowed: 'torch', 'naive', 'apex'; did you me"),
    ({"fp16": {"mode": "naive"}, "bf16": {"mode": "naive"}}, "fp16, bf16: a run has one precision; keep one"),
    ({"bf16": {"mode": "naive", "hysteresis": 2}}, "bf16.hysteresis: bf16 has the range of fp32, so the loss is not"),
    ({"fp16": {"mode": "naive", "loss_scale": 8.0, "hysteresis": 2}}, "fp16: loss_scale=8.0 is static, so hysteresis"),
    ({"fp16": {"mode": "naive", "loss_scale": "dynamc"}}, "loss_scale: expected 'dynamic' or a number, got 'dynamc'"),
    # values
    ({"gradient_accumulation": "2"}, "gradient_accumulation: expected a whole number, got the string '2'; write 2"),
    ({"parallel": {"tensor": 0}}, "parallel.tensor: expected 1 or more, got 0"),
    ({"parallel": 2}, "parallel: 2 is not a dict; write for example dict(tensor=2, pipeline=1, data='replicate')"),
    ({"parallel": {"data": 4}}, "data: 4 is not a strategy or a dict; write for example 'zero1' or dict(size=2)"),
    ({"clip_grad_norm": math.nan}, "clip_grad_norm: expected a finite number, got nan"),
    ({"fused": True}, "fused: expected 'auto' or False, got True"),
    ({"parallel": {"pipeline": {"partition": 3}}}, "partition: expected a string or a tuple, got 3"),
    ({"parallel": {"pipeline": {"non_split": ["a", 3]}}}, "pipeline.non_split: expected a string, got 3"),
    ({"name": "a b"}, "name: 'a b': String should match pattern '^[\\w.-]+$'"),
    ({"parallel": {"tensor": {"plan": "autp"}}}, "tensor.plan: 'autp' is not one of 'auto', 'torch_attention'"),
    ({"parallel": {"data": "zero2"}}, "'zero2' is not one of 'replicate', 'zero1', 'fsdp'; did you mean 'zero1'?"),
    ({"checkpoint": True}, "checkpoint: True is not a folder; write 'checkpoints' (to recompute activations: "),
    ({"compile": {4: 4}}, "compile.4: Keys should be strings"),
    ({"checkpoint": {"every": 3}}, "checkpoint.directory: Field required"),
    ({"checkpoint": {"directory": "x", "signals": ["SIGTREM"]}}, "'SIGTREM' is not a signal that a program can handle"),
]


@pytest.mark.parametrize(("raw", "message"), MISTAKES, ids=[message[:45] for _, message in MISTAKES])
def test_one_mistake_is_one_problem(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(raw)
    assert len(caught.value.problems) == 1


def test_all_problems_at_once():
    raw = {"paralel": {}, "fp16": {"mode": "naive", "hysterisis": 2, "loss_scale": -1}, "lr_interval": "x"}
    raw["parallel"] = {"tensor": 0, "pipeline": {"schedule": "1fb1"}, "data": {"bucket_mb": "x"}}
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == [
        "fp16.hysterisis", "fp16.loss_scale", "lr_interval", "paralel", "parallel.data.bucket_mb",
        "parallel.pipeline.schedule", "parallel.tensor",
    ]  # fmt: skip


def test_keys_of_a_third_partys_mode(tmp_path):
    class ThirdOptions(Options):
        pair: tuple[int, int] = (0, 0)
        level: int

    class Third(AMP_PLUGINS.get("torch")):
        options = ThirdOptions

    AMP_PLUGINS.register("third", Third)
    try:
        config = load_config({"fp16": {"mode": "third", "pair": (1, 2), "level": 3}})
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert load_config(tmp_path / "config.yaml") == config
        with pytest.raises(ConfigError, match=r"- fp16.level: Field required"):
            load_config({"fp16": {"mode": "third"}})
    finally:
        AMP_PLUGINS.unregister("third")


EVERYTHING = {
    "fp16": {"mode": AMP_TYPE.NAIVE, "loss_scale": 128.0},
    "parallel": {
        "tensor": {"size": 2, "plan": {"blocks.*": "colwise"}},
        "pipeline": {"size": 2, "microbatches": 4, "non_split": ["mask"]},
        "data": "zero1",
    },
    "clip_grad_norm": {"max_norm": 1.0, "norm_type": "inf"},
    "checkpoint": {"directory": "x", "every": 5, "signals": ["SIGUSR2"]},
    "fused": False,
    "NUM_EPOCHS": 10,
    "LAYERS": [1, {"a": [2, 3]}],
    "SIZE": (224, (224,)),
    "MODE": AMP_TYPE.TORCH,
    "NAME": "1e-3",
    "TEXT": "caf\xe9 # \x85: \n",
    "RATE": 1e-3,
}


def test_a_config_prints_as_python():
    names = {"ONE": {"a": 1, "b c": 2}, "TWO": {True: 1}, "THREE": {"x": {None: 1}}, "FOUR": {"for": 1}, "seed": 3}
    assert eval(repr(load_config(names)), {"Config": dict}) == names


def test_user_constants_replace_and_equality():
    config = load_config(EVERYTHING)
    assert config.user == {key: value for key, value in EVERYTHING.items() if key.isupper()}
    with pytest.raises(AttributeError, match="no attribute 'NUM_EPOCH'"):
        _ = config.NUM_EPOCH
    changed = config.replace(seed=7, NUM_EPOCHS=3, fp16=None)
    assert (changed.seed, changed.NUM_EPOCHS, changed.fp16) == (7, 3, None)
    assert changed.parallel == config.parallel
    assert (config.seed, config.NUM_EPOCHS) == (1024, 10)
    assert changed not in (config, config.replace(seed=7, fp16=None), load_config({}))
    assert config.replace(seed=1024) == config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    with pytest.raises(ConfigError, match=r"in config.replace\(\):\n  - sed: unknown key; did you mean"):
        config.replace(sed=3)
    with pytest.raises(ValueError, match="Instance is frozen"):
        config.fp16.options.loss_scale = 3.0


def test_yaml_round_trip(tmp_path):
    config = load_config(EVERYTHING)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    loaded = load_config(tmp_path / "config.yaml")
    assert (loaded, loaded.user) == (config, config.user)
    assert [type(value) for key, value in loaded.user.items() if key != "MODE"] == [int, list, tuple, str, str, float]
    (tmp_path / "config.yaml").write_text(load_config({}).to_yaml())
    assert load_config(tmp_path / "config.yaml") == load_config({})
    with pytest.raises(ConfigError, match=r"in the YAML form of the config:\n  - WHAT: YAML cannot hold 3j; use numb"):
        load_config({"FINE": 1, "WHAT": 3j}).to_yaml()
