"""The schema: defaults, shorthands, one message per mistake, user constants, and configs as values."""

import copy
import math
import pathlib
import pickle
import re

import pytest

import halfmesh
from halfmesh import AMP_PLUGINS, AMP_TYPE, AMPPlugin, ConfigError, Options, Recipe, load_config


def problems_of(**raw):
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return list(caught.value.problems)


@pytest.mark.parametrize("mode", ["naive", "NAIVE", AMP_TYPE.NAIVE])
def test_mode_forms(mode):
    config = load_config({"fp16": {"mode": mode, "hysteresis": 4}})
    assert type(config.fp16.mode) is str
    assert (config.fp16.mode, config.fp16.options.hysteresis) == ("naive", 4)
    assert config.precision is config.fp16
    assert config.precision_dtype == "float16"
    assert config == load_config({"fp16": {"mode": "naive", "hysteresis": 4, "loss_scale": "dynamic"}})
    assert load_config({"bf16": {"mode": mode}, "fp16": None}).precision_dtype == "bfloat16"


def test_shorthand_equals_the_long_form():
    short = {"parallel": {"tensor": 2, "pipeline": None, "data": "ZERO1"}, "clip_grad_norm": 1.5}
    long = {
        "parallel": {"tensor": {"size": 2}, "pipeline": {"size": 1}, "data": {"strategy": "zero1"}},
        "clip_grad_norm": {"max_norm": 1.5, "norm_type": 2},
    }
    assert load_config(short) == load_config(long)
    assert load_config({"parallel": None}) == load_config({})
    assert load_config({"clip_grad_norm": {"max_norm": 1, "norm_type": "inf"}}).clip_grad_norm.norm_type == math.inf
    assert load_config({"parallel": {"pipeline": {"non_split": ["a"]}}}).parallel.pipeline.non_split == ("a",)
    assert load_config({"activation_checkpoint": True}).activation_checkpoint.every == 1
    assert load_config({"compile": True}).compile.enabled
    assert load_config({"checkpoint": "here"}) == load_config({"checkpoint": {"directory": "here"}})


class PathLike:
    """As upath.UPath and py.path.local: a path for `os`, of no class of pathlib."""

    def __fspath__(self):
        return "runs"


def test_folders_may_be_paths():
    for form in (pathlib.Path("runs"), {"directory": pathlib.PurePosixPath("runs"), "every": 3}):
        config = load_config({"checkpoint": form, "resume": pathlib.Path("runs") / "old"})
        assert (config.checkpoint.directory, config.resume) == ("runs", "runs/old")
        assert load_config(config.to_dict()) == config
    folder = load_config({"checkpoint": PathLike(), "resume": PathLike()})
    assert (folder.checkpoint.directory, folder.resume) == ("runs", "runs")


# --- mistakes ------------------------------------------------------------------------------------------------------

MODES = "modes: 'torch', 'naive', 'apex'"
PIPELINE = "parallel.pipeline"

MISTAKES = [
    # misspelt and misplaced keys
    ({"paralel": {}}, "paralel: unknown key; did you mean 'parallel'?"),
    ({"fp16": {"mode": "naive", "hysterisis": 2}}, "fp16.hysterisis: unknown key; did you mean 'hysteresis'?"),
    ({"microbatches": 4}, "microbatches: unknown key; it belongs at 'parallel.pipeline.microbatches'"),
    ({"opt_level": "O2"}, "opt_level: unknown key; it belongs at 'fp16.opt_level'"),
    ({"microbatchs": 4}, "microbatchs: unknown key; did you mean 'parallel.pipeline.microbatches'?"),
    ({"fp16": {"mode": "torch", "hysteresis": 2}}, "fp16.hysteresis: unknown key; mode 'naive' has it"),
    ({"fp16": {"mode": "torch", "qqq": 2}}, "fp16.qqq: unknown key; allowed: mode, init_scale, growth_factor, backoff"),
    ({"qqq": 2}, "qqq: unknown key; write your own constants in UPPERCASE"),
    ({3: 2}, "3: keys must be strings, not int"),
    # other libraries' keys
    ({"NUM_MICRO_BATCHES": 4}, "NUM_MICRO_BATCHES: set parallel.pipeline.microbatches instead"),
    ({"zero": {}}, "zero: unknown key; set parallel.data = 'zero1' or 'fsdp' instead"),
    ({"pipeline_parallel_degree": 2}, "unknown key; set parallel.pipeline.size instead"),
    ({"static_loss_scale": 2.0}, "unknown key; set fp16.loss_scale to that number or 'dynamic', with mode='naive'"),
    ({"fp16": {"mode": "naive", "delayed_shift": 2}}, "fp16.delayed_shift: unknown key; set hysteresis instead"),
    ({"grad_clip": 1.0}, "grad_clip: unknown key; set clip_grad_norm instead"),
    ({"dtype": "bfloat16"}, "dtype: unknown key; set fp16 = dict(mode='torch') or bf16 = dict(mode='torch') instead"),
    ({"batch_size": 32}, "batch_size: unknown key; give it to the DataLoader: the batch size of one data rank"),
    # precision
    ({"parallel": {"dp": 2}}, "parallel.dp: unknown key; omit it: data ranks are what the other axes leave; or set"),
    ({"fp16": {"mod": "naive"}}, "fp16: unknown key 'mod'; did you mean 'mode'?"),
    ({"fp16": True}, f"fp16: True is not a dict; write dict(mode='torch'); {MODES}"),
    ({"fp16": "NAIVE"}, f"fp16: 'NAIVE' is not a dict; write dict(mode='naive'); {MODES}"),
    ({"fp16": {"mode": "naiv"}}, "fp16: mode='naiv' is not a registered mode; allowed: 'torch', 'naive', 'apex'; did"),
    ({"fp16": {"mode": "naive"}, "bf16": {"mode": "naive"}}, "fp16, bf16: a run has one precision; keep one"),
    ({"bf16": {"mode": "naive", "hysteresis": 2}}, "bf16.hysteresis: bf16 has the range of fp32, so the loss is not"),
    (
        {"fp16": {"mode": "naive", "loss_scale": 128.0, "hysteresis": 2}},
        "fp16: loss_scale=128.0 is static, so hysteresis would have no effect",
    ),
    (
        {"fp16": {"mode": "naive", "loss_scale": "dynamc"}},
        "fp16.loss_scale: expected 'dynamic' or a number, got 'dynamc'",
    ),
    ({"fp16": {"mode": "torch", "growth_factor": 1}}, "fp16.growth_factor: expected a number greater than 1, got 1"),
    # types
    ({"gradient_accumulation": "2"}, "gradient_accumulation: expected a whole number, got the string '2'; write 2"),
    ({"gradient_accumulation": True}, "gradient_accumulation: expected a whole number, got True"),
    ({"parallel": {"tensor": 0}}, "parallel.tensor: expected 1 or more, got 0"),
    ({"parallel": 2}, "parallel: 2 is not a dict; write for example dict(tensor=2, pipeline=1, data='replicate')"),
    ({"parallel": "fsdp"}, "parallel: 'fsdp' is not a dict; write for example dict(data='fsdp')"),
    (
        {"parallel": {"data": 4}},
        "parallel.data: 4 is not a strategy or a dict; write for example 'zero1' or dict(size=2)",
    ),
    ({"clip_grad_norm": math.nan}, "clip_grad_norm: expected a finite number, got nan"),
    ({"clip_grad_norm": "1e-3"}, "clip_grad_norm: expected a number, got the string '1e-3'; write 0.001"),
    ({"fused": True}, "fused: expected 'auto' or False, got True"),
    ({"debug": "snyc"}, "debug: expected 'sync' or 'nonfinite', got 'snyc'"),
    ({"compile": {"scope": "block"}}, "compile.scope: expected 'auto', 'model' or 'blocks', got 'block'"),
    (
        {"compile": {"mode": "fast"}},
        "compile.mode: expected 'default', 'reduce-overhead', 'max-autotune' or",
    ),
    ({"parallel": {"tensor": {"plan": {"a": 3}}}}, "parallel.tensor.plan: expected a string, got 3"),
    (
        {"parallel": {"pipeline": {"partition": 3}}},
        f"{PIPELINE}.partition: expected a string or a tuple, got 3",
    ),
    ({"parallel": {"pipeline": {"non_split": ["a", 3]}}}, f"{PIPELINE}.non_split: expected a string, got 3"),
    ({"name": "a b"}, "name: 'a b': String should match pattern"),
    # words
    ({"lr_interval": "epohc"}, "lr_interval: expected 'step', 'epoch' or 'manual', got 'epohc'"),
    ({"loss_reduction": "avg"}, "loss_reduction: expected 'mean', 'sum' or 'weighted', got 'avg'"),
    ({"on_nonfinite": "skp"}, "on_nonfinite: expected 'auto', 'skip' or 'raise', got 'skp'"),
    ({"parallel": {"tensor": {"plan": "autp"}}}, "parallel.tensor.plan: 'autp' is not one of 'auto', 'timm_attention'"),
    (
        {"parallel": {"tensor": {"plan": {"*.fc1": "colwse", "*.fc2": "auto"}}}},
        "parallel.tensor.plan: '*.fc1': 'colwse' is not one of 'auto', 'colwise'",
    ),
    ({"parallel": {"pipeline": {"schedule": "1fb1"}}}, f"{PIPELINE}.schedule: '1fb1' is not one of 'gpipe', '1f1b',"),
    *(
        ({"parallel": {"data": name}}, f"'{name}' is not one of 'replicate', 'zero1', 'fsdp'; did you mean '{ours}'?")
        for name, ours in {"zero2": "zero1", "ZeRO3": "fsdp", "ddp": "replicate", "fsdp2": "fsdp"}.items()
    ),
    (
        {"parallel": {"data": {"reduce_dtype": "bf16"}}},
        "expected 'float32', 'float16' or 'bfloat16', got 'bf16'",
    ),
    # checkpoints
    (
        {"checkpoint": True},
        "checkpoint: True is not a folder; write 'checkpoints' (to recompute activations: activation_checkpoint)",
    ),
    ({"checkpoint": ""}, "checkpoint: expected a string that is not empty, got ''"),
    ({"compile": {4: 4}}, "compile.4: Keys should be strings"),
    ({"checkpoint": {"every": 3}}, "checkpoint.directory: Field required"),
    (
        {"checkpoint": {"directory": "x", "signals": ["SIGTREM"]}},
        "'SIGTREM' is not a signal that a program can handle; did you mean 'SIGTERM'",
    ),
    (
        {"parallel": {"data": {"foo": 1}}},
        "parallel.data.foo: unknown key; allowed: strategy, size, reduce_dtype, bucket_mb, max_inflight",
    ),
]


@pytest.mark.parametrize(("raw", "message"), MISTAKES, ids=[message[:45] for _, message in MISTAKES])
def test_one_mistake_is_one_problem(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(raw)
    assert len(caught.value.problems) == 1


def test_all_problems_at_once():
    problems = problems_of(
        paralel={},
        fp16={"mode": "naive", "hysterisis": 2, "loss_scale": -1},
        parallel={"tensor": 0, "pipeline": {"schedule": "1fb1"}, "data": {"bucket_mb": "x"}},
        lr_interval="x",
    )
    assert sorted(problem.partition(":")[0] for problem in problems) == [
        "fp16.hysterisis", "fp16.loss_scale", "lr_interval", "paralel", "parallel.data.bucket_mb",
        "parallel.pipeline.schedule", "parallel.tensor",
    ]  # fmt: skip


def test_keys_of_a_third_partys_mode(tmp_path):
    class Part(Options):
        name: str = ""

    class ThirdOptions(Options):
        pair: tuple[int, int] = (0, 0)
        parts: tuple[Part, ...] = ()
        level: int

    class Third(AMPPlugin):
        options = ThirdOptions

        @classmethod
        def recipe(cls, options, dtype):
            return Recipe()

    AMP_PLUGINS.register("third", Third)
    try:
        config = load_config({"fp16": {"mode": "third", "pair": (1, 2), "level": 3}})
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert load_config(tmp_path / "config.yaml") == config
        assert config.fp16.options.pair == (1, 2)
        assert sorted(problems_of(fp16={"mode": "third", "parts": ({"nmae": "x"}, {"name": 3})})) == [
            "fp16.level: Field required",
            "fp16.parts.name: expected a string, got 3",
            "fp16.parts.nmae: unknown key; did you mean 'name'?",
        ]
    finally:
        AMP_PLUGINS.unregister("third")


# --- constants of one's own, and the config as a value -------------------------------------------------------------

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
    names = {"ONE": {"a": 1, "b c": 2}, "TWO": {True: 1}, "THREE": {"x": {None: 1}}, "FOUR": {"for": 1}}
    assert eval(repr(load_config(names)), {"Config": dict}) == names


def test_user_constants():
    config = load_config(EVERYTHING)
    assert config.NUM_EPOCHS == 10
    assert config.user == {key: value for key, value in EVERYTHING.items() if key.isupper()}
    with pytest.raises(AttributeError, match="no attribute 'NUM_EPOCH'"):
        _ = config.NUM_EPOCH


def test_nothing_can_be_set():
    config = load_config(EVERYTHING)
    with pytest.raises(ValueError, match="Instance is frozen"):
        config.anything = 3
    with pytest.raises(ValueError, match="Instance is frozen"):
        config.fp16.options.loss_scale = 3.0
    assert config == load_config(EVERYTHING)


def test_replace_and_equality():
    config = load_config(EVERYTHING)
    changed = config.replace(seed=7, NUM_EPOCHS=3, fp16=None)
    assert (changed.seed, changed.NUM_EPOCHS, changed.fp16) == (7, 3, None)
    assert changed.parallel == config.parallel
    assert (config.seed, config.NUM_EPOCHS) == (1024, 10)
    assert changed not in (config, config.replace(seed=7, fp16=None), load_config({}))
    assert config.replace(seed=1024) == config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    with pytest.raises(ConfigError, match=r"in config.replace\(\):\n  - sed: unknown key; did you mean"):
        config.replace(sed=3)
    assert repr(load_config({"seed": 1024})) == "Config()"
    assert repr(load_config({"seed": 3, "X": (1,)})) == "Config(seed=3, X=(1,))"


@pytest.mark.parametrize("raw", [{}, EVERYTHING, {"bf16": {"mode": "torch"}}], ids=["empty", "everything", "bf16"])
def test_yaml_round_trip(raw, tmp_path):
    config = load_config(raw)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    loaded = load_config(tmp_path / "config.yaml")
    assert loaded == config
    assert loaded.user == config.user
    assert [type(value) for value in loaded.user.values()] == [
        str if isinstance(value, halfmesh.AMP_TYPE) else type(value) for value in config.user.values()
    ]


@pytest.mark.parametrize("value", [[object()], lambda: 3, 3j])
def test_yaml_names_what_it_cannot_hold(value):
    message = r"in the YAML form of the config:\n  - WHAT: YAML cannot hold .*; use numbers"
    with pytest.raises(ConfigError, match=message):
        load_config({"FINE": 1, "WHAT": value}).to_yaml()
