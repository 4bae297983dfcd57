"""The key `compile` in one process: compiled code runs, and changes nothing but the time that it takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from halfmesh import torch_private
from halfmesh.compilation import find_device_problem
from halfmesh.config.schema import CompileConfig
from halfmesh.errors import IncompatibleConfigError
from tests.support import compiling
from tests.support.models import (
    CLASSES,
    COMPUTE_DTYPES,
    FEATURES,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    full_weights,
    make_engine,
    make_loader,
    train,
)

COMPILED_MODES = [name for name in MODES if name != "apex_o1"]
COMPILE = {"compile": {"backend": compiling.NAME}}
BLOCKS = {"compile": {"backend": compiling.NAME, "scope": "blocks"}}
NO_COMPILER = find_device_problem(CompileConfig(), torch.device("cpu"))


class Block(nn.Module):
    """Adds something to its input, with a probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = nn.functional.gelu(self.layer(x))
        if self.probability < 1 and self.training:
            added = added * added.new_empty(len(x), 1).bernoulli_(self.probability)
        return x + added


class Deep(nn.Module):
    """A row of blocks, with something before and after it."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(map(Block, probabilities))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def watch():
    with compiling.watched() as compiled:
        yield compiled


def weights_of(config, **options):
    engine = make_engine(config, **options)
    train(engine)
    return full_weights(engine)


def assert_same(found, expected, mode="none"):
    """Equal but for rounding: torch takes some operations apart, and rounds between their parts."""
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[mode])


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_each_mode_trains_as_without(mode, watch):
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    expected = weights_of(config, model=MLP(dropout=0.3))
    assert watch.graphs == 0
    torch.manual_seed(0)
    found = weights_of(config | COMPILE, model=MLP(dropout=0.3))
    assert_same(found, expected, mode)
    assert (watch.graphs, watch.forwards, watch.backwards, watch.breaks) == (1, 6, 6, [])
    assert watch.dtypes == {COMPUTE_DTYPES[mode]}


def test_o3(watch):
    config = {"fp16": {"mode": "apex", "opt_level": "O3"}}
    assert_same(weights_of(config | COMPILE), weights_of(config), "apex_o2")
    assert (watch.forwards, watch.breaks, watch.dtypes) == (6, [], {torch.float16})


def test_blocks_that_are_alike_share_their_code(watch):
    engine = make_engine(BLOCKS, model=Deep(*[1.0] * 12))
    train(engine, max_batches=2)
    assert (watch.graphs, watch.forwards, watch.breaks) == (1, 24, [])


def test_blocks_that_differ_are_all_compiled(watch):
    """Of those with stochastic depth torch by itself would compile 8, and run the others as they are."""
    rates = [0.3 + 0.05 * number for number in range(12)]
    expected = weights_of({}, model=Deep(*rates))
    assert_same(weights_of(BLOCKS, model=Deep(*rates)), expected)
    assert watch.graphs >= 12
    assert watch.forwards == 12 * 6


def test_a_batch_of_another_size(watch):
    loader = make_loader(samples=20)  # 8, 8, 4
    expected = weights_of({}, loader=loader)
    engine = make_engine(COMPILE, loader=loader)
    train(engine)
    assert_same(full_weights(engine), expected)
    assert (watch.graphs, watch.forwards) == (2, 3)
    train(engine)
    engine(torch.randn(7, 8))
    assert watch.graphs == 2, "sizes have been variable since the second one"


@pytest.mark.parametrize(("dynamic", "more"), [(True, 0), (False, 2)])
def test_dynamic(dynamic, more, watch):
    engine = make_engine({"compile": {"backend": compiling.NAME, "dynamic": dynamic}})
    engine(torch.randn(6, FEATURES))
    first = watch.graphs
    for size in (5, 7, 6):
        engine(torch.randn(size, FEATURES))
    assert watch.graphs == first + more
    assert watch.forwards == 4


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["none", "torch_bf16", "naive_fp16"])
def test_evaluation_between_updates(mode, without_gradients, watch):
    found = {}
    for name, more in {"plain": {}, "compiled": COMPILE}.items():
        torch.manual_seed(0)
        engine = make_engine(MODES[mode] | more, model=MLP(dropout=0.5))
        outputs = []
        for _ in range(3):
            train(engine, max_batches=1)
            engine.eval()
            with without_gradients():
                outputs.append(engine(make_loader().dataset.tensors[0]).clone())
            engine.train()
        found[name] = torch.stack(outputs)
    difference = (found["compiled"] - found["plain"]).abs().max()
    assert difference < {"none": 1e-6, "naive_fp16": 2e-3, "torch_bf16": 1e-2}[mode]
    assert (found["plain"][0] - found["plain"][1]).abs().max() > 2e-2, "it has seen the updates between"
    assert watch.forwards == 6


def test_calls_in_one_scope_of_autocast(watch):
    """The cast weights that the scope keeps are not used after an update, by compiled code either."""
    found = []
    for more in ({}, BLOCKS):
        engine = make_engine(MODES["torch_bf16"] | more, model=Deep(1.0, 1.0), optimizer=adamw)
        with engine.autocast():
            train(engine)
        found.append(full_weights(engine))
    assert_same(*found, "torch_bf16")
    assert watch.forwards == 12


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_parameters(before, watch):
    engine = make_engine(COMPILE)
    if not before:
        train(engine, max_batches=1)
    seen = []
    for name, param in engine.model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    train(engine, max_batches=2)
    assert sorted(seen) == sorted(2 * [name for name, _ in engine.model.named_parameters()])


@pytest.mark.parametrize("config", [COMPILE, BLOCKS])
def test_hooks_of_modules_that_come_and_go(config, watch):
    """torch notices neither by itself, once it has compiled a module."""
    engine = make_engine(config, model=Deep(1.0, 1.0))
    x = torch.randn(8, 8)
    engine(x)
    seen = []
    block = engine.model.blocks[1]
    hooks = [m.register_forward_hook(lambda m, *_: seen.append(m)) for m in (block, block.layer)]
    engine(x)
    assert seen == [block.layer, block]
    for hook in hooks:
        hook.remove()
    engine(x)
    assert len(seen) == 2


def test_a_layer_that_is_frozen_for_a_while(watch):
    found = []
    for config in ({}, COMPILE):
        engine = make_engine(config)
        for frozen in (False, True, False):
            engine.model.first.requires_grad_(not frozen)
            before = engine.model.first.weight.detach().clone()
            train(engine, max_batches=1)
            assert torch.equal(engine.model.first.weight, before) == frozen
        found.append(full_weights(engine))
    assert_same(*found)
    assert watch.forwards == 3


def test_names_and_copies(watch):
    """An average of the weights is a copy of the model: it is not compiled, and has weights of its own."""
    engine = make_engine(MODES["naive_bf16"] | BLOCKS, model=Deep(1.0, 1.0))
    given = Deep(1.0, 1.0)
    assert list(engine.model.state_dict()) == list(given.state_dict())
    assert [type(m) for m in engine.model.modules()] == [type(m) for m in given.modules()]
    train(engine, max_batches=1)
    average = copy.deepcopy(engine.model)
    x = torch.randn(2, FEATURES).bfloat16()
    before = average(x)
    train(engine, max_batches=2)
    assert torch.equal(average(x), before)
    assert not torch.equal(engine.model(x), before)
    assert not any(torch_private.is_compiled(module) for module in average.modules())


def test_close_undoes_it(watch):
    model = MLP()
    engine = make_engine(MODES["naive_fp16"] | COMPILE, model=model)
    train(engine)
    assert torch_private.is_compiled(model)
    weights = full_weights(engine)
    engine.close()
    assert not torch_private.is_compiled(model)
    assert_same(dict(model.state_dict()), weights)
    count = watch.forwards
    model(torch.randn(2, 8))
    assert watch.forwards == count
    again = make_engine(COMPILE, model=model)
    train(again)
    assert watch.forwards == count + 6


def test_an_error_in_the_loop_undoes_it_too(watch):
    model = MLP()
    with pytest.raises(ZeroDivisionError), make_engine(COMPILE, model=model):
        1 / 0  # noqa: B018
    assert not torch_private.is_compiled(model)


def test_layers_of_torch_itself(watch):
    """Before 2.15 `module.compile()` does nothing for them, silently."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.TransformerEncoder(layer, 3), nn.Flatten(), nn.Linear(8, 4))
    expected = weights_of({}, model=copy.deepcopy(model))
    for config, calls in ((BLOCKS, 3), (COMPILE, 1)):
        before = watch.forwards
        assert_same(weights_of(config, model=copy.deepcopy(model)), expected)
        assert watch.forwards == before + calls * 6


def test_fullgraph(watch):
    class Asks(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 1e9 else 2 * x)

    config = {"compile": {"backend": compiling.NAME, "fullgraph": True}}
    train(make_engine(config), max_batches=1)
    with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"):
        train(make_engine(config, model=Asks()), max_batches=1)
    train(make_engine(COMPILE, model=Asks()), max_batches=1)
    assert watch.breaks


def test_the_plan_says_what_is_compiled(caplog, watch):
    with caplog.at_level("INFO", "halfmesh"):
        make_engine(BLOCKS, model=Deep(*[1.0] * 12))
        make_engine({"compile": {"backend": compiling.NAME, "dynamic": True, "fullgraph": True}})
        make_engine()
    lines = [line.strip() for line in caplog.text.splitlines() if line.startswith("  compile:")]
    assert lines == [
        "compile:    12 x Block with halfmesh_test, when first called",
        "compile:    the whole model with halfmesh_test, when first called, dynamic=True, fullgraph=True",
    ]


def test_a_model_that_is_compiled_already(watch):
    for model in (torch.compile(MLP(), backend="eager"), MLP()):
        model.first.compile(backend="eager")
        with pytest.raises(IncompatibleConfigError, match="the model is compiled already; pass it uncompiled, or"):
            make_engine(COMPILE, model=model)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("mode", ["none", "torch_bf16"])
def test_inductor(mode, watch):
    """The code that it generates rounds a little otherwise."""
    model = Deep(1.0, 1.0)
    expected = weights_of(MODES[mode], model=copy.deepcopy(model))
    found = weights_of(MODES[mode] | {"compile": {"scope": "blocks", "fullgraph": True}}, model=model)
    assert (counters["stats"]["unique_graphs"], watch.breaks) == (1, [])
    assert counters["inductor"]["pattern_matcher_count"] > 0
    limit = 1e-5 if mode == "none" else 5e-3
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < limit
