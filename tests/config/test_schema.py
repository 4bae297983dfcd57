"""The schema: defaults, forms, strictness, and one message per mistake."""

import collections
import copy
import datetime
import enum
import math
import pathlib
import pickle
import re
import threading

import pytest
import torch

from halfmesh.amp.naive_amp import NaiveOptions
from halfmesh.amp.plugin import AMP_PLUGINS, AMP_TYPE, AMPPlugin
from halfmesh.amp.recipe import FP32
from halfmesh.amp.torch_amp import TorchOptions
from halfmesh.config import Config
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError
from halfmesh.options import Options, PositiveInt


class DummyOptions(Options):
    pair: tuple[int, int] = (0, 0)
    when: datetime.date | None = None


class Part(Options):
    name: str = ""


class PartsOptions(Options):
    parts: tuple[Part, ...] = ()


class RequiredOptions(Options):
    level: PositiveInt


@pytest.fixture
def dummy_plugin():
    class Dummy(AMPPlugin):
        options = DummyOptions

        @classmethod
        def recipe(cls, options, dtype):
            return FP32

    class Required(Dummy):
        options = RequiredOptions

    class Parts(Dummy):
        options = PartsOptions

    AMP_PLUGINS.register("dummy", Dummy)
    AMP_PLUGINS.register("dummy_parts", Parts)
    AMP_PLUGINS.register("dummy_required", Required)
    yield
    AMP_PLUGINS.unregister("dummy")
    AMP_PLUGINS.unregister("dummy_parts")
    AMP_PLUGINS.unregister("dummy_required")


def problems_of(**raw):
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return list(caught.value.problems)


def test_defaults_are_those_of_the_readme():
    config = load_config({})
    assert (config.fp16, config.bf16, config.precision, config.precision_dtype) == (None, None, None, None)
    tensor, pipeline, data = config.parallel.tensor, config.parallel.pipeline, config.parallel.data
    assert (tensor.size, tensor.plan, tensor.sequence_parallel, tensor.mode) == (1, "auto", False, "1d")
    assert (pipeline.size, pipeline.microbatches, pipeline.schedule, pipeline.chunks) == (1, None, "1f1b", 1)
    assert (pipeline.partition, pipeline.non_split) == ("auto", ())
    assert (pipeline.keep_outputs, pipeline.eval_outputs) == (False, "all")
    assert (data.strategy, data.size, data.reduce_dtype) == ("replicate", None, "float32")
    assert (data.bucket_mb, data.max_inflight) == (25, 8)
    assert (config.gradient_accumulation, config.gradient_dtype) == (1, "auto")
    assert (config.clip_grad_norm.max_norm, config.clip_grad_norm.norm_type) == (0.0, 2.0)
    assert (config.loss_reduction, config.lr_interval) == ("mean", "step")
    assert (config.activation_checkpoint.enabled, config.activation_offload) == (False, False)
    recomputed = load_config({"activation_checkpoint": True}).activation_checkpoint
    assert (recomputed.every, recomputed.patterns, recomputed.selective) == (1, (), False)
    assert (config.compile.enabled, config.fused) == (False, "auto")
    compile_ = load_config({"compile": True}).compile
    assert (compile_.enabled, compile_.scope, compile_.backend) == (True, "auto", "inductor")
    assert (compile_.mode, compile_.dynamic, compile_.fullgraph) == (None, None, False)
    assert (config.on_nonfinite, config.max_consecutive_skips) == ("auto", 50)
    assert (config.seed, config.timeout) == (1024, 600.0)
    assert (config.debug, config.resume, config.track_grad_norm) == (None, None, False)
    assert config.checkpoint is None
    saves = load_config({"checkpoint": "here"}).checkpoint
    assert (saves.directory, saves.every, saves.keep, saves.in_background) == ("here", None, 3, True)
    assert saves.signals == ("SIGTERM", "SIGUSR1")
    assert len(Config.model_fields) == 20
    assert config.user == {}


@pytest.mark.parametrize("mode", ["naive", "NAIVE", "Naive", AMP_TYPE.NAIVE])
def test_mode_forms(mode):
    config = load_config({"fp16": {"mode": mode, "hysteresis": 4}})
    assert config.fp16.mode == "naive"
    assert type(config.fp16.mode) is str
    assert config.fp16.options == NaiveOptions(hysteresis=4)
    assert config.precision is config.fp16
    assert config.precision_dtype == "float16"


def test_bf16():
    config = load_config({"bf16": {"mode": "torch"}, "fp16": None})
    assert config.precision is config.bf16
    assert config.precision_dtype == "bfloat16"
    assert config.bf16.options == TorchOptions()


def test_shorthand_equals_the_long_form():
    short = load_config({"parallel": {"tensor": 2, "pipeline": 1, "data": "ZERO1"}, "clip_grad_norm": 1.5})
    long = load_config(
        {
            "parallel": {"tensor": {"size": 2}, "pipeline": {"size": 1}, "data": {"strategy": "zero1"}},
            "clip_grad_norm": {"max_norm": 1.5, "norm_type": 2},
        }
    )
    assert short == long
    assert long.parallel.data.strategy == "zero1"


@pytest.mark.parametrize("raw", [{"parallel": None}, {"parallel": {"tensor": None, "data": None}}, {"fp16": None}])
def test_none_is_the_default(raw):
    assert load_config(raw) == load_config({})


@pytest.mark.parametrize(("given", "norm_type"), [("inf", math.inf), (math.inf, math.inf), (1, 1.0), (2.5, 2.5)])
def test_norm_type(given, norm_type):
    clip = load_config({"clip_grad_norm": {"max_norm": 1, "norm_type": given}}).clip_grad_norm
    assert (clip.max_norm, clip.norm_type) == (1.0, norm_type)


def test_lists_become_tuples():
    pipeline = {"size": 2, "microbatches": 2, "non_split": ["mask"], "partition": ["layers.3"]}
    config = load_config({"parallel": {"pipeline": pipeline}})
    assert config.parallel.pipeline.non_split == ("mask",)
    assert config.parallel.pipeline.partition == ("layers.3",)


NUMBER_HINT = "write 1.0e-3 without quotes (YAML reads numbers like 1e-3 as text)"
MODES = "modes: 'torch', 'naive', 'apex'"

MISTAKES = [
    # misspelt and misplaced keys
    ({"paralel": {}}, "paralel: unknown key; did you mean 'parallel'?"),
    ({"fp16": {"mode": "naive", "inital_scale": 1.0}}, "fp16.inital_scale: unknown key; did you mean 'initial_scale'?"),
    ({"fp16": {"mode": "naive", "hysterisis": 2}}, "fp16.hysterisis: unknown key; did you mean 'hysteresis'?"),
    ({"parallel": {"tensr": 2}}, "parallel.tensr: unknown key; did you mean 'tensor'?"),
    (
        {"parallel": {"pipeline": {"microbatch": 2}}},
        "parallel.pipeline.microbatch: unknown key; did you mean 'microbatches'?",
    ),
    ({"clip_grad_norm": {"max_nrom": 2}}, "clip_grad_norm.max_nrom: unknown key; did you mean 'max_norm'?"),
    ({"microbatches": 4}, "microbatches: unknown key; it belongs at 'parallel.pipeline.microbatches'"),
    ({"pipeline": 4}, "pipeline: unknown key; it belongs at 'parallel.pipeline'"),
    ({"norm_type": 2}, "norm_type: unknown key; it belongs at 'clip_grad_norm.norm_type'"),
    ({"opt_level": "O2"}, "opt_level: unknown key; it belongs at 'fp16.opt_level'"),
    (
        {"parallel": {"size": 2}},
        "parallel.size: unknown key; it belongs at 'parallel.tensor.size' or 'parallel.pipeline.size' or "
        "'parallel.data.size'",
    ),
    ({"parallel": {"gradient_accumulation": 2}}, "it belongs at 'gradient_accumulation'"),
    ({"microbatchs": 4}, "microbatchs: unknown key; did you mean 'parallel.pipeline.microbatches'?"),
    ({"fp16": {"mode": "torch", "hysteresis": 2}}, "fp16.hysteresis: unknown key; mode 'naive' has it"),
    (
        {"fp16": {"mode": "torch", "qqq": 2}},
        "fp16.qqq: unknown key; allowed: mode, init_scale, growth_factor, backoff_factor, growth_interval, enabled",
    ),
    ({"parallel": {"qqq": 2}}, "parallel.qqq: unknown key; allowed: tensor, pipeline, data"),
    ({"qqq": 2}, "qqq: unknown key; a constant of your own is written in UPPERCASE"),
    ({3: 2}, "3: keys must be strings, not int"),
    # other libraries' keys
    ({"NUM_MICRO_BATCHES": 4}, "NUM_MICRO_BATCHES: set parallel.pipeline.microbatches instead"),
    ({"zero": {}}, "zero: unknown key; set parallel.data = 'zero1' or 'fsdp' instead"),
    ({"pipeline_parallel_degree": 2}, "unknown key; set parallel.pipeline.size instead"),
    ({"partitions": 2}, "unknown key; set parallel.pipeline.size instead"),
    ({"tensor_parallel_degree": 2}, "unknown key; set parallel.tensor.size instead"),
    ({"sharded_data_parallel_degree": 2}, "unknown key; set parallel.data = dict(strategy='fsdp') instead"),
    ({"shard_optimizer_state": True}, "unknown key; set parallel.data = 'zero1' instead"),
    ({"static_loss_scale": 2.0}, "unknown key; set fp16.loss_scale to that number instead (mode 'naive')"),
    ({"dynamic_loss_scale": True}, "unknown key; set fp16.loss_scale = 'dynamic' instead (mode 'naive')"),
    ({"dynamic_loss_args": {}}, "set growth_interval (scale_window), min_scale and hysteresis (delayed_shift)"),
    ({"fp16": {"mode": "naive", "scale_window": 2}}, "fp16.scale_window: unknown key; set growth_interval instead"),
    ({"fp16": {"mode": "naive", "delayed_shift": 2}}, "fp16.delayed_shift: unknown key; set hysteresis instead"),
    ({"optimize": "speed"}, "optimize: unknown key; remove it: halfmesh has no such choice"),
    ({"ddp": True}, "ddp: unknown key; remove it: data parallelism takes the ranks that tensor and pipeline leave"),
    # precision
    ({"fp16": True}, f"fp16: True is not a dict; write dict(mode='torch'); {MODES}"),
    ({"fp16": "NAIVE"}, f"fp16: 'NAIVE' is not a dict; write dict(mode='naive'); {MODES}"),
    ({"fp16": {}}, f"fp16: mode is missing; write dict(mode='torch', ...); {MODES}"),
    ({"fp16": {"mod": "naive"}}, "fp16: mode is missing (is 'mod' meant to be it?); write dict(mode="),
    ({"fp16": {"mode": "naiv"}}, "fp16: mode='naiv' is not a registered mode; allowed: 'torch', 'naive', 'apex'; did"),
    ({"fp16": {"mode": 1}}, "fp16: mode=1 is not the name of a mode; allowed: 'torch', 'naive', 'apex'"),
    (
        {"fp16": {"mode": "naive"}, "bf16": {"mode": "naive"}},
        "fp16, bf16: both are set, but a run has one precision; remove one of the two",
    ),
    (
        {"bf16": {"mode": "naive", "hysteresis": 2}},
        "bf16.hysteresis: bf16 has the range of fp32, so the loss is not scaled; remove hysteresis, or use fp16",
    ),
    (
        {"fp16": {"mode": "naive", "loss_scale": 128.0, "hysteresis": 2}},
        "fp16: loss_scale=128.0 is static, so hysteresis would have no effect",
    ),
    (
        {"fp16": {"mode": "naive", "loss_scale": "dynamc"}},
        "fp16.loss_scale: 'dynamc' is not 'dynamic' or a number > 0 and <= 1.70141e+38; did you mean 'dynamic'?",
    ),
    ({"fp16": {"mode": "torch", "growth_factor": 1}}, "fp16.growth_factor: 1 is not a number > 1"),
    ({"fp16": {"mode": "torch", "backoff_factor": 1}}, "fp16.backoff_factor: 1 is not a number > 0 and < 1"),
    # types
    ({"gradient_accumulation": "2"}, "gradient_accumulation: '2' is not an integer >= 1; write 2 without quotes"),
    ({"gradient_accumulation": "1e3"}, "'1e3' is not an integer >= 1; write 1000 without quotes"),
    ({"gradient_accumulation": True}, "gradient_accumulation: True is not an integer >= 1 (bool)"),
    ({"gradient_accumulation": 2.0}, "gradient_accumulation: 2.0 is not an integer >= 1"),
    ({"gradient_accumulation": 0}, "gradient_accumulation: 0 is not an integer >= 1"),
    ({"parallel": {"tensor": "2"}}, "parallel.tensor: '2' is not an integer >= 1; write 2 without quotes"),
    ({"parallel": {"tensor": 0}}, "parallel.tensor: 0 is not an integer >= 1"),
    ({"parallel": {"pipeline": True}}, "parallel.pipeline: True is not an integer >= 1 (bool)"),
    ({"parallel": {"pipeline": {"size": "x"}}}, "parallel.pipeline.size: 'x' is not an integer >= 1"),
    ({"parallel": 2}, "parallel: 2 is not a dict; write for example dict(tensor=2, pipeline=1, data='replicate')"),
    ({"grad_clip": 1.0}, "grad_clip: unknown key; set clip_grad_norm instead"),
    ({"parallel": "fsdp"}, "parallel: 'fsdp' is not a dict; write dict(data='fsdp')"),
    ({"parallel": {"fsdp": True}}, "parallel.fsdp: unknown key; set parallel.data = 'fsdp' instead"),
    ({"parallel": {"tensor_parallel": 2}}, "parallel.tensor_parallel: unknown key; set parallel.tensor instead"),
    ({"parallel": {"pipeline_parallel": 2}}, "parallel.pipeline_parallel: unknown key; set parallel.pipeline instead"),
    (
        {"parallel": {"data_parallel": 2}},
        "parallel.data_parallel: unknown key; remove it: data parallelism takes the ranks that tensor and pipeline "
        "leave",
    ),
    (
        {"parallel": {"data": 4}},
        "parallel.data: 4 is not a strategy ('replicate', 'zero1', 'fsdp') or a dict; write dict(size=4)",
    ),
    ({"clip_grad_norm": -1}, "clip_grad_norm: -1 is not a number >= 0"),
    ({"clip_grad_norm": math.nan}, "clip_grad_norm: nan is not a number >= 0"),
    ({"clip_grad_norm": True}, "clip_grad_norm: True is not a number >= 0 (bool)"),
    ({"clip_grad_norm": {"norm_type": 0}}, "clip_grad_norm.norm_type: 0 is not a number > 0"),
    ({"clip_grad_norm": "1e-3"}, f"clip_grad_norm: '1e-3' is not a number >= 0; {NUMBER_HINT}"),
    ({"timeout": "1e3"}, "timeout: '1e3' is not a number > 0; write 1.0e+3 without quotes"),
    ({"timeout": "inf"}, "timeout: 'inf' is not a number > 0"),
    ({"timeout": 0}, "timeout: 0 is not a number > 0"),
    ({"timeout": math.inf}, "timeout: inf is not a number > 0"),
    ({"seed": -1}, "seed: -1 is not an integer >= 0 and < 4294967296"),
    ({"compile": 1}, "compile: 1 is not True, False or a dict; write for example dict(scope='blocks')"),
    ({"compile": "blocks"}, "compile: 'blocks' is not True, False or a dict; write for example dict(scope='blocks')"),
    ({"compile": {"fulgraph": True}}, "compile.fulgraph: unknown key; did you mean 'fullgraph'?"),
    ({"compile": {"scope": "block"}}, "compile.scope: 'block' is not one of 'auto', 'model', 'blocks'; did you mean"),
    ({"compile": {"mode": "fast"}}, "compile.mode: 'fast' is not one of 'default', 'reduce-overhead', 'max-autotune'"),
    ({"compile": {"dynamic": "yes"}}, "compile.dynamic: 'yes' is not True or False or None"),
    ({"compile": {"backend": "inducter"}}, "compile.backend: 'inducter' is not a backend of torch.compile here; usual"),
    ({"compile": {"backend": "inducter"}}, "did you mean 'inductor'?"),
    ({"compile": {"backend": "aot_eagr"}}, "for debugging 'eager' and 'aot_eager'; did you mean 'aot_eager'?"),
    ({"compile": {"backend": print}}, "compile.backend: <built-in function print> is not a string"),
    ({"fused": True}, "fused: True is not one of 'auto', False"),
    ({"debug": "snyc"}, "debug: 'snyc' is not 'sync' or None; did you mean 'sync'?"),
    ({"parallel": {"tensor": {"plan": 3}}}, "parallel.tensor.plan: 3 is not a string or a dict of strings"),
    (
        {"parallel": {"tensor": {"plan": {"a": 3}}}},
        "parallel.tensor.plan: {'a': 3} is not a string or a dict of strings",
    ),
    ({"parallel": {"pipeline": {"partition": 3}}}, "parallel.pipeline.partition: 3 is not a string or a list of names"),
    ({"parallel": {"pipeline": {"non_split": [3]}}}, "parallel.pipeline.non_split: 3 is not a list of names"),
    # words
    ({"lr_interval": "epohc"}, "lr_interval: 'epohc' is not one of 'step', 'epoch', 'manual'; did you mean 'epoch'?"),
    ({"loss_reduction": "avg"}, "loss_reduction: 'avg' is not one of 'mean', 'sum', 'weighted'"),
    ({"on_nonfinite": "skp"}, "on_nonfinite: 'skp' is not one of 'auto', 'skip', 'raise'; did you mean 'skip'?"),
    ({"gradient_dtype": "fp32"}, "gradient_dtype: 'fp32' is not one of 'auto', 'float32'; did you mean 'float32'?"),
    ({"parallel": {"tensor": {"mode": "2d"}}}, "parallel.tensor.mode: '2d' is not '1d'"),
    ({"parallel": {"tensor": {"plan": "autp"}}}, "parallel.tensor.plan: 'autp' is not one of 'auto', 'timm_attention'"),
    ({"parallel": {"tensor": {"plan": "autp"}}}, "did you mean 'auto'?"),
    (
        {"parallel": {"tensor": {"plan": {"*.fc1": "colwse", "*.fc2": "auto"}}}},
        "parallel.tensor.plan: '*.fc1': 'colwse' is not one of 'auto', 'colwise'",
    ),
    ({"parallel": {"tensor": {"plan": {"*.fc1": "fused_colwis(3)"}}}}, "did you mean 'fused_colwise'?"),
    (
        {"parallel": {"pipeline": {"schedule": "1fb1"}}},
        "parallel.pipeline.schedule: '1fb1' is not one of 'gpipe', '1f1b', 'interleaved'; did you mean '1f1b'?",
    ),
    ({"parallel": {"pipeline": {"partition": "even"}}}, "parallel.pipeline.partition: 'even' is not one of 'auto'"),
    ({"parallel": {"pipeline": {"eval_outputs": "lst"}}}, "'lst' is not one of 'all', 'last'; did you mean 'last'?"),
    ({"parallel": {"data": "zero2"}}, "parallel.data: 'zero2' is not one of 'replicate', 'zero1', 'fsdp'; did you"),
    (
        {"parallel": {"data": {"reduce_dtype": "bf16"}}},
        "parallel.data.reduce_dtype: 'bf16' is not one of 'float32', 'float16', 'bfloat16'; did you mean 'bfloat16'?",
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
    starts = [problem.partition(":")[0] for problem in problems]
    assert sorted(starts) == [
        "fp16.hysterisis", "fp16.loss_scale", "lr_interval", "paralel", "parallel.data.bucket_mb",
        "parallel.pipeline.schedule", "parallel.tensor",
    ]  # fmt: skip


def test_third_party_mode_may_have_any_type_of_key(dummy_plugin):
    assert load_config({"fp16": {"mode": "dummy", "pair": (1, 2)}}).fp16.options.pair == (1, 2)
    assert problems_of(fp16={"mode": "dummy", "when": 3}) == ["fp16.when: 3 is refused: Input should be a valid date"]
    assert problems_of(fp16={"mode": "dummy_required"}) == ["fp16.level: is required; give an integer >= 1"]


class Colour(enum.Enum):
    RED = 1


EVERYTHING = {
    "fp16": {"mode": AMP_TYPE.NAIVE, "loss_scale": 128.0},
    "parallel": {
        "tensor": {"size": 2, "plan": {"blocks.*": "colwise"}},
        "pipeline": {"size": 2, "microbatches": 4, "non_split": ["mask"]},
        "data": "zero1",
    },
    "clip_grad_norm": {"max_norm": 1.0, "norm_type": "inf"},
    "fused": False,
    "NUM_EPOCHS": 10,
    "LAYERS": [1, {"a": [2, 3]}],
    "SIZE": (224, (224,)),
    "MODE": AMP_TYPE.TORCH,
    "NAME": "1e-3",
    "TEXT": "caf\xe9 # \x85: \n",
    "RATE": 1e-3,
}


def generate():
    yield 1


@pytest.mark.parametrize("held", [threading.Lock(), math, generate(), torch.zeros(2, requires_grad=True) * 2])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_constants_that_cannot_be_copied_deeply(kind, held):
    given = kind(a=held)
    config = load_config({"HELD": given, "seed": 3})
    assert type(config.HELD) is kind
    assert config.HELD["a"] is config.user["HELD"]["a"] is held
    given["b"] = 1
    assert set(config.HELD) == {"a"}


def test_constants_of_their_own_classes_are_copied_deeply():
    config = load_config({"SIZES": collections.OrderedDict(a=[1])})
    config.SIZES["a"].append(2)
    assert config.SIZES == {"a": [1]}


def test_folders_may_be_paths():
    for form in (pathlib.Path("runs"), {"directory": pathlib.PurePosixPath("runs"), "every": 3}):
        config = load_config({"checkpoint": form, "resume": pathlib.Path("runs") / "old"})
        assert (type(config.checkpoint.directory), config.checkpoint.directory) == (str, "runs")
        assert (type(config.resume), config.resume) == (str, "runs/old")
        assert load_config(config.to_dict()) == config
        assert "old" in config.to_yaml()
    for odd in (BadPath(b"runs"), BadPath(None)):
        with pytest.raises(ConfigError, match="resume"):
            load_config({"resume": odd})
        with pytest.raises(ConfigError, match="is not a folder; write"):
            load_config({"checkpoint": odd})


class BadPath:
    """One of bytes, or of nothing."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path.strip()


def test_user_constants():
    config = load_config(EVERYTHING)
    assert config.NUM_EPOCHS == 10
    assert config.user == {
        key: EVERYTHING[key] for key in ("NUM_EPOCHS", "LAYERS", "SIZE", "MODE", "NAME", "TEXT", "RATE")
    }
    assert not hasattr(config, "BATCH_SIZE")
    with pytest.raises(AttributeError, match="the config has no 'NUM_EPOCH'; did you mean 'NUM_EPOCHS'"):
        _ = config.NUM_EPOCH
    with pytest.raises(AttributeError, match="the config has no 'QQQ'; constants: NUM_EPOCHS, LAYERS, SIZE, MODE"):
        _ = config.QQQ


def test_containers_are_handed_in_and_out_as_copies():
    layers = [1, [2]]
    config = load_config({"LAYERS": layers})
    layers[1].append(3)
    config.LAYERS[1].append(4)
    config.user["LAYERS"].append(5)
    assert config.LAYERS == [1, [2]]


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "seed", 3),
        lambda config: setattr(config, "NUM_EPOCHS", 3),
        lambda config: setattr(config, "anything", 3),
        lambda config: delattr(config, "seed"),
        lambda config: delattr(config, "NUM_EPOCHS"),
        lambda config: setattr(config.parallel.tensor, "size", 3),
        lambda config: setattr(config.fp16.options, "loss_scale", 3.0),
    ],
)
def test_nothing_can_be_set_or_deleted(change):
    config = load_config(EVERYTHING)
    with pytest.raises(AttributeError, match=r"configs are immutable; config.replace\(key=value\) gives a changed"):
        change(config)
    assert config == load_config(EVERYTHING)


def test_plan_cannot_be_changed():
    plan = load_config(EVERYTHING).parallel.tensor.plan
    for change in (lambda: plan.update(a="b"), lambda: plan.pop("blocks.*"), lambda: plan.__setitem__("a", "b")):
        with pytest.raises(TypeError, match="configs are immutable"):
            change()


def test_replace():
    config = load_config(EVERYTHING)
    changed = config.replace(seed=7, NUM_EPOCHS=3, fp16=None)
    assert (changed.seed, changed.NUM_EPOCHS, changed.fp16) == (7, 3, None)
    assert changed.parallel == config.parallel
    assert (config.seed, config.NUM_EPOCHS) == (1024, 10)
    with pytest.raises(ConfigError, match=r"1 problem\(s\) in config.replace\(\):\n  - sed: unknown key; did you mean"):
        config.replace(sed=3)


def test_equality():
    assert load_config({"fp16": {"mode": "naive"}}) == load_config({"fp16": {"mode": "NAIVE", "hysteresis": 2}})
    assert load_config({"A": 1}) != load_config({"A": 2})
    assert load_config({"A": 1}) != load_config({})
    assert load_config({"seed": 1}) != load_config({})


def test_copy_and_pickle():
    config = load_config(EVERYTHING)
    assert hash(config.parallel) == hash(copy.deepcopy(config.parallel))
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert copy.copy(config).LAYERS == config.LAYERS


def test_repr_has_what_differs_from_the_defaults():
    assert repr(load_config({"seed": 1024})) == "Config()"
    assert repr(load_config({"seed": 3, "X": (1,)})) == "Config(seed=3, X=(1,))"
    assert str(load_config(EVERYTHING)).splitlines()[:5] == [
        "Config(",
        "    fp16=dict(mode='naive', loss_scale=128.0),",
        "    parallel=dict(tensor=dict(size=2, plan={'blocks.*': 'colwise'}), "
        "pipeline=dict(size=2, microbatches=4, non_split=('mask',)), data=dict(strategy='zero1')),",
        "    clip_grad_norm=dict(max_norm=1.0, norm_type=inf),",
        "    fused=False,",
    ]


@pytest.mark.parametrize("raw", [{}, EVERYTHING, {"bf16": {"mode": "torch"}}], ids=["empty", "everything", "bf16"])
def test_yaml_round_trip(raw, tmp_path):
    config = load_config(raw)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    loaded = load_config(tmp_path / "config.yaml")
    assert loaded == config
    assert loaded.user == config.user
    assert [type(value) for value in loaded.user.values()] == [
        str if isinstance(value, enum.Enum) else type(value) for value in config.user.values()
    ]


def test_third_party_nested_keys(dummy_plugin):
    problems = problems_of(fp16={"mode": "dummy_parts", "parts": ({"nmae": "x"}, {"name": 3})})
    assert problems == ["fp16.parts.nmae: unknown key; did you mean 'name'?", "fp16.parts.name: 3 is not a string"]


def test_third_party_options_round_trip(dummy_plugin, tmp_path):
    config = load_config({"fp16": {"mode": "dummy", "pair": (1, 2)}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("value", [Colour.RED, [object()], lambda: 3, 3j])
def test_yaml_names_what_it_cannot_hold(value):
    with pytest.raises(
        ConfigError, match=r"in the YAML form of the config:\n  - WHAT: YAML cannot hold .*; use numbers"
    ):
        load_config({"FINE": 1, "WHAT": value}).to_yaml()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "checkpoint: 3 is not a folder; write 'checkpoints' or dict(directory='checkpoints')"),
        (
            True,
            "checkpoint: True is not a folder; write 'checkpoints' or dict(directory='checkpoints'); to compute "
            "activations again in backward, set activation_checkpoint",
        ),
        ("", "checkpoint: '' is not a folder; write 'checkpoints' or dict(directory='checkpoints')"),
        ({"every": 3}, "checkpoint.directory: is required; give a string"),
        ({"directory": "x", "every": 0}, "checkpoint.every: 0 is not an integer >= 1 or None"),
        (
            {"directory": "x", "signals": ["SIGKILL"]},
            "checkpoint.signals: 'SIGKILL' cannot be caught by any program; leave it out (usual ones: 'SIGTERM', "
            "'SIGUSR1')",
        ),
        (
            {"directory": "x", "signals": ["SIGINT"]},
            "checkpoint.signals: 'SIGINT' is Ctrl-C, which ends the run at once; leave it out (usual ones: 'SIGTERM', "
            "'SIGUSR1')",
        ),
        (
            {"directory": "x", "signals": ["SIGTREM"]},
            "checkpoint.signals: 'SIGTREM' is not the name of a signal here; did you mean 'SIGTERM'?",
        ),
    ],
)
def test_checkpoint(value, problem):
    assert problems_of(checkpoint=value) == [problem]


def test_checkpoint_as_yaml(tmp_path):
    config = load_config({"checkpoint": {"directory": "x", "every": 5, "signals": ["SIGUSR2"]}, "resume": "auto"})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config
    assert config.checkpoint.every == 5
