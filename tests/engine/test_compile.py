"""The key `compile` in one process: what is compiled, that it runs and changes only the time, what is rejected."""

from __future__ import annotations

import copy
import os
import shutil

import pytest
import torch
from torch import nn

from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.utils.torch_private import is_compiled
from tests.support import compiling
from tests.support.models import (
    CLASSES,
    COMPUTE_DTYPES,
    FEATURES,
    MLP,
    MODES,
    TOLERANCES,
    full_weights,
    make_engine,
    make_loader,
    train,
)

COMPILE = {"compile": {"backend": compiling.NAME}}
BLOCKS = {"compile": {"backend": compiling.NAME, "scope": "blocks"}}
slow = pytest.mark.slow


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


def weights_of(config, model):
    engine = make_engine(config, model=model)
    train(engine)
    return full_weights(engine)


def compiled_names(engine):
    return [name for name, module in engine.model.named_modules() if is_compiled(module)]


@pytest.mark.promise("torch.compile")
@pytest.mark.parametrize("mode", ["torch_fp16", *(pytest.param(m, marks=slow) for m in ("naive_bf16", "apex_o2"))])
def test_each_mode_trains_as_without(mode, watch):
    """But for rounding: torch takes some operations apart, and rounds between their parts. `close` undoes it."""
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    expected = weights_of(config, MLP(dropout=0.3))
    assert watch.graphs == 0
    torch.manual_seed(0)
    engine = make_engine(config | COMPILE, model=MLP(dropout=0.3))
    train(engine)
    torch.testing.assert_close(full_weights(engine), expected, rtol=0, atol=TOLERANCES[mode])
    assert (watch.graphs, watch.forwards, watch.backwards, watch.breaks) == (1, 6, 6, [])
    assert watch.dtypes == {COMPUTE_DTYPES[mode]}
    engine.close()
    assert compiled_names(engine) == []
    engine.model(torch.randn(2, FEATURES))
    assert watch.forwards == 6


def test_blocks_that_are_alike_share_their_code_and_see_hooks_that_come_and_go(watch):
    """Of modules and of parameters. torch notices none by itself, once it has compiled a module."""
    engine = make_engine(BLOCKS, model=Deep(*[1.0] * 12))
    train(engine, max_batches=2)
    assert compiled_names(engine) == [f"blocks.{number}" for number in range(12)]
    assert (watch.graphs, watch.forwards, watch.breaks) == (1, 24, [])
    seen, block = [], engine.model.blocks[1]
    hooks = [m.register_forward_hook(lambda m, *_: seen.append(m)) for m in (block, block.layer)]
    hooks.append(block.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p)))
    train(engine, max_batches=1)
    assert list(map(id, seen)) == list(map(id, [block.layer, block, block.layer.weight]))
    for hook in hooks:
        hook.remove()
    train(engine, max_batches=1)
    assert len(seen) == 3


@slow
def test_blocks_that_differ_are_all_compiled(watch):
    """Of those with stochastic depth torch by itself would compile 8, and run the others as they are."""
    rates = [0.3 + 0.05 * number for number in range(12)]
    expected = weights_of({}, Deep(*rates))
    torch.testing.assert_close(weights_of(BLOCKS, Deep(*rates)), expected, rtol=0, atol=1e-5)
    assert watch.graphs >= 12
    assert watch.forwards == 12 * 6


class Row(nn.Module):
    def __init__(self, *rows: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.rows = nn.ModuleList(rows)


def test_which_modules_are_blocks():
    """Two or more of one class in a list, with modules of their own; of rows within rows the outermost."""
    block = Block(1.0)
    model = nn.ModuleDict(
        {
            "alike": nn.ModuleList([Block(1.0), Block(1.0)]),
            "plain": nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)),
            "alone": nn.ModuleList([Row(Block(1.0), Block(1.0)), nn.Linear(16, 16)]),
            "rows": nn.ModuleList([nn.Sequential(Block(1.0), Block(1.0)), nn.Sequential(Block(1.0), nn.GELU())]),
            "twice": nn.ModuleList([block, block]),
        }
    )
    found = compiled_names(make_engine({"compile": {"backend": "eager", "scope": "blocks"}}, model=model))
    assert found == ["alike.0", "alike.1", "alone.0.rows.0", "alone.0.rows.1", "rows.0.0", "rows.0.1", "twice.0"]


@slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
def test_inductor():
    """The code that it generates rounds a little otherwise."""
    expected = weights_of(MODES["torch_bf16"], Deep(1.0, 1.0))
    with compiling.watched() as watch:
        config = MODES["torch_bf16"] | {"compile": {"scope": "blocks", "fullgraph": True}}
        torch.testing.assert_close(weights_of(config, Deep(1.0, 1.0)), expected, rtol=0, atol=5e-3)
        assert watch.breaks == []


def test_models_that_are_compiled_already_or_have_no_blocks():
    compiled_layer = MLP()
    compiled_layer.first.compile(backend="eager")
    for model in (torch.compile(MLP(), backend="eager"), compiled_layer):
        with pytest.raises(IncompatibleConfigError, match="the model is already compiled; pass it uncompiled, or"):
            make_engine(COMPILE, model=model)
    with pytest.raises(IncompatibleConfigError, match=r"MLP has no repeated blocks .*; use scope='model'"):
        make_engine(BLOCKS)


TWO_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}}
PIPE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}


@pytest.mark.parametrize(
    ("config", "value", "message"),
    [
        ({"fp16": {"mode": "apex"}}, {}, "compile: O1's casts have no effect in compiled code; use mode='torch'"),
        ({"fp16": {"mode": "apex", "opt_level": "O2", "backend": "apex"}}, {}, "compile: compiled code does not call"),
        ({}, {"backend": "eager", "mode": "max-autotune"}, "compile.mode: only backend='inductor' has modes"),
        (PIPE, {"scope": "model"}, "compile.scope: 'model' is not possible with a pipeline"),
        ({"parallel": {"tensor": 2}}, {"fullgraph": True}, "compile.fullgraph: sharded layers wait for other ranks"),
        *(
            (config, value, f"compile.{key}: {value[key]!r} makes CUDA graphs, and with {why} > 1 the next call")
            for key, value, config, why in (
                ("mode", {"mode": "reduce-overhead"}, {"gradient_accumulation": 2}, "gradient_accumulation"),
                ("mode", {"mode": "max-autotune"}, TWO_LOSSES, "num_losses"),
                ("backend", {"backend": "cudagraphs"}, PIPE, "parallel.pipeline.size"),
            )
        ),
    ],
)
def test_rejections(config, value, message):
    def find(value):
        findings = check(load_config(config | {"compile": value}), 2, "cpu")
        return [str(finding) for finding in findings if finding.where.startswith("compile")]

    [line] = find({"enabled": True, **value})
    assert line.startswith(message)
    assert find({**value, "enabled": False}) == []


def test_modes_with_cuda_graphs_take_one_batch_per_update():
    for config in ({"compile": {"mode": "max-autotune"}}, {"compile": {"mode": "reduce-overhead"}}):
        assert check(load_config(config), 2) == []
    accumulated = {"gradient_accumulation": 4, "compile": {"mode": "max-autotune-no-cudagraphs"}}
    assert check(load_config(accumulated), 2) == []
    config = {"global_batch_size": 8, "compile": {"mode": "max-autotune"}}
    with pytest.raises(IncompatibleConfigError, match="makes CUDA graphs, and with gradient_accumulation > 1"):
        make_engine(config, loader=make_loader(8, batch_size=4))


@pytest.fixture
def marks(monkeypatch):
    """The modules that are called, and "step" where torch is told that one begins."""
    calls = []
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: calls.append("step"))
    monkeypatch.setattr("halfmesh.engine.compilation._compiled", lambda call, *_: call)
    return calls


GRAPHS = {"mode": "reduce-overhead"}


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        (GRAPHS | {"scope": "blocks"}, True),
        ({"backend": "cudagraphs", "scope": "blocks"}, True),
        ({"mode": "max-autotune-no-cudagraphs", "scope": "blocks"}, False),
        (GRAPHS, False),  # torch itself knows the steps of one function
    ],
    ids=str,
)
def test_steps_of_compiled_blocks_in_cuda_graphs_are_told_to_torch(options, marked, marks):
    """One begins with the first forward of an update, and with each evaluation that comes between two updates."""
    engine = make_engine({"compile": options}, model=Deep(1.0, 1.0))
    x, y = next(iter(make_loader()))

    def found():
        had = marks.count("step")
        marks.clear()
        return had

    for _ in range(2):
        loss = engine.criterion(engine(x), y) + engine.criterion(engine(x), y)
        engine.backward(loss)
        engine.step()
        assert found() == marked
    with torch.no_grad():
        engine.eval()(x)
        engine.model(x)
    assert found() == 2 * marked
    copied = copy.deepcopy(engine.model)
    copied(x)
    engine.close()
    engine.model(x)
    assert found() == 0


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_no_call_of_a_model_in_cuda_graphs_overwrites_gradients(scope, marks):
    engine = make_engine({"compile": GRAPHS | {"scope": scope}}, model=Deep(1.0, 1.0))
    x, y = next(iter(make_loader()))
    engine.backward(engine.criterion(engine(x), y))
    message = "called between engine.backward and engine.step, but compile.mode='reduce-overhead' makes CUDA graphs"
    with pytest.raises(InputError, match=message):
        engine(x)
    engine.step()
    engine(x)
