"""The key `compile` in one process: what is compiled, that it runs and changes only the time, what is rejected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.errors import IncompatibleConfigError, InputError
from halfmesh.utils.torch_private import is_compiled
from tests.support import compiling
from tests.support.models import FEATURES, MLP, MODES, TOLERANCES, full_weights, make_engine, make_loader, train

COMPILE = {"compile": {"backend": compiling.NAME}}
BLOCKS = {"compile": {"backend": compiling.NAME, "scope": "blocks"}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + nn.functional.gelu(self.layer(x))


def deep(count):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Sequential(*(Block() for _ in range(count))), nn.Linear(16, 4))


@pytest.fixture
def watch():
    with compiling.watched() as compiled:
        yield compiled


def compiled_names(engine):
    return [name for name, module in engine.model.named_modules() if is_compiled(module)]


@pytest.mark.promise("torch.compile")
def test_each_mode_trains_as_without(watch):
    """But for rounding: torch takes some operations apart, and rounds between their parts. `close` undoes it."""
    mode = "torch_fp16"
    config = MODES[mode] | {"gradient_accumulation": 2, "clip_grad_norm": 0.5}
    plain = make_engine(config, model=MLP(dropout=0.3))
    train(plain)
    assert watch.graphs == 0
    torch.manual_seed(0)
    engine = make_engine(config | COMPILE, model=MLP(dropout=0.3))
    train(engine)
    torch.testing.assert_close(full_weights(engine), full_weights(plain), rtol=0, atol=TOLERANCES[mode])
    assert (watch.graphs, watch.forwards, watch.backwards, watch.breaks) == (1, 6, 6, [])
    assert watch.dtypes == {torch.float16}
    engine.close()
    assert compiled_names(engine) == []
    engine.model(torch.randn(2, FEATURES))
    assert watch.forwards == 6


def test_blocks_that_are_alike_share_their_code_and_see_hooks_that_come_and_go(watch):
    """Of modules and of parameters. torch notices none by itself, once it has compiled a module."""
    engine = make_engine(BLOCKS, model=deep(12))
    train(engine, max_batches=2)
    assert compiled_names(engine) == [f"1.{number}" for number in range(12)]
    assert (watch.graphs, watch.forwards, watch.breaks) == (1, 24, [])
    seen, block = [], engine.model[1][1]
    hooks = [m.register_forward_hook(lambda m, *_: seen.append(m)) for m in (block, block.layer)]
    hooks.append(block.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p)))
    train(engine, max_batches=1)
    assert list(map(id, seen)) == list(map(id, [block.layer, block, block.layer.weight]))
    for hook in hooks:
        hook.remove()
    train(engine, max_batches=1)
    assert len(seen) == 3


def test_which_modules_are_blocks():
    """Two or more of one class in a list, with modules of their own; of rows within rows the outermost."""
    block, model = Block(), nn.Module()
    model.alike = nn.ModuleList([Block(), Block()])
    model.plain = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model.alone = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Linear(16, 16)])
    model.rows = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.GELU())])
    model.twice = nn.ModuleList([block, block])
    found = compiled_names(make_engine({"compile": {"backend": "eager", "scope": "blocks"}}, model=model))
    assert found == ["alike.0", "alike.1", "alone.0.0", "alone.0.1", "rows.0.0", "rows.0.1", "twice.0"]
    with pytest.raises(IncompatibleConfigError, match=r"MLP has no repeated blocks .*; use scope='model'"):
        make_engine(BLOCKS)


TWO_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}}
PIPE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2}}}
GRAPHS = {"mode": "reduce-overhead"}


@pytest.mark.parametrize(
    ("config", "value", "message"),
    [
        ({"fp16": {"mode": "apex"}}, {}, "compile: O1's casts have no effect in compiled code; use mode='torch'"),
        ({"fp16": {"mode": "apex", "opt_level": "O2", "backend": "apex"}}, {}, "compile: compiled code does not call"),
        ({"parallel": {"tensor": 2}}, {"fullgraph": True}, "compile.fullgraph: sharded layers wait for other ranks"),
        (TWO_LOSSES, {"mode": "max-autotune"}, "compile.mode: 'max-autotune' makes CUDA graphs, and with num_losses >"),
        (PIPE, {"backend": "cudagraphs"}, "compile.backend: 'cudagraphs' makes CUDA graphs, and with parallel.pipelin"),
    ],
)
def test_rejections(config, value, message):
    findings = check(load_config(config | {"compile": {"enabled": True, **value}}), 2, "cpu")
    [line] = [str(finding) for finding in findings if finding.where.startswith("compile")]
    assert line.startswith(message)


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
def test_steps_of_compiled_blocks_in_cuda_graphs_are_told_to_torch(options, marked, monkeypatch):
    """One begins with the first forward of an update, and with each evaluation that comes between two updates. No call
    may overwrite gradients."""
    marks = []
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: marks.append("step"))
    monkeypatch.setattr("halfmesh.engine.compilation._compiled", lambda call, *_: call)
    engine = make_engine({"compile": options}, model=deep(2))
    x, y = next(iter(make_loader()))
    for number in range(2):
        loss = engine.criterion(engine(x), y) + engine.criterion(engine(x), y)
        engine.backward(loss)
        if "cudagraphs" not in options.get("mode", ""):
            with pytest.raises(InputError, match=r"called between engine.backward and engine.step, but compile.*CUDA"):
                engine(x)
        engine.step()
        assert len(marks) == marked * (number + 1)
    with torch.no_grad():
        engine.eval()(x)
        engine.model(x)
    assert len(marks) == 4 * marked
    engine.close()
    engine.model(x)
    assert len(marks) == 4 * marked
